"""The parent's side of the pool: it forks the workers, orders jobs and collects the answers."""

import contextlib
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from typing_extensions import Self

from lightning_megatron._torch import forget_meshes
from lightning_megatron.launch.rendezvous_store import host_store
from lightning_megatron.testing.failures import Failure, WorkerError
from lightning_megatron.testing.worker import (
    LEAVE,
    STARTED,
    Job,
    end_of_output,
    has_written_its_stacks,
    serve,
)

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

_GRACE_SECONDS = 3.0
"""Seconds in which the peers of a failed rank may fail by themselves."""

_START_SECONDS = 60.0
"""Least seconds that a worker has from the order to the call of the function."""

_STACK_SECONDS = 5.0
"""Seconds in which a stuck worker may write its Python stacks after its timeout."""


@dataclass
class _Worker:
    """The parent's side of one worker process."""

    process: BaseProcess
    connection: Connection
    log: Path


@dataclass
class _Run:
    """The state of one `WorkerPool.run` while it waits for its ranks."""

    pending: dict[int, _Worker]
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    starting: set[int] = field(init=False)
    """The ranks that have not called the function yet."""

    def __post_init__(self) -> None:
        self.starting = set(self.pending)


class WorkerPool:
    """Worker processes that stay warm between runs.

    Args:
        size: the largest world that `run` accepts; processes start when they are first needed.
        timeout: seconds that a run may take unless it says otherwise.
    """

    def __init__(self, size: int = 8, timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self._workers: dict[int, _Worker] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="worker-pool-")
        # Before multiprocessing joins its children at exit, which would wait for ours for ever.
        self._finalizer = multiprocessing.util.Finalize(self, self._shutdown, exitpriority=100)
        for name in _PRELOAD:
            importlib.import_module(name)

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
        run = _Run(pending={rank: self._worker(rank) for rank in range(world_size)})
        # As torchrun's agent does. Were rank 0 to open it, the others would find it closed, wait
        # for up to a second and try again.
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
            # It has a thread, and a process forked now would die of it. An error keeps this frame.
            del store
            # Also when the wait is interrupted: a worker that still computes must not be reused.
            for rank in run.pending:
                self._kill(rank)
            for rank in run.results:
                self._release(rank)
        if run.failures:
            error = WorkerError(run.failures)
            raise error from error.failures[0].exception
        return [run.results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all workers; the pool cannot be used afterwards."""
        self._finalizer()

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
            worker.process.join(1)
            summary = f"the process ended with exit code {worker.process.exitcode}"
            answer: Any = Failure(
                rank=rank, summary=summary, output=end_of_output(worker.log), time=time.monotonic()
            )
            self._kill(rank)
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
            run.results[rank] = answer[0]

    def _give_up(self, run: _Run, timeout: float) -> None:
        """Record every rank that has not answered, with its stacks, and kill it."""
        secondary = bool(run.failures)
        patience = time.monotonic() + _STACK_SECONDS
        while not secondary and time.monotonic() < patience:
            if all(has_written_its_stacks(w.log) for w in run.pending.values()):
                break
            time.sleep(0.05)
        for rank, worker in list(run.pending.items()):
            if rank in run.starting:
                summary = "did not start"
            elif secondary:
                summary = "was still running"
            else:
                summary = f"no result after {timeout:g} s"
            run.failures.append(
                Failure(rank=rank, summary=summary, output=end_of_output(worker.log))
            )
            self._kill(rank)
            del run.pending[rank]

    def _worker(self, rank: int) -> _Worker:
        """Return the live worker of a rank, starting it where needed."""
        worker = self._workers.get(rank)
        if worker is None or not worker.process.is_alive():
            worker = self._workers[rank] = self._start(rank)
        return worker

    def _start(self, rank: int) -> _Worker:
        # Groups that this process has destroyed, but caches hold, cannot be freed in the worker.
        forget_meshes()
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        # A worker must not hold our ends of the pipes, else its peers never see us go.
        inherited = [ours, *(w.connection for w in self._workers.values())]
        log = Path(self._directory.name, f"rank{rank}.log")
        process = context.Process(target=serve, args=(theirs, inherited, log), daemon=False)
        process.start()
        theirs.close()
        return _Worker(process, ours, log)

    def _release(self, rank: int) -> None:
        """Let a worker leave the process groups of its job, which it kept for its peers."""
        with contextlib.suppress(OSError):
            self._workers[rank].connection.send(LEAVE)

    def _kill(self, rank: int) -> None:
        worker = self._workers.pop(rank, None)
        if worker is not None:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()

    def _shutdown(self) -> None:
        for rank in list(self._workers):
            self._kill(rank)
        self._directory.cleanup()


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
