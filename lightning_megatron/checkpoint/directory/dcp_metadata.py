"""``.metadata``, which torch.distributed.checkpoint (DCP) reads: made of a manifest, or made one.

DCP stores the place of every rectangle of every tensor in one pickle, and its reader loads that
without restriction: whoever can write a checkpoint could run code on every machine that loads it.
So the pickle is an export of the manifest, for DCP's own tools, and this package never reads it
back. It names every chunk, and one process has to hold all of them to write it. Checkpoints of up
to `MOST_CHUNKS` chunks get one with each save; for larger ones ``lightning-megatron ckpt index``
makes it.

Checkpoints of Lightning's own strategies have no other index. It is unpickled with a list of the
few classes that it may refer to, and becomes a `Manifest`.
"""

import io
import math
import os
import pickle
import pickletools
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_megatron._torch.state_dicts import DCP_METADATA_GLOBALS, StorageInfo
from lightning_megatron.checkpoint.directory.coverage import raise_if_damaged, tensor_faults
from lightning_megatron.checkpoint.directory.hashed_files import LARGEST_TEXT, FileEntry
from lightning_megatron.checkpoint.directory.manifest import (
    METADATA_FILE,
    ChunkEntry,
    Manifest,
    Part,
    TensorEntry,
    split,
)
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.errors import DamagedCheckpointError

MOST_CHUNKS = 50_000
"""Largest number of chunks for which each save writes a ``.metadata``, at the cost of 10 MB and
about a second of one process."""


def pickled_metadata(tensors: Mapping[str, TensorEntry], parts: Iterable[Part]) -> bytes:
    """Return the content of ``.metadata``.

    Args:
        tensors: all tensors of a checkpoint.
        parts: the parts of all ranks.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    places: dict[MetadataIndex, StorageInfo] = {}
    for part in parts:
        for name, held in part.items():
            for chunk in held:
                offsets = torch.Size(chunk.offsets)
                chunks[name].append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
                place = StorageInfo(chunk.file, chunk.begin, chunk.length)
                places[MetadataIndex(name, offsets)] = place
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=entry.torch_dtype),
            size=torch.Size(entry.shape),
            chunks=chunks[name],
        )
        for name, entry in tensors.items()
    }
    writer = FileSystemWriter(Path(), sync_files=False)
    files = _MemoryFiles()
    writer.fs = files
    writer.storage_meta = StorageMeta  # type: ignore[method-assign]  # no path
    results = [
        WriteResult(index=index, size_in_bytes=place.length, storage_data=place)
        for index, place in places.items()
    ]
    writer.finish(Metadata(entries), [results])
    return files.contents[METADATA_FILE]


class _MemoryFiles(FileSystem):
    """A file system that keeps what is written in memory.

    Attributes:
        contents: content of the files, by name.
    """

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}

    @contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        stream = io.BytesIO()
        yield stream
        self.contents[Path(path).name] = stream.getvalue()

    @override
    def exists(self, path: str | os.PathLike[str]) -> bool:
        return Path(path).name in self.contents

    @override
    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self.contents[Path(new_path).name] = self.contents.pop(Path(path).name)


def read_metadata(directory: AnyPath) -> Metadata:
    """Read the pickled index of the shards without trusting it.

    Raises:
        OSError: the file cannot be read.
        DamagedCheckpointError: the file is not an index, or would run code.
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


def manifest_of(metadata: Metadata, files: Mapping[str, FileEntry]) -> Manifest:
    """Return the manifest of a directory that another library wrote.

    Args:
        metadata: its ``.metadata``.
        files: its files, with their sizes.

    Raises:
        DamagedCheckpointError: the files do not hold some tensors, which it names.
    """
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    chunks: dict[str, list[ChunkEntry]] = {}
    faults = []
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            faults.append(f"{name}: not a tensor")
            continue
        try:
            dtype = entry.properties.dtype
            kind = str(dtype).removeprefix("torch."), tuple(entry.size)
            held = [_chunk(name, chunk, metadata.storage_data) for chunk in entry.chunks]
            for chunk in held:
                _check_place(chunk, dtype.itemsize, files)
            kinds[name], chunks[name] = kind, held
        except DamagedCheckpointError as error:
            faults.append(f"{name}: {error}")
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            faults.append(f"{name}: damaged entry ({error!r})")
    raise_if_damaged(faults)
    manifest = Manifest(files=files, **split(kinds, chunks))
    raise_if_damaged(tensor_faults(manifest.tensors))
    return manifest


def _check_place(chunk: ChunkEntry, itemsize: int, files: Mapping[str, FileEntry]) -> None:
    if chunk.file not in files:
        raise DamagedCheckpointError(f"there is no file {chunk.file!r}")
    end, needed = chunk.begin + chunk.length, math.prod(chunk.sizes) * itemsize
    if chunk.begin < 0 or chunk.length < needed or end > files[chunk.file].size:
        raise DamagedCheckpointError(f"the chunk at {chunk.offsets} exceeds file {chunk.file}")


def _chunk(
    name: str, chunk: ChunkStorageMetadata, places: Mapping[MetadataIndex, StorageInfo]
) -> ChunkEntry:
    info = places.get(MetadataIndex(name, chunk.offsets))
    if info is None:
        raise DamagedCheckpointError(f"the chunk at {tuple(chunk.offsets)} is in no file")
    if getattr(info, "transform_descriptors", None):
        raise DamagedCheckpointError("stored through an unknown transformation")
    return ChunkEntry(
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        file=info.relative_path,
        begin=info.offset,
        length=info.length,
    )


def _check_memory(content: bytes) -> None:
    """Refuse a pickle whose memo has holes, as the unpickler allocates up to the largest number."""
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
