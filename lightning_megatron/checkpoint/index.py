"""The index of the shards: read without trust, and checked before use.

DCP keeps which rectangle of which tensor lies where in ``.metadata``, a pickle that its own reader
loads without restriction: whoever can write a checkpoint could run code on every machine that
loads it. We keep the same in the manifest and build DCP's index from that; the pickle is there for
DCP's own tools. Only the checkpoints of schema 1, which have no other index, have it unpickled,
with a list of the few classes that it is made of.

Either is then held against the files: the chunks of every tensor must tile it (DCP loads a tensor
with a hole and leaves what was in memory), and must lie within files of the checkpoint, no two in
one place, so that a small file cannot stand for large memory.
"""

import io
import math
import pickle
import pickletools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from typing_extensions import override

from lightning_megatron._torch import DCP_METADATA_GLOBALS, StorageInfo
from lightning_megatron.checkpoint.manifest import (
    LARGEST_TEXT,
    METADATA_FILE,
    ChunkEntry,
    FileEntry,
    Manifest,
    TensorEntry,
    is_file_name,
)
from lightning_megatron.checkpoint.storage import AnyPath
from lightning_megatron.errors import DamagedCheckpointError


def read_metadata(directory: AnyPath) -> Metadata:
    """Read the pickled index of the shards without trusting it.

    Raises:
        OSError: it cannot be read.
        DamagedCheckpointError: it is not an index, or would run code.
    """
    path = directory / METADATA_FILE
    try:
        if path.stat().st_size > LARGEST_TEXT:
            raise DamagedCheckpointError(f"{METADATA_FILE} is larger than an index can be")
        content = path.read_bytes()
        _check_memory(content)
        metadata = _RestrictedUnpickler(io.BytesIO(content)).load()
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{directory}: {error}") from error
    except OSError:
        raise
    except Exception as error:  # whatever garbage makes the unpickler do
        raise DamagedCheckpointError(
            f"{directory}: {METADATA_FILE} cannot be read: {error!r}"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise DamagedCheckpointError(f"{directory}: {METADATA_FILE} is not an index of shards")
    return metadata


def tensor_entries(metadata: Metadata) -> dict[str, TensorEntry]:
    """Return what the manifest keeps of an index that was just written."""
    found = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        places = [metadata.storage_data[MetadataIndex(name, c.offsets)] for c in entry.chunks]
        found[name] = TensorEntry(
            dtype=str(entry.properties.dtype).removeprefix("torch."),
            shape=tuple(entry.size),
            chunks=tuple(
                ChunkEntry(
                    offsets=tuple(chunk.offsets),
                    sizes=tuple(chunk.sizes),
                    file=place.relative_path,
                    begin=place.offset,
                    length=place.length,
                )
                for chunk, place in zip(entry.chunks, places, strict=True)
            ),
        )
    return found


def index_of(directory: AnyPath, manifest: Manifest) -> Metadata:
    """Return the index of a checkpoint's shards: the manifest's, or for schema 1 the pickled one.

    Raises:
        OSError: it cannot be read.
        DamagedCheckpointError: it is not an index, or would run code.
    """
    if not manifest.is_sealed:
        return read_metadata(directory)
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    for name, entry in manifest.tensors.items():
        entries[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=_dtype(name, entry.dtype)),
            size=torch.Size(entry.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes))
                for c in entry.chunks
            ],
        )
        for c in entry.chunks:
            place = StorageInfo(relative_path=c.file, offset=c.begin, length=c.length)
            storage[MetadataIndex(name, torch.Size(c.offsets))] = place
    return Metadata(entries, storage_data=storage)


def _dtype(tensor: str, name: str) -> torch.dtype:
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpointError(f"{tensor}: there is no dtype {name!r}")
    return dtype


def check_metadata(metadata: Metadata, files: Mapping[str, FileEntry]) -> None:
    """Check that every tensor is covered by chunks that lie within the checkpoint's files.

    Raises:
        DamagedCheckpointError: naming the tensors that are not.
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
    if not faults:
        faults = _shared_bytes(metadata)
    if faults:
        raise DamagedCheckpointError(f"the index of the shards is damaged: {summary(faults)}")


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


def _shared_bytes(metadata: Metadata) -> list[str]:
    """Name the files of which two chunks claim the same bytes."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for info in metadata.storage_data.values():
        ranges[info.relative_path].append((info.offset, info.offset + info.length))
    faults = []
    for file, found in ranges.items():
        found.sort()
        if any(end > begin for (_, end), (begin, _) in pairwise(found)):
            faults.append(f"two chunks claim the same bytes of {file}")
    return faults


def _check_memory(content: bytes) -> None:
    """Refuse a pickle whose memo has holes: the unpickler allocates up to the largest number."""
    puts = highest = 0
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT"):
            puts, highest = puts + 1, max(highest, int(argument or 0))
    if highest > puts:
        raise DamagedCheckpointError(f"{METADATA_FILE} numbers {puts} objects up to {highest}")


class _RestrictedUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in DCP_METADATA_GLOBALS:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise DamagedCheckpointError(
            f"{METADATA_FILE} refers to {module_name}.{global_name}, which has no place in an "
            "index of shards: refusing to load it"
        )
