"""Insides of modules and of checkpoints: state_dicts, batch norms, the index of DCP (2.11-2.13)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.utils._pytree import tree_any as tree_any
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

__all__ = ["IncompatibleKeys", "tree_any"]

_ORDINARY = (nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)
"""The latter only adds a count that files of torch 0.4 lack."""


def tensor_without_memory(
    kind: type[Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Any:
    """Make an instance of a subclass of Tensor that has no values; torch has no public way."""
    return Tensor._make_wrapper_subclass(kind, torch.Size(shape), dtype=dtype, device=device)


def call_as_tensor(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch on instances of subclasses as on any tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def loads_itself(module: nn.Module) -> bool:
    """Whether a module's class decides what it takes from a state_dict."""
    return type(module)._load_from_state_dict not in _ORDINARY


def saves_itself(module: nn.Module) -> bool:
    """Whether a module's class decides what a state_dict holds of its tensors."""
    return type(module)._save_to_state_dict is not nn.Module._save_to_state_dict


def is_fsdps(hook: Any) -> bool:
    """Whether a hook on state_dict is FSDP2's, which moves parameters only."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def state_hooks(module: nn.Module) -> list[Any]:
    """Hooks on ``state_dict`` of a module itself, but for FSDP2's."""
    hooks = (*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values())
    return [hook for hook in hooks if not is_fsdps(hook)]


def first_state_hook(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Have a hook change what ``state_dict`` holds of a module before other hooks see it."""
    handle: RemovableHandle = module._register_state_dict_hook(hook)  # type: ignore[no-untyped-call]
    module._state_dict_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


def first_load_hook(module: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Have a hook run when ``load_state_dict`` is through with a module, before other hooks."""
    handle: RemovableHandle = module.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
    module._load_state_dict_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


StorageInfo = _StorageInfo
"""Where the bytes of a chunk are, in the index of a distributed checkpoint (2.11-2.13)."""


def describe_saved(file: BinaryIO) -> tuple[Any, int]:
    """Load what ``torch.save`` wrote without its numbers, and say where those of a tensor begin.

    Private: ``_checkpoint_offset`` of a storage, which torch's notes on serialization document for
    FakeTensorMode, and which ``map_location="meta"`` sets, too (2.11-2.15).

    Returns:
        A tensor on the meta device and the offset of its storage in the file; else any other
        object and 0.
    """
    found = torch.load(file, map_location="meta", weights_only=True)
    if not isinstance(found, Tensor):
        return found, 0
    offset = found.untyped_storage()._checkpoint_offset
    if offset is None:
        raise ValueError("a tensor without numbers")
    return found, offset


DCP_METADATA_GLOBALS = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
                *("StorageMeta", "TensorProperties", "TensorStorageMetadata"),
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        # Where the writer of torch wrote; `pathlib._local` since Python 3.13.
        *((home, "PosixPath") for home in ("pathlib", "pathlib._local")),
    }
)
"""All that the pickled index of a distributed checkpoint refers to, beside dtypes (2.11-2.13).

Its reader unpickles it without restriction; ours allows these names only."""


class AnyBatchNorm(nn.BatchNorm1d):
    """BatchNorm1d, BatchNorm2d and BatchNorm3d in one (2.11-2.13).

    They differ in `_check_input_dim` alone, by which `_BatchNorm.forward` checks its input.
    """

    def check_input(self, input: Tensor) -> None:
        """Raise a ValueError where there are no channels."""
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dims, got {input.dim()}")

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        self.check_input(input)
