"""The import of checkpoints of Lightning's own strategies, in one process.

Lightning writes a single file (``torch.save``); its ModelParallelStrategy and FSDPStrategy write a
directory with shards of torch.distributed.checkpoint and a ``meta.pt``. All of these are pickles,
and a pickle can run any code. Here files are read as tensors and plain values only, the index of a
directory with the few classes that it needs, its tensors from their bytes. Other content is
refused, unless ``trust_pickle`` allows the file's author to run code on this machine. No other
function has that option, as our own checkpoints hold no pickle that is read.

The import takes weights and hyper-parameters. The result is marked as `PRETRAINED`, so training
starts from it at step 0.
"""

import os
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_megatron.checkpoint.chunks import Chunk, whole
from lightning_megatron.checkpoint.directory.dcp_metadata import manifest_of, read_metadata
from lightning_megatron.checkpoint.directory.hashed_files import FileEntry
from lightning_megatron.checkpoint.directory.manifest import (
    METADATA_FILE,
    is_checkpoint,
    local_path,
)
from lightning_megatron.checkpoint.load.dcp_reader import read_chunks
from lightning_megatron.checkpoint.load.reader import PRETRAINED
from lightning_megatron.checkpoint.offline.export import plain_hyper_parameters
from lightning_megatron.checkpoint.offline.offline_writer import (
    FileContent,
    groups,
    target_problems,
    write_in_parts,
)
from lightning_megatron.errors import ConfigError, DamagedCheckpointError, raise_if_any, summary

_META_FILE = "meta.pt"
_HYPER_PARAMETERS = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
_PREFIXES = ("state_dict.", "model.")
"""Prefixes of the module's names in directories of ModelParallelStrategy and FSDPStrategy."""


def import_lightning(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    trust_pickle: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 2**30,
    overwrite: bool = False,
) -> None:
    """Make a checkpoint directory from weights that Lightning saved.

    ``Trainer.fit(module, ckpt_path=path)`` then starts at step 0 from them, under any layout. A
    file is mapped into memory and a directory read in parts of ``max_shard_bytes``.

    Args:
        source: a ``.ckpt`` file of any Lightning strategy, a file with a plain ``state_dict``, or
            the directory that ModelParallelStrategy or FSDPStrategy made.
        path: the checkpoint directory to make.
        trust_pickle: whether ``source`` may run any code of its author; needed for
            hyper-parameters that are objects of your own classes.
        dtype: dtype of floating-point weights in the checkpoint; unchanged when None.
        max_shard_bytes: largest size of a file, unless a single tensor is larger.
        overwrite: whether to replace a checkpoint that is there.

    Raises:
        ConfigError: ``source`` is no such checkpoint, or cannot be read without trust. Nothing was
            written.
        CheckpointError: reading or writing failed; ``path`` is unchanged.
    """
    found, target = local_path(source), local_path(path)
    raise_if_any(target_problems(target, overwrite))
    opened = (_open_directory if found.is_dir() else _open_file)(found, trust_pickle)
    names = list(opened.tensors)
    if not names:
        raise ConfigError(f"{source}: must hold the weights of a module, and holds none")

    def chunks(names: list[str], values: Mapping[str, Tensor]) -> dict[str, Chunk]:
        return {
            name: replace(whole(_cast(values[name], dtype)), aliases=opened.aliases.get(name, ()))
            for name in names
        }

    parts = [
        FileContent(
            planned=chunks(group, opened.tensors),
            load=lambda group=group: chunks(group, opened.read(group)),  # type: ignore[misc]
        )
        for group in groups(((n, t.nbytes) for n, t in opened.tensors.items()), max_shard_bytes)
    ]
    state = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        _HYPER_PARAMETERS: plain_hyper_parameters(opened.hyper_parameters),
        PRETRAINED: {"format": "lightning"},
    }
    write_in_parts(target, parts, state)


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """An open checkpoint of Lightning."""

    tensors: Mapping[str, Tensor]
    """Shape and dtype of every weight, on the meta device."""
    read: Callable[[list[str]], Mapping[str, Tensor]]
    """Function that returns the values of some weights."""
    hyper_parameters: Mapping[str, Any]
    aliases: Mapping[str, tuple[str, ...]]
    """Further names of shared weights."""


