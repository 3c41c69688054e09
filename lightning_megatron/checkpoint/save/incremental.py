"""Incremental checkpoints, which share files with the one before by hard links.

If a trunk is frozen and adapters train, nearly all values of a checkpoint are in the one before it.
A hard link puts a file into a second directory at no cost: both own it, and deleting one leaves the
other. So every checkpoint is a directory that is complete by itself.

A link is possible only if the *whole* file is unchanged. So each rank writes two files instead of
one: the tensors that did not change since the last save, and those that did. Which tensors did not
change is a guess, made from a small sample of every tensor (for the first save: tensors that no
optimizer updates do not change). A wrong guess costs space, never correctness: before a link is
kept, the file is read from front to back, each tensor is compared with memory bit by bit, and the
file with its hash. So a file that a disk has damaged is not linked but written anew. The bytes that
are not written are read instead.

Sharing has a price: a bit that flips later is in all checkpoints that share the file. Loading and
`ckpt verify` detect it in each, but the newest valid checkpoint is then older than all of them.
"""

import errno
import hashlib
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from lightning_megatron._torch.state_dicts import StorageInfo
from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.directory.chunk_runs import Rectangle
from lightning_megatron.checkpoint.directory.coverage import overlapping
from lightning_megatron.checkpoint.directory.hashed_files import FileEntry
from lightning_megatron.checkpoint.directory.manifest import ChunkEntry, Manifest, Part
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.checkpoint.load.reader import MODEL_PREFIX
from lightning_megatron.checkpoint.load.tensor_archive import read_tensor
from lightning_megatron.checkpoint.save.dcp_writer import (
    WritePlan,
    Written,
    data_of,
    part_of,
    values_of,
)
from lightning_megatron.checkpoint.save.save_plan import OPTIMIZER_PREFIX, ShardWriting
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger(__name__)

_SAMPLED = 1024
"""Elements of a tensor that are compared from one save to the next."""
_MOST_LINKS = 16
"""Largest number of linked files of one rank; with more, all files are written anew."""
_REMEMBERED = 4
"""Number of earlier checkpoints to link to; any of them may have been deleted."""
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class _StoredChunk:
    """A chunk in a file of an earlier checkpoint, and the present tensor."""

    place: ChunkEntry
    item: WriteItem
    tensor: Tensor


@dataclass(frozen=True)
class _Base:
    """An earlier checkpoint."""

    path: Path
    files: Mapping[str, FileEntry]
    """All of its files."""
    parts: Sequence[Part]
    """Parts of ranks that may have written chunks of this rank."""
    dtypes: Mapping[str, torch.dtype]
    """Dtypes of its tensors."""


