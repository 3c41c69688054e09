"""Tensors in files: torch.distributed.checkpoint, driven by chunks.

DCP (``torch.distributed.checkpoint``) writes one file per rank and an index of which rectangle of
which tensor lies where. Its planner decides who writes what; ours takes `Chunk` objects: every rank
offers its own, and the first gives each rectangle that several ranks hold to the one with the
fewest bytes so far (parameters are identical on replicas; where values may differ, the lowest rank
writes). It then checks that the chunks of every tensor tile it. Planning and writing are separate
calls: a plan serves until names or shapes change, and tells which tensors have to be copied before
they are written in the background. Reading is in loading.py.

Files are written by one thread, as DCP loses the errors of its helper threads (pytorch issue
191391).
"""

import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
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

from lightning_megatron.checkpoint.digest import DigestingFileSystem, MemoryFiles, entry_of
from lightning_megatron.checkpoint.index import coverage_fault, summary
from lightning_megatron.checkpoint.manifest import METADATA_FILE, FileEntry
from lightning_megatron.checkpoint.peers import Peers
from lightning_megatron.checkpoint.state import Chunk
from lightning_megatron.checkpoint.storage import AnyPath
from lightning_megatron.checkpoint.write_error import write_error
from lightning_megatron.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """Who writes which rectangle, as one rank knows it."""

    mine: SavePlan
    """What this rank writes."""
    metadata: Metadata | None
    """The index, without places in files; on the first rank."""

    @property
    def names(self) -> frozenset[str]:
        """Tensors of which this rank writes a part."""
        return frozenset(item.index.fqn for item in self.mine.items)

    @property
    def size(self) -> int:
        """Bytes of tensors that this rank writes."""
        return sum(_item_bytes(item) for item in self.mine.items)

    @property
    def total(self) -> int:
        """Bytes of tensors that all ranks write; known to the first rank."""
        entries = () if self.metadata is None else self.metadata.state_dict_metadata.values()
        return sum(
            math.prod(entry.size) * entry.properties.dtype.itemsize
            for entry in entries
            if isinstance(entry, TensorStorageMetadata)
        )

    def under(self, prefix: str) -> "WritePlan":
        """Return the same plan for files whose names begin with something."""
        names = self.mine.storage_data
        renamed = replace(names, prefix=prefix + names.prefix)
        return replace(self, mine=replace(self.mine, storage_data=renamed)) if prefix else self


def offer(chunks: Mapping[str, Chunk]) -> SavePlan:
    """Describe what this rank holds; the same for as long as neither names nor shapes change."""
    return _SavePlanner(chunks).create_local_plan()