def _open_file(file: Path, trust_pickle: bool) -> _Opened:
    content = _load(file, trust_pickle)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{file}: it holds a {type(content).__name__}, not a checkpoint")
    state = content.get("state_dict", content)
    values = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if others := [str(name) for name in state if name not in values]:
        rank_zero_warn(f"{file}: entries that are no tensors are left out: {summary(others)}")
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, value in values.items():
        same = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape)
        owner = first.setdefault(same, name) if value.numel() else name
        if owner != name:
            aliases[owner] = (*aliases.get(owner, ()), name)
    own = {n: v for n, v in values.items() if not any(n in a for a in aliases.values())}
    return _Opened(
        tensors={name: torch.empty_like(value, device="meta") for name, value in own.items()},
        read=lambda names: {name: own[name].contiguous() for name in names},
        hyper_parameters=content.get(_HYPER_PARAMETERS, {}),
        aliases=aliases,
    )


def _open_directory(directory: Path, trust_pickle: bool) -> _Opened:
    if is_checkpoint(directory):
        raise ConfigError(
            f"{directory}: is a checkpoint of MegatronStrategy already; nearest valid: this path "
            "as ckpt_path, without an import"
        )
    if not (directory / METADATA_FILE).is_file():
        raise ConfigError(
            f"{directory}: has no {METADATA_FILE}, so it is no sharded checkpoint; nearest "
            "valid: the directory or file that Lightning's ModelCheckpoint made"
        )
    metadata = _module_index(_index(directory, trust_pickle))
    sizes = {e.name: FileEntry(size=e.stat().st_size) for e in os.scandir(directory) if e.is_file()}
    manifest = manifest_of(metadata, sizes)
    entries = manifest.tensors
    prefix = _prefix(entries)

    def empty(stored: str, device: str) -> Tensor:
        entry = entries[stored]
        return torch.empty(entry.shape, dtype=entry.torch_dtype, device=device)

    def read(names: list[str]) -> dict[str, Tensor]:
        values = {name: empty(prefix + name, "cpu") for name in names}
        stored = {name: prefix + name for name in names}
        read_chunks(directory, manifest, {n: whole(v) for n, v in values.items()}, stored)
        return values

    meta = directory / _META_FILE
    content = _load(meta, trust_pickle) if meta.is_file() else {}
    return _Opened(
        tensors={stored.removeprefix(prefix): empty(stored, "meta") for stored in entries},
        read=read,
        hyper_parameters=content.get(_HYPER_PARAMETERS, {}),
        aliases={},
    )


def _load(file: Path, trust_pickle: bool) -> Any:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": not trust_pickle}
    try:
        try:
            return torch.load(file, mmap=True, **options)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            return torch.load(file, **options)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    except pickle.UnpicklingError as error:
        cause = "damaged, or not a file of torch.save"
        if not trust_pickle:
            cause = (
                "it may hold objects beside tensors and plain values, and reading those runs code "
                "of the file; nearest valid: trust_pickle=True (--trust-pickle), if you trust its "
                "author"
            )
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{file}: {cause} ({reason})") from error


def _index(directory: Path, trust_pickle: bool) -> Metadata:
    try:
        return read_metadata(directory)
    except DamagedCheckpointError as error:
        if not trust_pickle:
            raise ConfigError(
                f"{error}; nearest valid: trust_pickle=True (--trust-pickle), if you trust its "
                "author"
            ) from error
    with (directory / METADATA_FILE).open("rb") as file:
        trusted: Metadata = pickle.load(file)
    return trusted


def _module_index(index: Metadata) -> Metadata:
    """Return an index with only the tensors of the module."""
    entries = {
        name: entry
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    prefix = _prefix(entries)
    kept: dict[str, Any] = {n: entry for n, entry in entries.items() if n.startswith(prefix)}
    places = {key: place for key, place in index.storage_data.items() if key.fqn in kept}
    return replace(index, state_dict_metadata=kept, storage_data=places, planner_data=None)


def _prefix(names: Mapping[str, Any]) -> str:
    return next((p for p in _PREFIXES if any(name.startswith(p) for name in names)), "")


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