class Increments:
    """Record of the last saves of one rank.

    Training may call `expect` and `note`; the writing thread calls the other methods.
    """

    def __init__(self) -> None:
        self._trained: frozenset[str] = frozenset()
        self._bases: deque[_Base] = deque(maxlen=_REMEMBERED)
        self._loaded: tuple[Path, Manifest] | None = None
        self._written: Part | None = None
        self._dtypes: Mapping[str, torch.dtype] = {}
        self._samples: dict[MetadataIndex, bytes] = {}
        self._sampled: dict[MetadataIndex, bytes] = {}
        self._fickle: set[MetadataIndex] = set()
        self._cannot_link = False

    def expect(self, names: Sequence[str]) -> None:
        """Note which tensors of this rank an optimizer updates, from the names of all."""
        states = (n.split(".", 2)[2] for n in names if n.startswith(f"{OPTIMIZER_PREFIX}."))
        self._trained = frozenset(f"{MODEL_PREFIX}.{state.rpartition('.')[0]}" for state in states)

    def note(self, target: AnyPath, manifest: Manifest) -> None:
        """Note that the last save was published."""
        if isinstance(target, Path):
            parts = [] if self._written is None else [self._written]
            self._remember(_Base(target, manifest.files, parts, self._dtypes))
        self._samples = self._sampled or self._samples
        self._sampled = {}
        self._written = None

    def note_loaded(self, target: AnyPath, manifest: Manifest) -> None:
        """Note the checkpoint that was loaded, perhaps one of another layout."""
        if isinstance(target, Path):
            self._loaded = target, manifest

    def _remember(self, base: _Base) -> None:
        others = [other for other in self._bases if other.path != base.path]
        self._bases = deque([base, *others], maxlen=_REMEMBERED)

    def _look_up(self, items: Mapping[MetadataIndex, WriteItem]) -> None:
        """Find the parts of the loaded checkpoint with rectangles of this rank."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        path, manifest = loaded
        try:
            numbers = {
                number
                for item in items.values()
                if (entry := manifest.tensors.get(item.index.fqn)) is not None
                for number, rectangle in overlapping(entry, _rectangle(item))
                if rectangle == _rectangle(item)
            }
            parts = [manifest.part(path, number) for number in sorted(numbers)]
        except (OSError, CheckpointError) as error:  # then everything is written
            logger.debug("%s cannot be linked to: %s", path, error)
            return
        dtypes = {name: entry.torch_dtype for name, entry in manifest.tensors.items()}
        self._remember(_Base(path, manifest.files, parts, dtypes))

    def writing(self, chunks: Mapping[str, Chunk], write: ShardWriting) -> ShardWriting:
        """Return a function that links unchanged files and writes the rest.

        Args:
            chunks: the tensors.
            write: function that writes them.
        """
        return lambda directory, plan, stop: self._write(directory, plan, stop, chunks, write)

    def _write(
        self,
        directory: AnyPath,
        plan: WritePlan,
        stop: Callable[[], bool],
        chunks: Mapping[str, Chunk],
        write: ShardWriting,
    ) -> Written | None:
        if not isinstance(directory, Path):
            self._give_up(directory, "a store has no hard links")
        if self._cannot_link or not isinstance(directory, Path):
            return write(directory, plan, stop)
        items = {item.index: item for item in plan.mine.items}
        self._look_up(items)
        self._sampled = {index: _sample(values_of(chunks, index)) for index in items}
        done = Written(places=[], files={})
        for name, parts in self._unchanged(items, chunks).items():
            if stop():
                return None
            if not self._cannot_link and self._link(directory, name, parts):
                done = _joined(done, _linked(name, parts, self._bases[0].files[name]))
        taken = {place.index for place in done.places}
        rest = [item for item in plan.mine.items if item.index not in taken]
        still = [item for item in rest if self._stands_still(item.index)]
        moving = [item for item in rest if not self._stands_still(item.index)]
        for group in filter(None, (still, moving)):
            written = write(directory, _only(plan, group), stop)
            if written is None:
                return None
            done = _joined(done, written)
        self._written = part_of(plan, done)
        self._dtypes = {name: chunks[name].tensor.dtype for name in self._written}
        return done

    def _stands_still(self, index: MetadataIndex) -> bool:
        """Guess whether a tensor is unchanged since the last save."""
        before = self._samples.get(index)
        if before is None:
            trained = index.fqn in self._trained or index.fqn.startswith(f"{OPTIMIZER_PREFIX}.")
            return not trained and index not in self._fickle
        return before == self._sampled[index] and index not in self._fickle

    def _unchanged(
        self, items: Mapping[MetadataIndex, WriteItem], chunks: Mapping[str, Chunk]
    ) -> dict[str, list[_StoredChunk]]:
        """Return the files of the last checkpoint that seem to be unchanged."""
        found: dict[str, list[_StoredChunk]] = {}
        no_good: set[str] = set()
        parts = self._bases[0].parts if self._bases else ()
        for name, place in ((n, c) for part in parts for n, held in part.items() for c in held):
            index = MetadataIndex(name, torch.Size(place.offsets))
            item = items.get(index)
            tensor = None if item is None else values_of(chunks, index)
            if (
                item is None
                or tensor is None
                or tuple(tensor.shape) != place.sizes
                or tensor.dtype != self._bases[0].dtypes[name]
                or not self._stands_still(index)
            ):
                no_good.add(place.file)
            else:
                found.setdefault(place.file, []).append(_StoredChunk(place, item, tensor))
        kept = {name: parts for name, parts in found.items() if name not in no_good}
        return kept if len(kept) <= _MOST_LINKS else {}

    def _link(self, directory: Path, name: str, parts: Sequence[_StoredChunk]) -> bool:
        """Link a file into the directory if it holds exactly these tensors."""
        entry, target = self._bases[0].files[name], directory / name
        for base in self._bases:
            if base.files.get(name) != entry:
                continue
            origin = base.path / name
            try:
                os.link(origin, target)
            except FileNotFoundError:  # deleted in the meantime
                continue
            except OSError as error:
                self._give_up(directory, os.strerror(error.errno or errno.EIO))
                return False
            try:
                if self._holds(origin, target, entry, parts):
                    return True
            except OSError as error:
                logger.warning("%s is not linked but written anew: %s", origin, error)
            target.unlink()
        return False

    def _holds(
        self, origin: Path, file: Path, entry: FileEntry, parts: Sequence[_StoredChunk]
    ) -> bool:
        """Return whether the file is intact and holds these tensors, bit by bit."""
        digest, different = hashlib.sha256(), []
        with file.open("rb") as stream:
            for part in sorted(parts, key=lambda part: part.place.begin):
                end = part.place.begin + part.place.length
                _skip(stream, digest.update, end - stream.tell())
                if not _is_same(stream, part):
                    different.append(part.item.index)
                stream.seek(end)
            _skip(stream, digest.update, entry.size)
            size = stream.tell()
        if size != entry.size or digest.hexdigest() != entry.sha256:
            logger.warning("%s is damaged; its tensors are written anew, and not linked", origin)
            return False
        self._fickle.update(different)
        return not different

    def _give_up(self, directory: AnyPath, reason: str) -> None:
        if not self._cannot_link:
            logger.warning(
                "incremental=True has no effect in %s: %s; every checkpoint is written in full",
                directory.parent,
                reason,
            )
        self._cannot_link = True


def _rectangle(item: WriteItem) -> Rectangle:
    chunk = data_of(item).chunk
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _only(plan: WritePlan, items: Sequence[WriteItem]) -> WritePlan:
    """Plan some of the items, for a file whose name no other has."""
    names = plan.mine.storage_data
    names = replace(names, prefix=f"{names.prefix}{uuid.uuid4().hex[:8]}_")
    return replace(plan, mine=replace(plan.mine, items=list(items), storage_data=names))


def _linked(name: str, parts: Sequence[_StoredChunk], entry: FileEntry) -> Written:
    places = [
        WriteResult(
            index=part.item.index,
            size_in_bytes=part.place.length,
            storage_data=StorageInfo(name, part.place.begin, part.place.length),
        )
        for part in parts
    ]
    return Written(places=places, files={name: entry}, linked=frozenset({name}))


def _joined(one: Written, other: Written) -> Written:
    return Written(
        places=[*one.places, *other.places],
        files={**one.files, **other.files},
        linked=one.linked | other.linked,
    )


def _sample(tensor: Tensor) -> bytes:
    """Return the hash of some elements of a tensor, spread over it."""
    flat = tensor.detach().reshape(-1)
    step = max(flat.numel() // _SAMPLED, 1)
    return hashlib.sha256(_bits(flat[::step]).numpy().tobytes()).digest()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _is_same(stream: BinaryIO, part: _StoredChunk) -> bool:
    """Return whether an archive in a file holds the bits of a tensor."""
    place, tensor = part.place, part.tensor
    try:
        stored = read_tensor(stream, place.begin, place.length, tensor.dtype, place.sizes)
    except DamagedCheckpointError:
        return False  # the hash tells
    return torch.equal(_bits(stored), _bits(tensor))


def _skip(stream: BinaryIO, update: Callable[[bytes], object], count: int) -> None:
    while count > 0 and (block := stream.read(min(count, _BLOCK_BYTES))):
        update(block)
        count -= len(block)
