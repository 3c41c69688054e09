"""Exports of a checkpoint outside training, in one process without process groups.

Every function reads a checkpoint of any layout, a directory or a file, and needs the memory of the
whole model (`load_tensor`: of one tensor or less).
"""

import io
import logging
import os
import pickle
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path, PurePath
from typing import Any, TypeVar

import lightning.pytorch as pl
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_megatron._lightning.saving import module_from
from lightning_megatron.checkpoint.chunks import whole
from lightning_megatron.checkpoint.directory.manifest import local_path
from lightning_megatron.checkpoint.load.file_reader import open_checkpoint
from lightning_megatron.checkpoint.load.reader import MODEL_PREFIX, CheckpointReader

logger = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=pl.LightningModule)

_LIGHTNING_KEYS = ("epoch", "global_step", "pytorch-lightning_version", "hparams_name")


def load_full_state_dict(
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu", aliases: bool = True
) -> dict[str, Any]:
    """Read the weights of a checkpoint as the ``state_dict`` of the unpartitioned module.

    Args:
        path: a checkpoint, a directory or a file.
        device: device of the tensors.
        aliases: whether a shared parameter appears under each of its names (as one tensor), as in
            ``Module.state_dict``, or under the first only.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    return _full_state(open_checkpoint(path, alone=True), torch.device(device), aliases)


def load_tensor(
    path: str | os.PathLike[str],
    name: str,
    index: int | slice | None = None,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Read one parameter or buffer of a checkpoint, or a part of it along dimension 0.

    Only that part of the file is in memory, so one expert can be read from a stack of any size::

        load_tensor(path, "trunk.layers.0.mlp.experts.up", 3)  # [mlp_size, hidden_size]

    Every call verifies the checkpoint; a `CheckpointReader` that is kept reads many tensors
    (`CheckpointReader.tensor`).

    Args:
        path: a checkpoint, a directory or a file.
        name: name in the ``state_dict`` of the unpartitioned module.
        index: index along dimension 0, which is then left out, or a slice; all of it when None.
        device: device of the tensor.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
        ConfigError: it has no such tensor, or the tensor no such index.
    """
    return open_checkpoint(path, alone=True).tensor(name, index, device=device)


def export_safetensors(
    path: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    aliases: bool = True,
) -> None:
    """Write the weights of a checkpoint to one safetensors file.

    ``module.load_state_dict(safetensors.torch.load_file(file))`` then works on the plain module.

    Args:
        path: a checkpoint, a directory or a file.
        file: the file to write; an existing one is replaced when the new one is complete.
        dtype: dtype of floating-point tensors; the stored one when None.
        aliases: whether to write a shared parameter under each of its names; False makes a smaller
            file, which ``safetensors.torch.load_model`` reads.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    state = load_full_state_dict(path, aliases=aliases)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    for name in state.keys() - tensors.keys():
        logger.warning("%r is not a tensor and is left out", name)
    seen: set[int] = set()
    for name, value in tensors.items():
        cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
        # safetensors refuses two names for one memory.
        tensors[name] = cast.clone() if cast.data_ptr() in seen else cast
        seen.add(tensors[name].data_ptr())
    _replace_file(local_path(file), lambda new: save_file(tensors, new, metadata={"format": "pt"}))


def load_from_checkpoint(
    module_class: type[ModuleT],
    path: str | os.PathLike[str],
    map_location: torch.device | str | None = None,
    *,
    strict: bool | None = None,
    weights_only: bool = True,
    **hyper_parameters: Any,
) -> ModuleT:
    """Return a LightningModule from a checkpoint, like ``LightningModule.load_from_checkpoint``.

    Args:
        module_class: the class of the module; ``configure_model`` is called if it is overridden.
        path: a checkpoint of any layout, or a file that Lightning wrote.
        map_location: device of the module; the CPU when None.
        strict: whether names that only the module or only the checkpoint has are an error; the
            module's own setting when None.
        weights_only: whether objects of classes that are not registered with
            ``torch.serialization.add_safe_globals`` are left out, which is said. False runs code of
            whoever wrote the checkpoint.
        hyper_parameters: arguments of the module that override the stored ones.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    reader = open_checkpoint(path, alone=True, weights_only=weights_only)
    checkpoint = {**reader.state, "state_dict": _full_state(reader, torch.device("cpu"), True)}
    key = module_class.CHECKPOINT_HYPER_PARAMS_KEY
    checkpoint[key] = {**checkpoint.get(key, {}), **hyper_parameters}
    module = module_from(module_class, checkpoint, strict=strict, **hyper_parameters)
    assert isinstance(module, module_class)
    return module.to(map_location) if map_location is not None else module


def convert_to_lightning(path: str | os.PathLike[str], file: str | os.PathLike[str]) -> None:
    """Write a stock Lightning checkpoint file with the weights and hyper-parameters.

    ``Module.load_from_checkpoint(file)`` reads it with ``weights_only=True``: configuration objects
    become dicts, enums their values, paths strings.

    Args:
        path: a checkpoint, a directory or a file.
        file: the file to write; an existing one is replaced when the new one is complete.

    Raises:
        CheckpointError: the checkpoint does not exist or is damaged.
    """
    reader = open_checkpoint(path, alone=True)
    checkpoint = {key: reader.state[key] for key in _LIGHTNING_KEYS if key in reader.state}
    checkpoint.setdefault("pytorch-lightning_version", version("lightning"))
    checkpoint["state_dict"] = _full_state(reader, torch.device("cpu"), True)
    checkpoint[pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY] = plain_hyper_parameters(
        reader.state.get(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, {})
    )
    _replace_file(local_path(file), lambda new: torch.save(checkpoint, new))


def _full_state(reader: CheckpointReader, device: torch.device, aliases: bool) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    for name in reader.model_names():
        entry = reader.entry(f"{MODEL_PREFIX}.{name}")
        assert entry is not None
        tensors[name] = torch.empty(entry.shape, dtype=entry.torch_dtype, device=device)
    reader.read({f"{MODEL_PREFIX}.{name}": whole(tensor) for name, tensor in tensors.items()})
    state: dict[str, Any] = {**tensors, **reader.extras}
    if aliases:
        known = {alias: n for alias, n in reader.manifest.aliases.items() if n in tensors}
        state |= {alias: tensors[name] for alias, name in known.items() if alias not in state}
    return state


def _replace_file(file: Path, write: Callable[[Path], None]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        write(new)
        os.replace(new, file)
    finally:
        new.unlink(missing_ok=True)


def plain_hyper_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as values that ``torch.load(weights_only=True)`` reads."""
    plain = {}
    for key, value in values.items():
        candidate = _plain(value)
        buffer = io.BytesIO()
        torch.save(candidate, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError:
            logger.warning("Hyper-parameter %r is not a plain value and is left out", key)
            continue
        plain[key] = candidate
    return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        plain = [_plain(v) for v in value]
        return plain if isinstance(value, list) else tuple(plain)
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, PurePath):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value
