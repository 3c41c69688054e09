"""A checkpoint as one file: what Lightning itself writes, under any layout.

The file holds Lightning's dictionary as one process would have it. ``state_dict`` has whole tensors
in the order of the whole module. ``optimizer_states`` has the ``state_dict`` of each optimizer, in
which numbers stand for parameters; their names stand beside it, so that the state is found again
where another layout numbers them differently. So ``torch.load`` and ``load_from_checkpoint`` read
it in any process, and a run without this package goes on from it.

All ranks gather one tensor after the other, and the first writes each as it comes (file_writer.py):
it has memory for one at a time. What it holds in full already travels nowhere. If it fails, the
others learn of it when all are through.
"""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatron._lightning.saving import with_versions
from lightning_megatron._torch.saved_files import placeholder
from lightning_megatron.checkpoint.chunks import ChunkForm, assemble, describe
from lightning_megatron.checkpoint.directory.commit import FileStaging, Staging
from lightning_megatron.checkpoint.directory.hashed_files import FileEntry
from lightning_megatron.checkpoint.directory.manifest import Manifest, library_versions
from lightning_megatron.checkpoint.directory.storage import storage_path
from lightning_megatron.checkpoint.load.reader import MODEL_PREFIX
from lightning_megatron.checkpoint.optimizer_state import OptimizerSnapshot, merge_snapshots
from lightning_megatron.checkpoint.save.file_writer import TensorFile
from lightning_megatron.checkpoint.save.save_plan import OPTIMIZER_PREFIX, all_chunks
from lightning_megatron.checkpoint.save.write_error import check_room, write_error
from lightning_megatron.checkpoint.trainer_state.codec import pickling_problems
from lightning_megatron.checkpoint.trainer_state.state_files import RankState, rank_state
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError, raise_if_any

logger = logging.getLogger(__name__)

FILE_KEY = "lightning_megatron_file"
"""Key of what this package knows of a file, beside Lightning's own keys."""

Forms = dict[str, tuple[ChunkForm, tuple[str, ...]]]
"""Forms and aliases of the chunks of a rank, by name."""


