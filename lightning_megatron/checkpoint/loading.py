"""Tensors out of files, into the chunks that this process holds.

Every rank reads the stored rectangles that overlap its own, without communication: which ones is
the planning of torch.distributed.checkpoint, and what is left to do is to open each file once, go
through it from front to back and copy. What DCP leaves unchecked, index.py has checked before;
where it calls `torch.load`, archive.py takes the numbers out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import BinaryIO

from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lightning_megatron._torch import StorageInfo
from lightning_megatron.checkpoint.archive import read_tensor
from lightning_megatron.checkpoint.state import Chunk
from lightning_megatron.checkpoint.storage import AnyPath
from lightning_megatron.errors import CheckpointError, DamagedCheckpointError


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What a stored chunk and one of ours have in common."""

    place: StorageInfo
    entry: TensorStorageMetadata
    item: ReadItem
    target: Tensor


def read_chunks(
    directory: AnyPath, metadata: Metadata, chunks: Mapping[str, Chunk], stored: Mapping[str, str]
) -> None:
    """Fill this rank's chunks in place; not collective.

    Args:
        directory: the checkpoint.
        metadata: its index, checked.
        chunks: what to fill.
        stored: the stored name of every chunk.

    Raises:
        DamagedCheckpointError: a file does not hold what the index says.
        CheckpointError: a file cannot be read.
    """
    parts = [
        part for name, chunk in chunks.items() for part in _parts(metadata, stored[name], chunk)
    ]
    parts.sort(key=lambda part: (part.place.relative_path, part.place.offset))
    try:
        for file_name, in_file in groupby(parts, key=lambda part: part.place.relative_path):
            with (directory / file_name).open("rb") as file:
                # Several parts of one chunk follow each other: it is read once.
                for _, of_chunk in groupby(in_file, key=lambda part: part.item.storage_index):
                    _fill(file, list(of_chunk))
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"reading {directory}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"reading {directory}: {error}") from error


def _parts(metadata: Metadata, stored: str, chunk: Chunk) -> list[_Part]:
    if not chunk.tensor.numel():
        return []
    entry = metadata.state_dict_metadata[stored]
    assert isinstance(entry, TensorStorageMetadata)
    ours = ChunkStorageMetadata(offsets=Size(chunk.offsets), sizes=chunk.tensor.shape)
    return [
        _Part(
            place=metadata.storage_data[item.storage_index],
            entry=entry,
            item=item,
            target=_narrow(chunk.tensor, item.dest_offsets, item.lengths),
        )
        for item in create_read_items_for_chunk_list(stored, entry, [ours])
    ]


def _fill(file: BinaryIO, parts: list[_Part]) -> None:
    place, index = parts[0].place, parts[0].item.storage_index
    content = bytearray(place.length)
    file.seek(place.offset)
    if file.readinto(content) < place.length:  # type: ignore[attr-defined]
        raise DamagedCheckpointError(f"{place.relative_path} is shorter than it was")
    assert index.index is not None
    entry = parts[0].entry
    shape = tuple(entry.chunks[index.index].sizes)
    try:
        tensor = read_tensor(content, entry.properties.dtype, shape)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{index.fqn} in {place.relative_path}: {error}") from error
    for part in parts:
        part.target.copy_(_narrow(tensor, part.item.storage_offsets, part.item.lengths))


def _narrow(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor
