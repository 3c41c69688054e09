"""The reader of shards: it fills the chunks of this rank.

Every rank reads the stored rectangles that overlap its own, without communication. The manifest
names them. Then one part after the other is read: each file is opened once, read from front to
back, and the intersection of the stored and the wanted rectangle is copied. tensor_archive.py takes
the numbers out of the archives.
"""

import io
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import BinaryIO

import torch
from torch import Tensor

from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.directory.chunk_runs import Rectangle
from lightning_megatron.checkpoint.directory.coverage import overlapping
from lightning_megatron.checkpoint.directory.manifest import ChunkEntry, Manifest, Part
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.checkpoint.load.tensor_archive import read_tensor
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A stored rectangle that overlaps a chunk of this rank."""

    stored: str
    """Name of the tensor in the checkpoint."""
    rectangle: Rectangle
    target: Chunk


@dataclass(frozen=True, kw_only=True)
class _Placed:
    """A wanted rectangle, with the bytes that hold it."""

    place: ChunkEntry
    wanted: _Wanted


def read_chunks(
    directory: AnyPath, manifest: Manifest, chunks: Mapping[str, Chunk], stored: Mapping[str, str]
) -> None:
    """Fill this rank's chunks in place; not collective.

    Args:
        directory: the checkpoint.
        manifest: its manifest, checked.
        chunks: the chunks to fill.
        stored: the stored name of every chunk.

    Raises:
        DamagedCheckpointError: a file does not hold what the manifest says.
        CheckpointError: a file cannot be read.
    """
    by_part = _by_part(manifest, chunks, stored)
    try:
        for number in sorted(by_part):
            part = manifest.part(directory, number)
            placed = list(_placed(part, number, by_part.pop(number)))
            _read_part(directory, manifest, placed)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"reading {directory}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"reading {directory}: {error}") from error


def files_of(
    directory: AnyPath, manifest: Manifest, chunks: Mapping[str, Chunk], stored: Mapping[str, str]
) -> set[str]:
    """Return the names of the shards that `read_chunks` would open."""
    return {
        one.place.file
        for number, wanted in _by_part(manifest, chunks, stored).items()
        for one in _placed(manifest.part(directory, number), number, wanted)
    }


def _by_part(
    manifest: Manifest, chunks: Mapping[str, Chunk], stored: Mapping[str, str]
) -> dict[int, list[_Wanted]]:
    """Return the stored rectangles that overlap those of this rank, by part."""
    by_part: dict[int, list[_Wanted]] = defaultdict(list)
    for name, chunk in ((n, part) for n, held in chunks.items() for part in held.rectangles()):
        if not chunk.tensor.numel():
            continue
        entry = manifest.tensors[stored[name]]
        for number, rectangle in overlapping(entry, (chunk.offsets, chunk.sizes)):
            wanted = _Wanted(stored=stored[name], rectangle=rectangle, target=chunk)
            by_part[number].append(wanted)
    return by_part


def _placed(part: Part, number: int, wanted: Sequence[_Wanted]) -> Iterator[_Placed]:
    """Yield the wanted rectangles of a part, with their bytes."""
    for one in wanted:
        place = next((c for c in part.get(one.stored, ()) if c.offsets == one.rectangle[0]), None)
        if place is None or place.sizes != one.rectangle[1]:
            raise DamagedCheckpointError(
                f"{one.stored}: the chunk at {one.rectangle[0]} is not in part {number}"
            )
        yield _Placed(place=place, wanted=one)


def _read_part(directory: AnyPath, manifest: Manifest, placed: list[_Placed]) -> None:
    placed.sort(key=lambda one: (one.place.file, one.place.begin))
    for file_name, in_file in groupby(placed, key=lambda one: one.place.file):
        with (directory / file_name).open("rb") as file:
            # What several chunks of ours need of a stored one is read once.
            for key, of_chunk in groupby(in_file, key=lambda one: (one.wanted.stored, one.place)):
                _fill(file, list(of_chunk), manifest.tensors[key[0]].torch_dtype)


_AT_ONCE = 4 << 20
"""Largest archive that is read at once, as each access to a file in a store takes time."""


def _fill(file: BinaryIO, placed: list[_Placed], dtype: torch.dtype) -> None:
    place, stored = placed[0].place, placed[0].wanted.stored
    rows = _wanted_rows(placed)
    source, begin = file, place.begin
    try:
        if place.length <= _AT_ONCE:
            file.seek(begin)
            source, begin = io.BytesIO(file.read(place.length)), 0
        tensor = read_tensor(source, begin, place.length, dtype, place.sizes, rows)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{stored} in {place.file}: {error}") from error
    offsets = (place.offsets[0] + rows[0], *place.offsets[1:]) if rows else ()
    for one in placed:
        ours = one.wanted.target
        _copy_common(tensor, offsets, ours.tensor, ours.offsets)


def _wanted_rows(placed: list[_Placed]) -> tuple[int, int] | None:
    """Return the first row of a stored rectangle that any chunk needs, and the one behind all.

    A scalar has no rows.
    """
    place = placed[0].place
    if not place.sizes:
        return None
    targets = [one.wanted.target for one in placed]
    start, rows = place.offsets[0], place.sizes[0]
    first = min(max(target.offsets[0] - start, 0) for target in targets)
    last = max(min(target.offsets[0] + target.sizes[0] - start, rows) for target in targets)
    return first, last


def _copy_common(
    source: Tensor, source_offsets: Sequence[int], target: Tensor, target_offsets: Sequence[int]
) -> None:
    """Copy the intersection of two rectangles of a tensor from the first to the second."""
    for dim, (theirs, ours) in enumerate(zip(source_offsets, target_offsets, strict=True)):
        begin = max(theirs, ours)
        length = min(theirs + source.shape[dim], ours + target.shape[dim]) - begin
        source = source.narrow(dim, begin - theirs, length)
        target = target.narrow(dim, begin - ours, length)
    target.copy_(source)