class FileSave:
    """A checkpoint that is about to be written to one file.

    Args:
        path: the file to make; the first rank's value is used.
        model: the result of `model_chunks`.
        state: Lightning's checkpoint dictionary without model and optimizers.
        optimizers: the results of `capture_optimizer`.
        layout: degrees of parallelism.
        modules: names of the modules of this rank, in the order of ``named_modules``.
        device: device on which the ranks exchange tensors.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: Mapping[str, Any],
        state: Mapping[str, Any],
        *,
        optimizers: Sequence[OptimizerSnapshot],
        layout: Mapping[str, int],
        modules: Iterable[str],
        device: torch.device,
    ) -> None:
        target = storage_path(path)
        if not isinstance(target, Path):
            raise ConfigError(
                f"{target}: checkpoint.format='file' writes to a file system of the machine; "
                "nearest valid: format='directory'"
            )
        self.target = target
        self._state = state
        self._chunks = all_chunks(model, optimizers)
        self._own = rank_state(model, optimizers)
        self._names = list(model)
        self._layout = dict(layout)
        self._modules = list(modules)
        self._device = device

    @property
    def step(self) -> int | None:
        """Optimizer steps of the saved state."""
        return self._state.get("global_step")

    def write(self, peers: Peers, stop: Callable[[], bool] = lambda: False) -> Manifest | None:
        """Write and publish the file; collective.

        Args:
            peers: the ranks that save: all.
            stop: not asked, as training waits.

        Raises:
            ConfigError: a value cannot be pickled.
            CheckpointError: the save failed on the first rank; the target is unchanged.
        """
        what = f"saving {self.target}"
        target: Path = peers.broadcast(self.target)
        forms: list[Forms] = peers.all_gather({n: describe(c) for n, c in self._chunks.items()})
        ranks = peers.gather((self._own, self._names, self._modules))
        writing: list[_Writing] = []  # on the first rank

        def begin(_: object) -> None:
            assert ranks is not None
            assembly = _Assembly(forms, *zip(*ranks, strict=True))
            content = assembly.content(self._state, self._layout)
            writing.append(_Writing(target, content, assembly.placeholders))

        try:
            peers.run(what, lambda: None, begin)
            for name in sorted(set().union(*forms)):
                value = self._gathered(name, forms, keep=bool(writing) and writing[0].goes_on)
                if writing and value is not None:
                    writing[0].put(name, value)
            size = peers.run(what, lambda: None, lambda _: writing[0].finish())
        finally:
            for one in writing:
                one.close()
        return Manifest(
            step=self.step,
            epoch=self._state.get("epoch"),
            layout=self._layout,
            files={target.name: FileEntry(size=size)},
        )

    def _gathered(self, name: str, forms: list[Forms], *, keep: bool) -> Tensor | None:
        """Return a whole tensor on the first rank; collective if that does not hold it."""
        chunk = self._chunks.get(name)
        if name in forms[0]:
            shape, rectangles, _ = forms[0][name][0]
            if rectangles == (((0,) * len(shape), shape),):
                return chunk.tensor if keep and chunk is not None else None
        return assemble(name, chunk, forms, self._device, keep=keep)


class _Writing:
    """The file on the first rank."""

    def __init__(self, target: Path, content: Any, placeholders: Mapping[str, Tensor]) -> None:
        self._placeholders = placeholders
        self._error: Exception | None = None
        self._needed = sum(t.nbytes for t in placeholders.values())
        self._staging = FileStaging(target, Staging.new_token())
        try:
            self._staging.create()
            check_room(target.parent, self._needed)
            self._file = TensorFile(self._staging.file, content)
        except BaseException as error:
            self._staging.discard()
            if isinstance(error, OSError):
                raise write_error(error, target.parent, self._needed) from error
            raise_if_any(pickling_problems(content))
            raise

    @property
    def goes_on(self) -> bool:
        """Whether nothing has failed."""
        return self._error is None

    def put(self, name: str, value: Tensor) -> None:
        """Write a tensor; an error waits, as the other ranks gather on."""
        try:
            self._file.put(self._placeholders[name], value)
        except Exception as error:
            self._error = error

    def finish(self) -> int:
        """Publish the file; return its size."""
        try:
            if self._error is not None:
                raise self._error
            self._file.finish()
            size = self._file.size
            self._staging.publish()
        except Exception as error:
            raise write_error(error, self._staging.target.parent, self._needed) from error
        return size

    def close(self) -> None:
        """Delete what was not published."""
        self._file.close()
        self._staging.discard()


@dataclass(frozen=True)
class _Numbered:
    """An optimizer whose parameters have numbers."""

    state: dict[str, Any]
    names: list[str]
    """Name of each parameter, by number."""


class _Assembly:
    """The content of the file, put together on the first rank.

    Attributes:
        placeholders: tensors that are written later, by name.
    """

    def __init__(
        self,
        forms: Sequence[Forms],
        states: Sequence[RankState],
        names: Sequence[Sequence[str]],
        modules: Sequence[Sequence[str]],
    ) -> None:
        self.placeholders: dict[str, Tensor] = {}
        self._aliases: dict[str, dict[str, None]] = {}
        for known in forms:
            for name, (form, aliases) in known.items():
                if name not in self.placeholders:
                    self.placeholders[name] = placeholder(form.shape, form.dtype)
                self._aliases.setdefault(name, {}).update(dict.fromkeys(aliases))
        self._extras: dict[str, Any] = {}
        self._versions: dict[str, int | str] = {}
        for one in reversed(states):  # the lowest rank that has one decides
            self._extras |= one.extras
            self._versions |= one.versions
        self._optimizers = [
            merge_snapshots(snapshots)
            for snapshots in zip(*(one.optimizers for one in states), strict=True)
        ]
        self._places = {name: number for number, name in enumerate(modules[0])}
        self._modules = dict.fromkeys(name for rank in modules for name in rank)
        self._names = self._in_order(dict.fromkeys(name for rank in names for name in rank))

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Return names, and aliases behind them, in the order of the whole module."""
        everything = dict.fromkeys(
            each for n in names for each in (n, *self._aliases.get(f"{MODEL_PREFIX}.{n}", ()))
        )
        return sorted(everything, key=self._place)

    def _place(self, name: str) -> int:
        """Return the place of the module that holds a tensor."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._places:
                return self._places[name]
        return 0

    def content(self, state: Mapping[str, Any], layout: Mapping[str, int]) -> dict[str, Any]:
        """Return the content of the file."""
        split = layout.get("pp", 1) > 1
        numbered = [self._numbered(i, one, split) for i, one in enumerate(self._optimizers)]
        content = {**state, "state_dict": self._state_dict()}
        if numbered:
            content["optimizer_states"] = [one.state for one in numbered]
        content[FILE_KEY] = {
            "versions": library_versions(),
            "taken": time.time(),
            "layout": dict(layout),
            "extras": list(self._extras),
            "optimizer_kinds": [saved["kind"] for saved in self._optimizers],
            "optimizer_names": [one.names for one in numbered],
        }
        return content

    def _state_dict(self) -> "OrderedDict[str, Any]":
        owners = {a: n for n, aliases in self._aliases.items() for a in aliases}
        found: OrderedDict[str, Any] = OrderedDict()
        for name in self._names:
            stored = f"{MODEL_PREFIX}.{name}"
            if stored in self.placeholders:
                found[name] = self.placeholders[stored]
            elif name in owners:
                found[name] = self.placeholders[owners[name]]
            else:
                found[name] = self._extras[name]
        versions = {**dict.fromkeys(self._modules, 1), **self._versions}
        return with_versions(found, versions)

    def _numbered(self, index: int, saved: Mapping[str, Any], split: bool) -> _Numbered:
        """Return the ``state_dict`` of an optimizer of one process.

        Args:
            index: number of the optimizer.
            saved: the result of `merge_snapshots`.
            split: whether each pipeline stage has named parameters of its own.
        """
        tensors: dict[str, dict[str, Any]] = {}
        prefix = f"{OPTIMIZER_PREFIX}.{index}."
        for stored, value in self.placeholders.items():
            if stored.startswith(prefix):
                name, _, key = stored.removeprefix(prefix).rpartition(".")
                tensors.setdefault(name, {})[key] = value
        order = {name: number for number, name in enumerate(self._names)}
        names: list[str] = []
        groups = []
        for group in saved["groups"]:
            own = list(group["parameters"])
            if split:
                own.sort(key=lambda name: order.get(name, len(order)))
            groups.append({**group["options"], "params": list(range(len(names), len(names + own)))})
            names += own
        state = {
            number: {**saved["values"].get(name, {}), **tensors.get(name, {})}
            for number, name in enumerate(names)
            if name in saved["values"] or name in tensors
        }
        return _Numbered({"state": state, "param_groups": groups}, names)
