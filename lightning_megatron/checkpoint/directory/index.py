"""The index of the shards: the place of every tensor, from the manifests, checked.

The root manifest says which rectangle of which tensor is in which part; the manifest of the part
gives file and bytes (rank_manifest.py). A rank that loads under another layout finds the rectangles
that overlap its own in the root, and opens the few parts that hold them. So at a thousand ranks
none needs to know the chunks of all. Checkpoints of schema 2 have one index of everything, which is
split into parts in memory.

The index is checked. The rectangles of every tensor must tile it. Each must be in the part that the
root names, within a file of that part, and no two may share bytes, so that a small file cannot
stand for large memory. The ranks that load share this work, by tensor and by part.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata

from lightning_megatron.checkpoint.directory.chunk_runs import Rectangle, Run
from lightning_megatron.checkpoint.directory.coverage import Numbers, expand, run_coverage_fault
from lightning_megatron.checkpoint.directory.dcp_metadata import (
    parts_of,
    torch_dtype,
)
from lightning_megatron.checkpoint.directory.manifest import Manifest
from lightning_megatron.checkpoint.directory.rank_manifest import (
    ChunkEntry,
    FileEntry,
    RankManifest,
    entry_of,
)
from lightning_megatron.checkpoint.directory.sealed_text import read_text
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.errors import DamagedCheckpointError

_KEPT_CHUNKS = 200_000
"""Chunks of parts that are kept in memory once they were read."""
_PARTS_AT_ONCE = 64
"""Parts that are checked together: more take more memory, fewer more passes over the root."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    """Dtype of the values."""
    runs: tuple[Run, ...]
    """Rectangles of the tensor, with their parts."""

    def rectangles(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return parts (n), offsets and sizes (n x dimensions) of the n rectangles."""
        return expand(self.runs, len(self.shape))


class ShardIndex:
    """The index of a checkpoint's shards.

    Args:
        directory: the checkpoint.
        manifest: its manifest.

    Attributes:
        tensors: the stored tensors, by name.

    Raises:
        DamagedCheckpointError: a tensor has an unknown dtype.
    """

    def __init__(self, directory: AnyPath, manifest: Manifest) -> None:
        self._directory = directory
        self._files = manifest.files
        self._embedded = manifest.embedded
        self._names = {part.number: name for name, part in manifest.parts.items()}
        self._entries = {part.number: part for part in manifest.parts.values()}
        self._kept: OrderedDict[int, RankManifest] = OrderedDict()
        self.tensors = {
            name: StoredTensor(shape=e.shape, dtype=torch_dtype(name, e.dtype), runs=e.runs)
            for name, e in manifest.tensors.items()
        }

    @classmethod
    def of_metadata(
        cls, directory: AnyPath, metadata: Metadata, files: Mapping[str, FileEntry]
    ) -> "ShardIndex":
        """Return the index of a directory that another library wrote, checked.

        Raises:
            DamagedCheckpointError: the files do not hold some tensors, which it names.
        """
        tensors, parts, faults = parts_of(metadata)
        raise_if_damaged(faults)
        index = cls(directory, Manifest(files=files, tensors=tensors, embedded=parts))
        raise_if_damaged(index.faults())
        return index

    @property
    def numbers(self) -> list[int]:
        """Numbers of all parts."""
        return sorted({*self._names, *self._embedded})

    def part(self, number: int, *, keep: bool = True) -> RankManifest:
        """Return the manifest of a part.

        Args:
            number: number of the part.
            keep: whether to keep it in memory for the next call.

        Raises:
            OSError: the file cannot be read.
            DamagedCheckpointError: the file is not what was written.
        """
        if number in self._embedded:
            return self._embedded[number]
        if number not in self._kept:
            part = self._read(number)
            if not keep:
                return part
            self._kept[number] = part
            while len(self._kept) > 1 and sum(p.count for p in self._kept.values()) > _KEPT_CHUNKS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]

    def _read(self, number: int) -> RankManifest:
        if number not in self._names:
            raise DamagedCheckpointError(f"there is no part {number} of the manifest")
        name = self._names[number]
        text = read_text(self._directory / name)
        if entry_of(text.encode()) != self._files[name]:
            raise DamagedCheckpointError(f"{name} is not the part that was written")
        part, entry = RankManifest.from_json(text, name), self._entries[number]
        files = {file: self._files[file] for file in entry.files}
        if part.number != number or part.files != files or part.count != entry.count:
            raise DamagedCheckpointError(f"{name} contradicts the root manifest")
        return part

    def overlapping(self, name: str, wanted: Rectangle) -> list[tuple[int, Rectangle]]:
        """Return the stored rectangles of a tensor that overlap ``wanted``, with their parts."""
        tensor = self.tensors[name]
        if len(tensor.runs) == 1 and not tensor.runs[0].repeats:
            run = tensor.runs[0]  # of one piece, as most tensors of small layouts are
            return [(run.part, (run.offsets, run.sizes))]
        parts, offsets, sizes = tensor.rectangles()
        begin, length = (np.array(side, dtype=np.int64) for side in wanted)
        common = ((offsets < begin + length) & (begin < offsets + sizes)).all(axis=1)
        found = zip(*(a[common].tolist() for a in (parts, offsets, sizes)), strict=True)
        return [(part, (tuple(offset), tuple(size))) for part, offset, size in found]

    def faults(self, rank: int = 0, size: int = 1) -> list[str]:
        """Check this rank's share of the index.

        Args:
            rank: rank of this process among those that check.
            size: number of these ranks.

        Returns:
            Faults, one sentence each.

        Raises:
            OSError: a part cannot be read.
            DamagedCheckpointError: a part is not what was written.
        """
        found = []
        known = set(self.numbers)
        for name, tensor in islice(self.tensors.items(), rank, None, size):
            if fault := run_coverage_fault(tensor.shape, tensor.runs):
                found.append(f"{name}: {fault}")
            elif not known.issuperset(_numbers(tensor)):
                found.append(f"{name}: a chunk is in no file")
        if found:
            return found
        mine = self.numbers[rank::size]
        for begin in range(0, len(mine), _PARTS_AT_ONCE):
            found += self._part_faults(mine[begin : begin + _PARTS_AT_ONCE])
        return found

    def _part_faults(self, numbers: Sequence[int]) -> Iterator[str]:
        """Compare some parts with the root and their files."""
        expected: dict[int, dict[tuple[str, tuple[int, ...]], tuple[int, ...]]]
        expected = {number: {} for number in numbers}
        for name, tensor in self.tensors.items():
            for number, (offsets, sizes) in _within(tensor, numbers):
                expected[number][name, offsets] = sizes
        for number in numbers:
            part = self.part(number, keep=len(numbers) == 1)
            for name, chunks in part.tensors.items():
                for chunk in chunks:
                    if expected[number].pop((name, chunk.offsets), None) != chunk.sizes:
                        yield f"{name}: the root manifest has no chunk at {chunk.offsets}"
                    elif fault := self._place_fault(self.tensors[name], chunk):
                        yield f"{name}: {fault}"
            yield from (
                f"{name}: the chunk at {offsets} is in no file"
                for name, offsets in expected[number]
            )
            yield from _shared_bytes(part)

    def _place_fault(self, tensor: StoredTensor, chunk: ChunkEntry) -> str | None:
        if chunk.file not in self._files:
            return f"file {chunk.file!r} is not in the manifest"
        end, needed = chunk.begin + chunk.length, math.prod(chunk.sizes) * tensor.dtype.itemsize
        if chunk.begin < 0 or chunk.length < needed or end > self._files[chunk.file].size:
            return f"the chunk at {chunk.offsets} exceeds file {chunk.file}"
        return None


def raise_if_damaged(faults: Sequence[str]) -> None:
    """Raise an error if an index has faults.

    Raises:
        DamagedCheckpointError: the index has faults, which it names.
    """
    if faults:
        raise DamagedCheckpointError(f"the index of the shards is damaged: {summary(faults)}")


def summary(items: Sequence[str], limit: int = 10) -> str:
    """Join items to one line; those beyond ``limit`` are counted."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def _numbers(tensor: StoredTensor) -> set[int]:
    if not any(run.repeats for run in tensor.runs):
        return {run.part for run in tensor.runs}
    return set(np.unique(tensor.rectangles()[0]).tolist())


def _within(tensor: StoredTensor, numbers: Sequence[int]) -> Iterator[tuple[int, Rectangle]]:
    """Yield the rectangles of a tensor that are in some parts."""
    if not any(run.repeats for run in tensor.runs):
        yield from ((r.part, (r.offsets, r.sizes)) for r in tensor.runs if r.part in numbers)
        return
    parts, offsets, sizes = tensor.rectangles()
    mine = np.isin(parts, numbers)
    for part, offset, size in zip(
        *(array[mine].tolist() for array in (parts, offsets, sizes)), strict=True
    ):
        yield part, (tuple(offset), tuple(size))


def _shared_bytes(part: RankManifest) -> Iterator[str]:
    """Yield a fault for each file in which two chunks claim the same bytes."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for chunks in part.tensors.values():
        for chunk in chunks:
            ranges[chunk.file].append((chunk.begin, chunk.begin + chunk.length))
    for file, found in ranges.items():
        found.sort()
        if any(end > begin for (_, end), (begin, _) in pairwise(found)):
            yield f"two chunks claim the same bytes of {file}"
