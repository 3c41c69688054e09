"""The index of the shards: read without trust, and checked before use.

DCP keeps which rectangle of which tensor lies where in ``.metadata``, a pickle that its own reader
loads without restriction: whoever can write a checkpoint could run code on every machine that
loads it. Here it is unpickled with a list of the few classes that it is made of, and then held
against the manifest: the chunks of every tensor must tile it (DCP loads a tensor with a hole and
leaves what was in memory), and must lie within files of the checkpoint.
"""

import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from typing_extensions import override

from lightning_megatron._torch import DCP_METADATA_GLOBALS
from lightning_megatron.checkpoint.manifest import METADATA_FILE, FileEntry, is_file_name
from lightning_megatron.errors import CheckpointError


def read_metadata(directory: Path) -> Metadata:
    """Read the index of the shards without trusting it.

    Raises:
        CheckpointError: it cannot be read, or would run code.
    """
    try:
        with (directory / METADATA_FILE).open("rb") as file:
            metadata = _RestrictedUnpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    except Exception as error:  # whatever garbage makes the unpickler do
        raise CheckpointError(f"{directory}: {METADATA_FILE} cannot be read: {error!r}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{directory}: {METADATA_FILE} is not an index of shards")
    return metadata


def check_metadata(metadata: Metadata, files: Mapping[str, FileEntry]) -> None:
    """Check that every tensor is covered by chunks that lie within the checkpoint's files.

    Raises:
        CheckpointError: naming the tensors that are not.
    """
    faults = []
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            faults.append(f"{name}: not a tensor")
            continue
        try:
            fault = coverage_fault(entry.size, entry.chunks)
            fault = fault or _storage_fault(name, entry, metadata.storage_data, files)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            fault = f"damaged entry ({error!r})"
        if fault:
            faults.append(f"{name}: {fault}")
    if faults:
        raise CheckpointError(f"the index of the shards is damaged: {summary(faults)}")


def coverage_fault(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> str | None:
    """Say why ``chunks`` do not tile a tensor of shape ``size``, or return None when they do.

    Rectangles inside the tensor tile it exactly if their volumes add up and no two overlap; the
    latter is a sweep along the dimension with the most distinct offsets.
    """
    for chunk in chunks:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
            o >= 0 and n >= 0 and o + n <= s
            for o, n, s in zip(chunk.offsets, chunk.sizes, size, strict=True)
        )
        if not inside:
            return f"chunk {tuple(chunk.offsets)}+{tuple(chunk.sizes)} exceeds {tuple(size)}"
    volume, total = sum(math.prod(c.sizes) for c in chunks), math.prod(size)
    if volume < total or not chunks:
        return f"only {volume} of {total} elements are stored"
    if volume > total or _overlap(chunks):
        return f"chunks overlap: {volume} elements stored for {total}"
    return None


def summary(items: Sequence[str], limit: int = 10) -> str:
    """Join items to one line, counting those beyond ``limit``."""
    shown = ", ".join(items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    boxes = [c for c in chunks if math.prod(c.sizes)]
    rank = len(boxes[0].offsets) if boxes else 0
    if len(boxes) < 2 or not rank:
        return len(boxes) > 1
    sweep = max(range(rank), key=lambda d: len({b.offsets[d] for b in boxes}))
    active: list[ChunkStorageMetadata] = []
    for box in sorted(boxes, key=lambda b: b.offsets[sweep]):
        active = [a for a in active if a.offsets[sweep] + a.sizes[sweep] > box.offsets[sweep]]
        if any(_intersect(a, box) for a in active):
            return True
        active.append(box)
    return False


def _intersect(a: ChunkStorageMetadata, b: ChunkStorageMetadata) -> bool:
    return all(
        a.offsets[d] < b.offsets[d] + b.sizes[d] and b.offsets[d] < a.offsets[d] + a.sizes[d]
        for d in range(len(a.offsets))
    )


def _storage_fault(
    name: str,
    entry: TensorStorageMetadata,
    storage: Mapping[Any, Any],
    files: Mapping[str, FileEntry],
) -> str | None:
    item_bytes = torch.empty((), dtype=entry.properties.dtype).element_size()
    for chunk in entry.chunks:
        info = storage.get(MetadataIndex(name, chunk.offsets))
        if info is None:
            return f"the chunk at {tuple(chunk.offsets)} is in no file"
        if not is_file_name(info.relative_path) or info.relative_path not in files:
            return f"file {info.relative_path!r} is not in the manifest"
        if getattr(info, "transform_descriptors", None):
            return "stored through an unknown transformation"
        end, size = info.offset + info.length, files[info.relative_path].size
        if info.offset < 0 or info.length < math.prod(chunk.sizes) * item_bytes or end > size:
            return f"the chunk at {tuple(chunk.offsets)} exceeds file {info.relative_path}"
    return None


class _RestrictedUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in DCP_METADATA_GLOBALS:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise CheckpointError(
            f"{METADATA_FILE} refers to {module_name}.{global_name}, which has no place in an "
            "index of shards: refusing to load it"
        )
