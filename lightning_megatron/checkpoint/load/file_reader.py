"""The reader of checkpoints that are files: ours (save/file_save.py), and Lightning's own.

The file is mapped into memory, and each rank copies its part of each tensor. Before anything is
parsed the CRC-32 of every record of the archive is compared, which ranks share. What is no tensor
is read without code of its author (trainer_state/plain_pickle.py), unless the user trusts it, or
has a plugin that reads files in a way of its own.

Optimizer states in a file number the parameters. In our files the names stand beside the numbers.
Lightning's have none: the parameters of the optimizers that are to be restored, in their order,
are those that were saved.
"""

import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_megatron._lightning.saving import versions_in
from lightning_megatron._torch.saved_files import begin_of_numbers, begin_of_record
from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.directory.chunk_runs import Run
from lightning_megatron.checkpoint.directory.hashed_files import FileEntry
from lightning_megatron.checkpoint.directory.manifest import Manifest, TensorEntry
from lightning_megatron.checkpoint.directory.storage import AnyPath, storage_path
from lightning_megatron.checkpoint.load.reader import MODEL_PREFIX, CheckpointReader
from lightning_megatron.checkpoint.save.file_save import FILE_KEY
from lightning_megatron.checkpoint.save.save_plan import OPTIMIZER_PREFIX
from lightning_megatron.checkpoint.trainer_state.plain_pickle import load_plain, tell_left_out
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, ConfigError, DamagedCheckpointError, summary

OptimizerNames = Sequence[Sequence[str]]
"""Names of the parameters of each optimizer, in the order of its groups."""

_BLOCK = 1 << 24
"""Bytes that are read at once."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """How checkpoints are opened; called with a path, it opens one. Collective."""

    group: dist.ProcessGroup | None = None
    """Ranks that read; all when None."""
    alone: bool = False
    """Whether this process reads alone, even if there are process groups."""
    weights_only: bool = True
    """Whether objects of classes that are not registered with
    ``torch.serialization.add_safe_globals`` are left out. False runs code of whoever wrote the
    checkpoint."""
    optimizer_names: OptimizerNames | None = None
    """Names of the parameters of each optimizer of this run, for files that have none; None to
    leave their optimizer state out."""
    load_file: Callable[..., Any] | None = None
    """``load_checkpoint`` of a `CheckpointIO` of the user's, which reads what is in a file; None
    for this package's way."""

    def __call__(self, path: str | os.PathLike[str]) -> CheckpointReader:
        """Open a checkpoint, a directory or a file.

        Args:
            path: the checkpoint; the first rank's value is used.

        Raises:
            DamagedCheckpointError: the checkpoint is not what was written.
            CheckpointError: the checkpoint does not exist or cannot be read.
            ConfigError: it is a directory, and the user's plugin reads files.
        """
        peers = Peers(self.group, alone=self.alone)
        place, is_file = peers.broadcast(_look(path))
        if is_file:
            return FileReader(place, self)
        if self.load_file is not None:
            raise ConfigError(
                f"{place} is a directory, and {self.load_file.__qualname__} reads files; nearest "
                "valid: checkpoint=CheckpointConfig(format='file') in the run that saves, or this "
                "run without the plugin"
            )
        return CheckpointReader(
            place, group=self.group, alone=self.alone, weights_only=self.weights_only
        )


def open_checkpoint(
    path: str | os.PathLike[str], *, alone: bool = False, weights_only: bool = True
) -> CheckpointReader:
    """Open a checkpoint, a directory or a file; arguments and errors are those of `Opening`."""
    return Opening(alone=alone, weights_only=weights_only)(path)


def _look(path: str | os.PathLike[str]) -> tuple[AnyPath, bool]:
    place = storage_path(path)
    return place, isinstance(place, Path) and place.is_file()


