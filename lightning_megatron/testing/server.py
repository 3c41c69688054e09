"""The process that owns the workers, and lends them to pools.

A server forks workers as they are needed, from a process that has everything imported and no second
thread, and lends them out for one run each. Several processes may ask: the test processes of one
session share its workers, so that each worker imports a family of models once, and no more of them
compute than the machine has room for. A pool that is given no address begins a server of its own.

A lease is a connection to the server's socket. The pool asks for n workers and gets their sockets
as soon as n are idle, in the order in which pools have asked. It talks to the workers itself, and
hands them back by `DONE`; a connection that ends without it ends its workers, of which nobody knows
what they do. Sockets are files in a directory that only this user can enter.
"""

import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lightning_megatron._torch.dtensor import forget_meshes
from lightning_megatron.testing.worker import serve, spent

DONE = "done"
"""Message of a pool whose run is over: its workers are idle."""

_PRELOAD = (
    # FSDP2 imports _dynamo on first use: seven seconds in each of two workers unless it is here.
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torchmetrics",
    "lightning.pytorch",
)

_LOOK_SECONDS = 1.0
"""Seconds between two looks at whether the process that began the server is still there."""

_END_SECONDS = 1.0
"""Seconds in which a worker that hung up may end by itself, so that its exit code is its own."""


@dataclass(frozen=True, kw_only=True)
class Lent:
    """Address of a worker that is lent, as a pool gets it."""

    number: int
    address: str
    """Path of the socket at which it takes jobs."""
    log: Path
    """File with the output of its current job."""


@dataclass
class _Lease:
    """Number of workers that a pool has asked for, and those that it has."""

    size: int = 0
    workers: set[int] = field(default_factory=set)


class WorkerServer:
    """Worker processes that pools in several processes share.

    Args:
        size: the most workers that there are at a time; a run needs one for each of its ranks.
        preload: modules that workers shall find imported, beside those that most jobs use.
    """

    def __init__(self, size: int = 8, preload: Sequence[str] = ()) -> None:
        self.size = size
        self._directory = tempfile.TemporaryDirectory(prefix="worker-pool-")
        self.address = str(Path(self._directory.name, "server"))
        listening = listen(self.address)
        # Groups that this process has destroyed, but caches hold, cannot be freed in the server.
        forget_meshes()
        self._process = multiprocessing.get_context("fork").Process(
            target=_Server(listening, Path(self._directory.name), size, preload).run, daemon=False
        )
        self._process.start()
        listening.close()
        # Before multiprocessing joins its children at exit, which would wait for ours for ever.
        self._finalizer = multiprocessing.util.Finalize(self, self._shutdown, exitpriority=100)

    def close(self) -> None:
        """End the server and all of its workers."""
        self._finalizer()

    def _shutdown(self) -> None:
        self._process.terminate()
        self._process.join()
        self._directory.cleanup()


class _Server:
    """The loop of the server's process."""

    def __init__(
        self, listening: socket.socket, directory: Path, size: int, preload: Sequence[str]
    ) -> None:
        self._listening = listening
        self._directory = directory
        self._size = size
        self._preload = preload
        self._begun = 0
        self._workers: dict[int, BaseProcess] = {}
        self._idle: set[int] = set()
        self._leases: dict[Connection, _Lease] = {}
        self._waiting: deque[Connection] = deque()

    def run(self) -> None:
        """Lend workers until the process that began the server ends it, or is gone."""
        parent = os.getppid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the parent decides
        signal.signal(signal.SIGTERM, _leave)
        try:
            for name in (*_PRELOAD, *self._preload):
                importlib.import_module(name)
            gc.freeze()
            while os.getppid() == parent:
                sources: list[socket.socket | Connection] = [self._listening, *self._leases]
                for source in multiprocessing.connection.wait(sources, _LOOK_SECONDS):
                    if isinstance(source, Connection):
                        self._answer(source)
                    else:
                        self._leases[_accepted(self._listening)] = _Lease()
                self._lend()
        finally:
            for number in list(self._workers):
                self._end(number, patience=0.0)

    def _answer(self, client: Connection) -> None:
        """Do what a pool asks for: so many workers, the end of one, or of its lease."""
        try:
            message: int | tuple[int] | str = client.recv()
        except (EOFError, ConnectionError):
            self._close(client)
            return
        if message == DONE:
            self._idle |= self._leases[client].workers
            self._leases[client].workers.clear()
            self._close(client)
        elif isinstance(message, tuple):
            self._leases[client].workers.discard(message[0])
            code = self._end(message[0], _END_SECONDS)
            with contextlib.suppress(ConnectionError):
                client.send(code)
        elif isinstance(message, int):
            if message > self._size:
                client.send([])
                return
            self._leases[client].size = message
            self._waiting.append(client)

    def _close(self, client: Connection) -> None:
        for number in self._leases.pop(client).workers:
            self._end(number, patience=0.0)
        with contextlib.suppress(ValueError):
            self._waiting.remove(client)
        client.close()

    def _lend(self) -> None:
        """Give workers to those who wait, first come, first served."""
        while self._waiting:
            client = self._waiting[0]
            lease = self._leases[client]
            for number in [n for n in self._idle if not self._serves(n)]:
                self._idle.discard(number)
                self._end(number, patience=0.0)
            while len(self._idle) < lease.size and len(self._workers) < self._size:
                self._start()
            if len(self._idle) < lease.size:
                return
            # The lowest numbers: what they have imported serves the next run.
            chosen = sorted(self._idle)[: lease.size]
            self._waiting.popleft()
            self._idle -= set(chosen)
            lease.workers = set(chosen)
            with contextlib.suppress(ConnectionError):
                client.send([self._lent(number) for number in chosen])

    def _serves(self, number: int) -> bool:
        return self._workers[number].is_alive() and not spent(self._lent(number).log).exists()

    def _lent(self, number: int) -> Lent:
        return Lent(
            number=number,
            address=str(self._directory / f"worker{number}"),
            log=self._directory / f"worker{number}.log",
        )

    def _start(self) -> None:
        number, self._begun = self._begun, self._begun + 1
        lent = self._lent(number)
        listening = listen(lent.address)
        # A worker must not hold our ends of the connections.
        inherited = [self._listening, *self._leases]
        process = multiprocessing.get_context("fork").Process(
            target=serve, args=(listening, inherited, lent.log), daemon=False
        )
        process.start()
        listening.close()
        self._workers[number] = process
        self._idle.add(number)

    def _end(self, number: int, patience: float) -> int | None:
        """End a worker and return its exit code; None of one that is not there."""
        process = self._workers.pop(number, None)
        if process is None:
            return None
        process.join(patience)
        process.kill()
        process.join()
        lent = self._lent(number)
        for path in (lent.address, lent.log, spent(lent.log)):
            with contextlib.suppress(OSError):
                os.unlink(path)
        return process.exitcode


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(0)


def listen(address: str) -> socket.socket:
    """Listen at the path of a socket."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(address)
    listening.listen(64)
    return listening


def _accepted(listening: socket.socket) -> Connection:
    connected, _ = listening.accept()
    return Connection(connected.detach())


def connect(address: str) -> Connection:
    """Connect with the path of a socket."""
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connecting.connect(address)
    return Connection(connecting.detach())
