"""The transfer of files between ranks, over ``torch.distributed`` on the host.

Both ends know the list of files, so only bytes are sent: block after block, into a buffer of fixed
size and from there to the disk, all files of a batch in parallel. Block ``j`` of every file is sent
in round ``j`` at both ends, so no two ranks wait for each other. A rank that cannot read or write
goes on sending and receiving, as its peer would wait for ever. The receiver compares the file with
the hash that was taken when the file was first written, and returns the fault.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.checkpoint.directory.hashed_files import FileEntry
from lightning_megatron.comm.peers import Peers

BLOCK_BYTES = 4 << 20
_AT_ONCE = 16
"""Number of files that a rank sends or receives at a time, each with a block of memory."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """A file that one rank sends to another."""

    name: str
    source: int
    """Rank that has it."""
    target: int
    """Rank that gets it."""


def exchange(
    transfers: Sequence[Transfer],
    entries: Mapping[str, FileEntry],
    directory: Path,
    peers: Peers,
) -> list[str]:
    """Send and receive files; every rank involved calls this with the same arguments.

    Args:
        transfers: all transfers, in the same order on all ranks.
        entries: size and hash of each file, by name.
        directory: directory of this rank's files, sent and received.
        peers: the ranks, over a group that is not in use elsewhere.

    Returns:
        Faults of this rank, one sentence each. A file with a fault is deleted.
    """
    faults: list[str] = []
    for batch in _batches(transfers):
        mine = [t for t in batch if peers.rank in (t.source, t.target)]
        with ExitStack() as files:
            ends = [_end(t, entries[t.name], directory, peers, faults, files) for t in mine]
            for number in range(max((end.blocks for end in ends), default=0)):
                active = [end for end in ends if number < end.blocks]
                works = [end.start() for end in active]
                for work in works:
                    work.wait()
                for end in active:
                    end.conclude()
            for end in ends:
                end.finish()
    return faults


def _batches(transfers: Sequence[Transfer]) -> Iterator[list[Transfer]]:
    """Split the list so that no rank has too many transfers at a time."""
    batch: list[Transfer] = []
    load: dict[int, int] = {}
    for transfer in transfers:
        ends = {transfer.source, transfer.target}
        if any(load.get(rank, 0) >= _AT_ONCE for rank in ends):
            yield batch
            batch, load = [], {}
        batch.append(transfer)
        for rank in ends:
            load[rank] = load.get(rank, 0) + 1
    if batch:
        yield batch


def _end(
    transfer: Transfer,
    entry: FileEntry,
    directory: Path,
    peers: Peers,
    faults: list[str],
    files: ExitStack,
) -> "_Sender | _Receiver":
    kind = _Sender if transfer.source == peers.rank else _Receiver
    return kind(transfer, entry, directory, peers, faults, files)


class _End:
    """End of a transfer on this rank."""

    def __init__(
        self,
        transfer: Transfer,
        entry: FileEntry,
        directory: Path,
        peers: Peers,
        faults: list[str],
        files: ExitStack,
    ) -> None:
        self.transfer = transfer
        self.entry = entry
        self.group = peers.group
        self.path = directory / transfer.name
        self.blocks = -(-entry.size // BLOCK_BYTES)
        self._left = entry.size
        self._buffer = torch.empty(min(BLOCK_BYTES, entry.size), dtype=torch.uint8)
        self._faults = faults
        self._failed = False
        self._file: BinaryIO | None = None
        try:
            self._file = files.enter_context(self.open())
        except OSError as error:
            self.fail(error)

    def open(self) -> BinaryIO:
        raise NotImplementedError

    def fail(self, reason: object) -> None:
        if not self._failed:
            self._faults.append(f"{self.transfer.name}: {reason}")
        self._failed = True

    def next_block(self) -> Tensor:
        return self._buffer[: min(BLOCK_BYTES, self._left)]


class _Sender(_End):
    def open(self) -> BinaryIO:
        return self.path.open("rb", buffering=0)

    def start(self) -> dist.Work:
        block = self.next_block()
        try:
            if self._file is None or self._failed:
                block.zero_()
            elif self._file.readinto(block.numpy()) != len(block):  # type: ignore[attr-defined]
                self.fail("the file is shorter than the manifest says")
        except OSError as error:
            self.fail(error)
        work = dist.isend(block, self.transfer.target, group=self.group)
        assert work is not None
        return work

    def conclude(self) -> None:
        self._left -= len(self.next_block())

    def finish(self) -> None:
        pass


class _Receiver(_End):
    def open(self) -> BinaryIO:
        self._digest = hashlib.sha256()
        return self.path.open("wb", buffering=0)

    def start(self) -> dist.Work:
        work = dist.irecv(self.next_block(), self.transfer.source, group=self.group)
        assert work is not None
        return work

    def conclude(self) -> None:
        block = self.next_block()
        self._left -= len(block)
        view = block.numpy().data
        self._digest.update(view)
        try:
            while view and self._file is not None and not self._failed:
                view = view[self._file.write(view) :]
        except OSError as error:
            self.fail(error)

    def finish(self) -> None:
        try:
            if self._file is not None and not self._failed:
                os.fsync(self._file.fileno())
                if self._digest.hexdigest() != self.entry.sha256:
                    self.fail(f"rank {self.transfer.source} sent other bytes than were written")
            if self._failed and self._file is not None:
                self.path.unlink(missing_ok=True)
        except OSError as error:
            self.fail(error)