class FileReader(CheckpointReader):
    """An open, verified file; opening is collective.

    Args:
        path: the file.
        opening: how it is opened.
    """

    def __init__(self, path: AnyPath, opening: Opening) -> None:
        self._optimizer_names = opening.optimizer_names
        self._load_file = opening.load_file
        self._tensors: dict[str, Tensor] = {}
        super().__init__(
            path, group=opening.group, alone=opening.alone, weights_only=opening.weights_only
        )

    @override
    def _locate(self, path: str | os.PathLike[str]) -> AnyPath:
        return storage_path(path)

    @override
    def _verify(self) -> None:
        self.peers.run(self.what, self._check_share, _refuse)

    def _check_share(self) -> list[str]:
        """Return the records of this rank's share that are not what was written."""
        try:
            with zipfile.ZipFile(os.fspath(self.directory)) as archive:
                records = sorted(archive.infolist(), key=lambda record: -record.file_size)
                mine = records[self.peers.rank :: self.peers.size]
                bad = [record for record in mine if not _is_intact(archive, record)]
        except zipfile.BadZipFile as error:
            raise DamagedCheckpointError(f"{self.directory}: {error}") from error
        except OSError as error:
            raise CheckpointError(f"{self.directory}: cannot be read: {error}") from error
        return [f"{self._holds(record)} is not what was written" for record in bad]

    def _holds(self, record: zipfile.ZipInfo) -> str:
        """Return what a record holds."""
        name = record.filename.partition("/")[2]
        try:
            content, _ = load_plain(os.fspath(self.directory), map_location="meta")
            tensors = dict(_tensors_in(content))
            begins = {place: begin_of_numbers(tensor) for place, tensor in tensors.items()}
            with open(self.directory, "rb") as file:
                begin = begin_of_record(file, record)
        except Exception:  # the pickle is what is damaged
            return f"record {name}"
        held = [place for place, at in begins.items() if at == begin]
        return f"tensor {summary(held)}" if held else f"record {name}"

    @override
    def _read(self) -> list[str]:
        content = self._load()
        if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
            raise CheckpointError(
                f"{self.directory}: holds no state_dict of a LightningModule; nearest valid: "
                "module.load_state_dict for weights alone"
            )
        about = content.pop(FILE_KEY, {})
        state_dict = content.pop("state_dict")
        optimizers = content.pop("optimizer_states", [])
        self.state, self.extras, self.optimizers = content, {}, []
        aliases = self._take_weights(state_dict, about.get("extras", ()))
        versions = versions_in(state_dict)
        self.versions = {n: v for n, v in versions.items() if v != 1} if versions else None
        names = about.get("optimizer_names", self._optimizer_names)
        if names is not None:
            names = [[aliases.get(name, name) for name in own] for own in names]
            kinds = about.get("optimizer_kinds", [None] * len(optimizers))
            self._take_optimizers(optimizers, names, kinds)
        self.manifest = Manifest(
            step=content.get("global_step"),
            epoch=content.get("epoch"),
            taken=about.get("taken"),
            layout=about.get("layout", {}),
            versions=about.get("versions", {}),
            aliases=aliases,
            optimizers=len(optimizers),
            files={self.directory.name: FileEntry(size=os.path.getsize(self.directory))},
            tensors={name: _entry(tensor) for name, tensor in self._tensors.items()},
        )
        return []

    def _load(self) -> Any:
        file, options = os.fspath(self.directory), {"map_location": "cpu", "mmap": True}
        try:
            if self._load_file is not None:  # called as Lightning does
                return self._load_file(file, weights_only=self.weights_only)
            if not self.weights_only:
                return torch.load(file, weights_only=False, **options)  # type: ignore[arg-type]
            content, left_out = load_plain(file, **options)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        except (pickle.UnpicklingError, ImportError, AttributeError) as error:
            remedy = "; nearest valid: weights_only=False, if you trust its author"
            raise CheckpointError(
                f"{file}: cannot be read: {error}{remedy if self.weights_only else ''}"
            ) from error
        if self.peers.is_first:
            tell_left_out(file, left_out)
        return content

    def _take_weights(self, state: Mapping[str, Any], extras: Sequence[str]) -> dict[str, str]:
        """Take the entries of a state_dict; return the names that are aliases of others."""
        first: dict[tuple[Any, ...], str] = {}
        aliases: dict[str, str] = {}
        for name, value in state.items():
            plain = isinstance(value, Tensor) and value.layout is torch.strided
            if not plain or name in extras:
                self.extras[name] = value
                continue
            place = value.untyped_storage().data_ptr(), value.storage_offset(), value.shape
            owner = first.setdefault(place, name) if value.numel() else name
            if owner != name:
                aliases[name] = owner
            else:
                self._tensors[f"{MODEL_PREFIX}.{name}"] = value.detach()
        return aliases

    def _take_optimizers(
        self, saved: Sequence[Any], names: OptimizerNames, kinds: Sequence[str | None]
    ) -> None:
        """Take the state of the optimizers by the names of their parameters."""
        if len(saved) != len(names):
            return  # the comparison with the run's says so (collective_io)
        for index, (one, own, kind) in enumerate(zip(saved, names, kinds, strict=True)):
            numbers = [n for group in one["param_groups"] for n in group["params"]]
            if len(numbers) != len(own):
                raise ConfigError(
                    f"{self.directory}: optimizer {index} has {len(numbers)} parameters there and "
                    f"{len(own)} here, and no names; nearest valid: the optimizers of the run that "
                    "wrote it, without pp, or "
                    "checkpoint=CheckpointConfig(exclude=['optimizer', 'lr_schedulers'])"
                )
            name_of = dict(zip(numbers, own, strict=True))
            values: dict[str, dict[str, Any]] = {}
            for number, state in one["state"].items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        stored = f"{OPTIMIZER_PREFIX}.{index}.{name_of[number]}.{key}"
                        self._tensors[stored] = value
                    else:
                        values.setdefault(name_of[number], {})[key] = value
            groups = [
                {
                    "index": place,
                    "options": {k: v for k, v in group.items() if k not in _BOOKKEEPING},
                    "parameters": [name_of[n] for n in group["params"]],
                }
                for place, group in enumerate(one["param_groups"])
            ]
            self.optimizers.append({"kind": kind, "values": values, "groups": groups})

    @override
    def read(self, chunks: Mapping[str, Chunk], stored: Mapping[str, str] | None = None) -> None:
        for name, chunk in chunks.items():
            whole = self._tensors[name if stored is None else stored[name]]
            with torch.no_grad():
                chunk.tensor.copy_(chunk.cut(whole))


_BOOKKEEPING = frozenset({"params", "param_names"})


def _entry(tensor: Tensor) -> TensorEntry:
    shape = tuple(tensor.shape)
    run = Run(part=0, offsets=(0,) * len(shape), sizes=shape)
    return TensorEntry(dtype=str(tensor.dtype).removeprefix("torch."), shape=shape, runs=(run,))


def _is_intact(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    """Return whether the bytes of a record are those that were written."""
    try:
        with archive.open(record) as file:
            while file.read(_BLOCK):  # which compares the CRC-32 at the end
                pass
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        return False
    return record.compress_type == zipfile.ZIP_STORED


def _tensors_in(value: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested containers, with their places."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors_in(item, f"{place}[{number}]")


def _refuse(found: Sequence[Sequence[str]]) -> None:
    if faults := [fault for faults in found for fault in faults]:
        raise DamagedCheckpointError(summary(faults))
