"""The writer of shards: torch.distributed.checkpoint (DCP), driven by chunks.

DCP writes one file per rank. Its planner decides which rank writes what; ours takes `Chunk`
objects, and the ranks have agreed before which of them writes each (write_assignment.py). Planning
and writing are separate calls: a plan is valid until names or shapes change, and says which tensors
have to be copied before they are written in the background. The reader is dcp_reader.py.

Files are written by one thread, as DCP loses the errors of its helper threads (pytorch issue
191391).

The manifest keeps the SHA-256 of every file, so that a flipped bit is found before it becomes a
weight; DCP itself loads it without a word. Each rank hashes the bytes that it hands to the file
system, which costs less than reading them again and also shows what the disk did to them later.
SHA-256 runs at 0.7 GB/s and more per core, without Python's lock.
"""

import hashlib
import io
import math
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_megatron._torch.devices import in_host_memory
from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.checkpoint.directory.hashed_files import FileEntry
from lightning_megatron.checkpoint.directory.manifest import ChunkEntry, Part, TensorEntry
from lightning_megatron.checkpoint.directory.storage import AnyPath, storage_path
from lightning_megatron.checkpoint.save.write_error import write_error


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """Assignment of rectangles to ranks, as one rank knows it."""

    number: int
    """Number of this rank, and of its part."""
    mine: SavePlan
    """Plan of DCP with the items that this rank writes."""
    count: int
    """Number of chunks that all ranks write."""
    tensors: Mapping[str, TensorEntry] | None
    """All tensors, with the rank that writes each rectangle; on the first rank."""

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors of which this rank writes a chunk."""
        return frozenset(item.index.fqn for item in self.mine.items)

    @property
    def size(self) -> int:
        """Bytes of tensors that this rank writes."""
        return sum(item_bytes(item) for item in self.mine.items)

    @property
    def total(self) -> int:
        """Bytes of tensors that all ranks write; known to the first rank."""
        entries = () if self.tensors is None else self.tensors.values()
        return sum(math.prod(entry.shape) * entry.torch_dtype.itemsize for entry in entries)

    def under(self, prefix: str) -> "WritePlan":
        """Return the plan with a prefix for the names of files."""
        names = self.mine.storage_data
        renamed = replace(names, prefix=prefix + names.prefix)
        return replace(self, mine=replace(self.mine, storage_data=renamed)) if prefix else self


def offer(chunks: Mapping[str, Chunk]) -> SavePlan:
    """Return the chunks of this rank as a plan of DCP; equal until names or shapes change."""
    return _SavePlanner(chunks).create_local_plan()


def plan_of(
    number: int,
    offered: SavePlan,
    positions: Mapping[str, Collection[int]],
    count: int,
    tensors: Mapping[str, TensorEntry] | None = None,
) -> WritePlan:
    """Return the plan of a rank after the assignment.

    Args:
        number: the rank.
        offered: the result of `offer` on that rank.
        positions: positions of the chunks that it writes, by name of the tensor.
        count: number of chunks that all ranks write.
        tensors: the table of all tensors, on the first rank.
    """
    seen: dict[str, int] = defaultdict(int)
    items = []
    for item in offered.items:
        name = item.index.fqn
        if seen[name] in positions.get(name, ()):
            items.append(item)
        seen[name] += 1
    plan = replace(offered, items=items, planner_data=None)
    (plan,) = _Writer(Path()).prepare_global_plan([plan])
    named = replace(plan.storage_data, prefix=f"__{number}_")
    return WritePlan(
        number=number, mine=replace(plan, storage_data=named), count=count, tensors=tensors
    )


@dataclass(frozen=True, kw_only=True)
class Written:
    """Files and chunks that one rank has written."""

    places: Sequence[WriteResult]
    """Place of each rectangle."""
    files: Mapping[str, FileEntry]
    """Size and hash of the files, by name."""
    linked: frozenset[str] = frozenset()
    """Names of the files that are links to those of an earlier checkpoint."""


def part_of(plan: WritePlan, written: Written) -> Part:
    """Return the part of this rank.

    Args:
        plan: the plan that was carried out.
        written: the result.
    """
    sizes = {item.index: tuple(data_of(item).chunk.sizes) for item in plan.mine.items}
    assert len(written.places) == len(sizes), "a chunk that was planned was not written"
    tensors: dict[str, list[ChunkEntry]] = defaultdict(list)
    for place in written.places:
        info = place.storage_data
        assert place.index.offset is not None
        tensors[place.index.fqn].append(
            ChunkEntry(
                offsets=tuple(place.index.offset),
                sizes=sizes[place.index],
                file=info.relative_path,
                begin=info.offset,
                length=info.length,
            )
        )
    return {name: tuple(chunks) for name, chunks in tensors.items()}


def write_shards(
    directory: AnyPath,
    plan: WritePlan,
    chunks: Mapping[str, Chunk],
    stop: Callable[[], bool] = lambda: False,
) -> Written | None:
    """Write this rank's file; not collective.

    Args:
        directory: a directory that exists and that all ranks see.
        plan: the plan of this rank.
        chunks: chunks of at least the tensors in the plan.
        stop: function that is called before each tensor; True gives up.

    Returns:
        Files and places of the chunks; None after a stop.

    Raises:
        CheckpointError: a file cannot be written; it has the system's error and the free space.
    """
    # Copying ahead is for device tensors: it opens a stream on a device of its own choice.
    on_device = any(not in_host_memory(chunk.tensor.device) for chunk in chunks.values())
    writer = _Writer(directory, copy_ahead=10_000_000 if on_device else 0)
    try:
        places = writer.write_data(plan.mine, _SavePlanner(chunks, stop)).value()
    except _Stopped:
        return None
    except Exception as error:
        raise write_error(error, directory, plan.size) from error
    return Written(places=places, files=writer.fs.files)


def _metadata_of(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=chunk.tensor.shape)


class _Stopped(Exception):
    """Writing was given up on request."""


class _SavePlanner(SavePlanner):
    def __init__(
        self, chunks: Mapping[str, Chunk], stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._chunks = chunks
        self._stop = stop

    @override
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        pass

    @override
    def create_local_plan(self) -> SavePlan:
        # An empty chunk is left out, unless the whole tensor is empty.
        items = [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_metadata_of(chunk),
                    properties=TensorProperties(dtype=chunk.tensor.dtype),
                    size=torch.Size(chunk.full_shape),
                ),
            )
            for name, held in self._chunks.items()
            for chunk in held.rectangles()
            if chunk.tensor.numel() or not math.prod(chunk.full_shape)
        ]
        pinned = frozenset(name for name, chunk in self._chunks.items() if not chunk.identical)
        return SavePlan(items, planner_data=pinned)

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise NotImplementedError("the ranks agree in write_assignment.py")

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if self._stop():
            raise _Stopped
        return values_of(self._chunks, write_item.index)


def values_of(chunks: Mapping[str, Chunk], index: MetadataIndex) -> Tensor:
    """Return the values of the rectangle that an index names."""
    assert index.offset is not None
    return chunks[index.fqn].rectangle(index.offset).tensor


def data_of(item: WriteItem) -> TensorWriteData:
    """Return the tensor data of an item; all of our items are tensors."""
    assert item.tensor_data is not None
    return item.tensor_data


def item_bytes(item: WriteItem) -> int:
    """Return the bytes of the values of an item."""
    data = data_of(item)
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class _Writer(FileSystemWriter):
    """DCP's writer; a rank without items writes no file."""

    def __init__(
        self,
        directory: AnyPath,
        copy_ahead: int = 0,
    ) -> None:
        # In a store a file is durable once it is closed.
        super().__init__(
            directory,
            sync_files=isinstance(directory, Path),
            thread_count=1,
            per_thread_copy_ahead=copy_ahead,
        )
        self.fs: DigestingFileSystem = DigestingFileSystem()
        self.path = self.fs.init_path(directory)

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if plan.items:
            result: Future[list[WriteResult]] = super().write_data(plan, planner)
            return result
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing


class DigestingFileSystem(FileSystem):
    """File system for DCP's writer, local or in a store, that hashes what is written.

    Attributes:
        files: size and hash of the written files, by name.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileEntry] = {}

    @contextmanager
    @override
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        with storage_path(path).open(mode) as raw:
            if "w" not in mode:
                yield raw
                return
            stream = _DigestingStream(cast(IO[bytes], raw))
            yield stream
            self.files[Path(path).name] = stream.entry

    @override
    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        return storage_path(path)

    @override
    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str | os.PathLike[str]:
        return storage_path(path) / suffix


class _DigestingStream:
    """File that is written from front to back and hashed on the way."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._digest = hashlib.sha256()
        self._size = 0

    @property
    def entry(self) -> FileEntry:
        return FileEntry(size=self._size, sha256=self._digest.hexdigest())

    def write(self, data: Any) -> int:
        count = self._raw.write(data)
        self._digest.update(data)
        self._size += count
        return count

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        # Used for fsync; DCP syncs its index without flushing (torch 2.11 to 2.13).
        self._raw.flush()
        return self._raw.fileno()

    def close(self) -> None:
        self._raw.close()