def plan_writes(what: str, offered: SavePlan, peers: Peers) -> WritePlan:
    """Agree on who writes what; collective.

    Args:
        what: what is being done; begins the message of an error.
        offered: what `offer` returned on this rank.
        peers: the ranks that write.

    Raises:
        CheckpointError: on every rank, when the ranks' chunks do not tile a tensor.
    """
    index: list[Metadata] = []  # on the first rank

    def assign(offers: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = _SavePlanner({}).create_global_plan(offers)
        index.append(metadata)
        return _Writer(Path()).prepare_global_plan(plans)

    mine = peers.deal(what, lambda: offered, assign)
    return WritePlan(mine=mine, metadata=index[0] if index else None)


def plan_in_turn(offered: Sequence[SavePlan]) -> list[WritePlan]:
    """Plan for one process that writes the files of several ranks, one after the other.

    Args:
        offered: what `offer` returned for each file.

    Raises:
        CheckpointError: the chunks do not tile a tensor.
    """
    plans, metadata = _SavePlanner({}).create_global_plan(list(offered))
    plans = _Writer(Path()).prepare_global_plan(plans)
    return [WritePlan(mine=plan, metadata=metadata) for plan in plans]


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one rank wrote."""

    places: Sequence[WriteResult]
    """Which rectangle lies where."""
    files: Mapping[str, FileEntry]
    """Size and hash of its files, by name."""
    linked: frozenset[str] = frozenset()
    """Those that were not written but shared with an earlier checkpoint."""


def write_shards(
    directory: AnyPath,
    plan: WritePlan,
    chunks: Mapping[str, Chunk],
    stop: Callable[[], bool] = lambda: False,
    file_system: DigestingFileSystem | None = None,
) -> Written | None:
    """Write this rank's file; not collective.

    Args:
        directory: exists, and all ranks see it.
        plan: of all ranks.
        chunks: values of at least the tensors that the plan gives to this rank.
        stop: asked before each tensor whether to give up.
        file_system: takes the file; by default, the local one.

    Returns:
        What `make_index` needs; None when it was stopped.

    Raises:
        CheckpointError: with the error of the system and the space that is left.
    """
    # Copying ahead is for device tensors: it opens a stream on a device of its own choice.
    on_device = any(not chunk.tensor.is_cpu for chunk in chunks.values())
    writer = _Writer(directory, file_system, copy_ahead=10_000_000 if on_device else 0)
    try:
        places = writer.write_data(plan.mine, _SavePlanner(chunks, stop)).value()
    except _Stopped:
        return None
    except Exception as error:
        raise write_error(error, directory, plan.size) from error
    return Written(places=places, files=writer.fs.files)


def make_index(plan: WritePlan, written: Sequence[Written]) -> tuple[Metadata, bytes]:
    """Make the index of the shards, on the first rank.

    Args:
        plan: of all ranks.
        written: what `write_shards` returned, by rank.

    Returns:
        The index, and the content of the file of it that DCP reads.
    """
    assert plan.metadata is not None
    writer, files = FileSystemWriter(Path(), sync_files=False), MemoryFiles()
    writer.fs = files
    # torch 2.11 enters the places in a copy, 2.13 in what it is given.
    places = {place.index: place.storage_data for part in written for place in part.places}
    metadata = replace(plan.metadata, storage_data=places)
    writer.storage_meta = StorageMeta  # type: ignore[method-assign]  # no path
    writer.finish(metadata, [list(part.places) for part in written])
    return metadata, files.contents[METADATA_FILE]


def write_chunks(
    directory: Path, chunks: Mapping[str, Chunk], peers: Peers
) -> dict[str, FileEntry]:
    """Write the chunks of all ranks, and their index; collective.

    Args:
        directory: an existing empty directory that all ranks see.
        chunks: this rank's part, by name of the whole tensor.
        peers: the ranks that write.

    Returns:
        Size and hash of the files of all ranks, by name.

    Raises:
        CheckpointError: on every rank, when any of them fails or the chunks do not tile a tensor.
    """
    what = f"writing {directory}"
    plan = plan_writes(what, offer(chunks), peers)

    def finish(results: list[Written | None]) -> dict[str, FileEntry]:
        written = [part for part in results if part is not None]
        _, content = make_index(plan, written)
        (directory / METADATA_FILE).write_bytes(content)
        files = {METADATA_FILE: entry_of(content)}
        for part in written:
            files |= part.files
        return files

    return peers.run(what, lambda: write_shards(directory, plan, chunks), finish)


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
        # An empty chunk says nothing, unless the whole tensor is empty.
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
            for name, chunk in self._chunks.items()
            if chunk.tensor.numel() or not math.prod(chunk.full_shape)
        ]
        pinned = frozenset(name for name, chunk in self._chunks.items() if not chunk.identical)
        return SavePlan(items, planner_data=pinned)

    @override
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _check_agreement(all_plans)
        plans, metadata = create_default_global_save_plan(_assign_writers(all_plans))
        faults = [
            f"{name}: {fault}"
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            and (fault := coverage_fault(entry.size, entry.chunks))
        ]
        if faults:
            raise CheckpointError(f"the ranks do not hold the whole state: {summary(faults)}")
        return plans, metadata

    @override
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    @override
    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if self._stop():
            raise _Stopped
        return self._chunks[write_item.index.fqn].tensor


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _item_bytes(item: WriteItem) -> int:
    data = _data(item)
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _check_agreement(plans: Sequence[SavePlan]) -> None:
    """Refuse ranks that mean different tensors by one name."""
    seen: dict[str, tuple[Any, ...]] = {}
    for plan in plans:
        for item in plan.items:
            kind = tuple(_data(item).size), _data(item).properties.dtype
            if seen.setdefault(item.index.fqn, kind) != kind:
                both = f"{seen[item.index.fqn]} and {kind}"
                raise CheckpointError(f"{item.index.fqn}: ranks differ in shape or dtype: {both}")


def _assign_writers(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Leave every rectangle in one plan only, balancing the bytes that the ranks write."""
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders[item.index].append(rank)
    items = {item.index: item for plan in plans for item in plan.items}
    load = [0] * len(plans)
    writer: dict[MetadataIndex, int] = {}
    for index in sorted(items, key=lambda i: len(holders[i])):  # those without a choice first
        ranks = holders[index]
        pinned = any(index.fqn in plans[rank].planner_data for rank in ranks)
        writer[index] = chosen = min(ranks) if pinned else min(ranks, key=load.__getitem__)
        load[chosen] += _item_bytes(items[index])
    return [
        replace(plan, items=[i for i in plan.items if writer[i.index] == rank], planner_data=None)
        for rank, plan in enumerate(plans)
    ]


class _Writer(FileSystemWriter):
    """Writes no file for a rank that has nothing to write."""

    def __init__(
        self,
        directory: AnyPath,
        file_system: DigestingFileSystem | None = None,
        copy_ahead: int = 0,
    ) -> None:
        fs = file_system or DigestingFileSystem()
        # In a store, closing a file is what makes it durable.
        syncs = fs.syncs and isinstance(directory, Path)
        super().__init__(
            directory, sync_files=syncs, thread_count=1, per_thread_copy_ahead=copy_ahead
        )
        self.fs: DigestingFileSystem = fs
        self.path = self.fs.init_path(directory)

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if plan.items:
            result: Future[list[WriteResult]] = super().write_data(plan, planner)
            return result
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing
