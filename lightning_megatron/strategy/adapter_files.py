"""``save_pretrained`` of adapters of PEFT under any layout.

No rank holds all of an adapter. So saving is collective where a layout splits the model: all ranks
call ``save_pretrained``, the tensors that PEFT would write, and only these, are gathered on the
first rank, and PEFT itself writes them there. What PEFT looks at beside tensors (which layers there
are, under which names) it finds in a copy of the model without values that is made before the model
is divided.
"""

import inspect
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatron.adoption.classes import CopiedWhole, become, own_class
from lightning_megatron.checkpoint.gather_state import gather_named
from lightning_megatron.comm.peers import Peers
from lightning_megatron.launch.store_barrier import StoreBarrier
from lightning_megatron.strategy.pretrained_models import refuse_copy_of_part
from lightning_megatron.whole.memory import own_weights


class SavedAdapters(CopiedWhole):
    """Class in front of a ``PeftModel`` of which this rank holds a part."""

    surrounds = ("save_pretrained",)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """Save the adapters as one process would; collective over all ranks."""
        save: Any = own_class(self).save_pretrained  # type: ignore[attr-defined]  # of PEFT
        given = inspect.signature(save).bind(self, save_directory, *args, **kwargs)
        given.apply_defaults()
        options = {**given.arguments, **given.arguments.pop("kwargs", {})}
        del options["self"]
        divided: _Divided | None = self.__dict__.get("_divided")
        if divided is None or options.get("state_dict") is not None:
            save(self, save_directory, *args, **kwargs)
            return
        what = f"save_pretrained({os.fspath(save_directory)!r})"
        divided.barrier.require_all(what)
        state = divided.gather(options["selected_adapters"], options["save_embedding_layers"])

        def write(_: list[None]) -> None:
            save(divided.whole, **{**options, "state_dict": state, "is_main_process": True})

        divided.peers.run(what, lambda: None, write)


class _Divided:
    """What is known of a ``PeftModel`` before it is divided.

    Args:
        module: the LightningModule that holds it.
        model: the model.
        name: its name there.
        group: all ranks, for objects; None for the default group.
    """

    def __init__(
        self, module: nn.Module, model: nn.Module, name: str, group: dist.ProcessGroup | None
    ) -> None:
        self._module = module
        self.peers = peers = Peers(group)
        self.barrier = StoreBarrier(f"save adapters {name}", range(peers.size), peers.rank)
        self._prefix = f"{name}." if name else ""
        self.whole: Any = _without_values(model, {})

    def refuse_copy(self) -> None:
        """Raise a `ConfigError` if this rank holds a part of the model."""
        refuse_copy_of_part(self._module)

    def gather(self, adapters: list[str] | None, embeddings: Any) -> dict[str, Tensor]:
        """Gather what PEFT saves of some adapters on the first rank; collective."""
        peft: Any = sys.modules["peft.utils.save_and_load"]
        known: dict[str, Tensor] = own_weights(self.whole.state_dict)(keep_vars=True)
        by_id = {id(tensor): name for name, tensor in known.items()}
        names: set[str] = set()
        for adapter in self.whole.peft_config if adapters is None else adapters:
            saved = peft.get_peft_model_state_dict(
                self.whole, state_dict=known, adapter_name=adapter, save_embedding_layers=embeddings
            )
            # What is no tensor of the model is computed from any of them.
            names |= {by_id[id(t)] for t in saved.values()} if _among(saved, by_id) else set(known)
        wanted = {self._prefix + name for name in names}
        found = gather_named(self._module, wanted, rank=0)
        return {name.removeprefix(self._prefix): tensor for name, tensor in found.items()}


def _among(saved: dict[str, Tensor], known: dict[int, str]) -> bool:
    return all(id(tensor) in known for tensor in saved.values())


def _without_values(module: nn.Module, made: dict[int, Any]) -> nn.Module:
    """Return a copy of a module whose tensors are on meta; all else is shared with it."""
    if id(module) in made:
        known: nn.Module = made[id(module)]
        return known
    twin = made[id(module)] = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {
        name: None if child is None else _without_values(child, made)
        for name, child in module._modules.items()
    }
    for kind in ("_parameters", "_buffers"):
        twin.__dict__[kind] = {
            name: None if tensor is None else made.setdefault(id(tensor), _on_meta(tensor))
            for name, tensor in module.__dict__[kind].items()
        }
    return twin


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    peft: Any = sys.modules.get("peft.peft_model")
    if peft is not None:
        yield from ((n, m) for n, m in module.named_modules() if isinstance(m, peft.PeftModel))


def save_adapters_together(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Have all ranks save adapters together; before the module is divided.

    Args:
        module: the LightningModule.
        group: all ranks, for objects; None for the default group.
    """
    for name, model in _models(module):
        divided = _Divided(module, model, name, group)
        become(model, SavedAdapters).__dict__["_divided"] = divided


def save_adapters_alone(module: nn.Module) -> None:
    """Undo `save_adapters_together`, where each rank has the whole again."""
    for _, model in _models(module):
        model.__dict__.pop("_divided", None)
