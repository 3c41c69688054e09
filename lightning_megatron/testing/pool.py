"""The pool: it borrows workers from a server, orders jobs and collects the answers."""

import contextlib
import multiprocessing.connection
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

from typing_extensions import Self

from lightning_megatron.launch.rendezvous_store import host_store
from lightning_megatron.testing.failures import Failure, WorkerError
from lightning_megatron.testing.server import DONE, Lent, WorkerServer, connect
from lightning_megatron.testing.worker import (
    LEAVE,
    STARTED,
    Job,
    end_of_output,
    has_written_its_stacks,
)

_GRACE_SECONDS = 3.0
"""Seconds in which the peers of a failed rank may fail by themselves."""

_START_SECONDS = 60.0
"""Least seconds that a worker has from the order to the call of the function."""

_STACK_SECONDS = 5.0
"""Seconds in which a stuck worker may write its Python stacks after its timeout."""


@dataclass(frozen=True)
class _Worker:
    """A borrowed worker."""

    lent: Lent
    connection: Connection


@dataclass
class _Run:
    """The state of one `WorkerPool.run` while it waits for its ranks."""

    server: Connection
    pending: dict[int, _Worker]
    workers: dict[int, _Worker] = field(init=False)
    """All workers of the run that have not been ended."""
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    starting: set[int] = field(init=False)
    """The ranks that have not called the function yet."""

    def __post_init__(self) -> None:
        self.workers = dict(self.pending)
        self.starting = set(self.pending)

    def end(self, rank: int) -> int | None:
        """Have the server end the worker of a rank; returns its exit code."""
        worker = self.workers.pop(rank, None)
        if worker is None:
            return None
        worker.connection.close()
        self.server.send((worker.lent.number,))
        code: int | None = self.server.recv()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Hand the workers back, and end those that have not answered."""
        for rank in self.pending:
            self.end(rank)  # when the wait was interrupted: it still computes
        for rank, worker in self.workers.items():
            if rank in self.results:
                # It has kept its process groups for its peers.
                with contextlib.suppress(OSError):
                    worker.connection.send(LEAVE)
            worker.connection.close()
        self.server.send(DONE)
        self.server.close()


class WorkerPool:
    """Worker processes that stay warm between runs.

    Args:
        size: the largest world that `run` accepts; processes start when they are first needed.
        timeout: seconds that a run may take unless it says otherwise.
        server: address of the `WorkerServer` that lends the workers; by default the pool begins one
            of its own, with all that this process has imported by its first run.
    """

    def __init__(self, size: int = 8, timeout: float = 60.0, server: str | None = None) -> None:
        self.size = size
        self.timeout = timeout
        self.processor_s = 0.0
        """Processor seconds that jobs have taken on all ranks, but for those that failed."""
        self._address = server

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the pool."""
        self.close()

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        grace: float = _GRACE_SECONDS,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on ranks 0 to `world_size - 1`.

        Args:
            world_size: number of ranks.
            fn: a module-level function; it forms its process group itself.
            args: positional arguments, the same on every rank; they must be picklable.
            timeout: seconds from the call of `fn` before the run is given up, `self.timeout` by
                default.
            grace: seconds that the peers of a failed rank may take to fail by themselves.
            env: further environment variables of the run.
            kwargs: keyword arguments for `fn`.

        Returns:
            What `fn` returned, by rank.

        Raises:
            WorkerError: a rank raised, died or did not finish in time.
        """
        __tracebackhide__ = True  # pytest shows the test's line and the rank's own traceback
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size={world_size} must be within 1 and the pool's {self.size}")
        timeout = self.timeout if timeout is None else timeout
        payload = pickle.dumps((fn, args, kwargs))
        with self._borrow(world_size) as run:
            # As torchrun's agent does. Were rank 0 to open it, the others would find it closed,
            # wait for up to a second and try again.
            store = host_store("127.0.0.1", 0, "127.0.0.1", timeout)
            try:
                for rank, worker in run.pending.items():
                    job = Job(
                        env=_rendezvous(rank, world_size, store.port) | dict(env or {}),
                        sys_path=list(sys.path),
                        directory=os.getcwd(),
                        payload=payload,
                        timeout=timeout,
                    )
                    worker.connection.send(job)
                self._wait(run, timeout, grace)
            finally:
                del store  # an error keeps this frame
        if run.failures:
            error = WorkerError(run.failures)
            raise error from error.failures[0].exception
        return [run.results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End the pool's own server with its workers; the pool cannot be used afterwards."""
        if "_server" in vars(self):
            self._server.close()

    @cached_property
    def _server(self) -> WorkerServer:
        return WorkerServer(self.size)

    def _borrow(self, count: int) -> _Run:
        """Wait for workers that are idle."""
        server = connect(self._address or self._server.address)
        server.send(count)
        lent: list[Lent] = server.recv()
        if not lent:
            server.close()
            raise ValueError(f"world_size={count} is more than the server has workers")
        return _Run(server, {r: _Worker(one, connect(one.address)) for r, one in enumerate(lent)})

    def _wait(self, run: _Run, timeout: float, grace: float) -> None:
        """Collect answers until all ranks answered, or the time is up."""
        starting = True
        deadline = time.monotonic() + max(timeout, _START_SECONDS)
        while run.pending:
            by_connection = {w.connection: rank for rank, w in run.pending.items()}
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(by_connection), max(left, 0))
            if not ready:
                self._give_up(run, timeout)
                return
            for connection in ready:
                self._collect(run, by_connection[connection])  # type: ignore[index]
            if starting and not run.starting:
                starting = False
                deadline = time.monotonic() + timeout
            if run.failures:
                deadline = min(deadline, time.monotonic() + grace)

    def _collect(self, run: _Run, rank: int) -> None:
        """Take a rank's next message: its start, its result, its failure, or its process's end."""
        worker = run.pending[rank]
        try:
            message = worker.connection.recv_bytes()
        except (EOFError, ConnectionError):
            ended, output = time.monotonic(), end_of_output(worker.lent.log)
            summary = f"the process ended with exit code {run.end(rank)}"
            answer: Any = Failure(rank=rank, summary=summary, output=output, time=ended)
        else:
            run.starting.discard(rank)
            if message == STARTED:
                return
            answer = pickle.loads(message)
        run.starting.discard(rank)
        del run.pending[rank]
        if isinstance(answer, Failure):
            run.failures.append(answer)
        else:
            run.results[rank] = answer.value
            self.processor_s += answer.processor_s

    def _give_up(self, run: _Run, timeout: float) -> None:
        """Record every rank that has not answered, with its stacks, and kill it."""
        secondary = bool(run.failures)
        patience = time.monotonic() + _STACK_SECONDS
        while not secondary and time.monotonic() < patience:
            if all(has_written_its_stacks(w.lent.log) for w in run.pending.values()):
                break
            time.sleep(0.05)
        for rank, worker in list(run.pending.items()):
            if rank in run.starting:
                summary = "did not start"
            elif secondary:
                summary = "was still running"
            else:
                summary = f"no result after {timeout:g} s"
            output = end_of_output(worker.lent.log)
            run.failures.append(Failure(rank=rank, summary=summary, output=output))
            run.end(rank)
            del run.pending[rank]


def _rendezvous(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that `torchrun` would set on one node."""
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "worker-pool",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }
    if any(name == "lo" for _, name in socket.if_nameindex()):
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env
