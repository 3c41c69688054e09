"""``.metadata``: the index of the shards in the form of torch.distributed.checkpoint (DCP).

DCP stores the place of every rectangle of every tensor in one pickle, and its reader loads that
without restriction: whoever can write a checkpoint could run code on every machine that loads it.
Our manifests hold the same, so this package writes the pickle for DCP's own tools only. It names
every chunk, and one process has to hold all of them to write it. Checkpoints of up to `MOST_CHUNKS`
chunks get one with each save; for larger ones ``lightning-megatron ckpt index`` makes it.

Checkpoints of Lightning's own strategies have no other index. It is unpickled with a list of the
few classes that it may refer to.
"""

import io
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

from lightning_megatron._torch import DCP_METADATA_GLOBALS, StorageInfo
from lightning_megatron.checkpoint.directory.manifest import METADATA_FILE, TensorEntry, in_parts
from lightning_megatron.checkpoint.directory.rank_manifest import ChunkEntry, RankManifest
from lightning_megatron.checkpoint.directory.sealed_text import LARGEST_TEXT, is_file_name
from lightning_megatron.checkpoint.directory.storage import AnyPath
from lightning_megatron.errors import DamagedCheckpointError

MOST_CHUNKS = 50_000
"""Largest number of chunks for which each save writes a ``.metadata``, at the cost of 10 MB and
about a second of one process."""


def torch_dtype(tensor: str, name: str) -> torch.dtype:
    """Return the dtype of this name.

    Args:
        tensor: name of the tensor, for the error.
        name: name of the dtype, like ``bfloat16``.

    Raises:
        DamagedCheckpointError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpointError(f"{tensor}: there is no dtype {name!r}")
    return dtype


def pickled_index(tensors: Mapping[str, TensorEntry], parts: Iterable[RankManifest]) -> bytes:
    """Return the content of ``.metadata``.

    Args:
        tensors: all tensors of a checkpoint.
        parts: the manifests of all ranks.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in tensors}
    places: dict[MetadataIndex, StorageInfo] = {}
    for part in parts:
        for name, held in part.tensors.items():
            for chunk in held:
                offsets = torch.Size(chunk.offsets)
                chunks[name].append(ChunkStorageMetadata(offsets, torch.Size(chunk.sizes)))
                place = StorageInfo(chunk.file, chunk.begin, chunk.length)
                places[MetadataIndex(name, offsets)] = place
    entries: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=torch_dtype(name, entry.dtype)),
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


def parts_of(
    metadata: Metadata,
) -> tuple[dict[str, TensorEntry], dict[int, RankManifest], list[str]]:
    """Convert an index of DCP to the form of our manifests.

    Returns:
        Tensors, parts by number, and faults: entries that are no tensor, or in no file.
    """
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    chunks: dict[str, list[ChunkEntry]] = {}
    faults = []
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, TensorStorageMetadata):
            faults.append(f"{name}: not a tensor")
            continue
        try:
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            kind = dtype, tuple(entry.size)
            chunks[name] = [_entry(name, chunk, metadata.storage_data) for chunk in entry.chunks]
            kinds[name] = kind
        except DamagedCheckpointError as error:
            faults.append(f"{name}: {error}")
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            faults.append(f"{name}: damaged entry ({error!r})")
    tensors, parts = in_parts(kinds, chunks)
    return tensors, parts, faults


def _entry(
    name: str, chunk: ChunkStorageMetadata, places: Mapping[MetadataIndex, StorageInfo]
) -> ChunkEntry:
    info = places.get(MetadataIndex(name, chunk.offsets))
    if info is None:
        raise DamagedCheckpointError(f"the chunk at {tuple(chunk.offsets)} is in no file")
    if not is_file_name(info.relative_path):
        raise DamagedCheckpointError(f"file {info.relative_path!r} is not in the manifest")
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
