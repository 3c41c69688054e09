"""A pool of warm worker processes that runs a function as if under `torchrun`.

Starting four Python processes that import torch, Lightning and FSDP2 takes 5 to 9 seconds; a test
of a collective takes 50 milliseconds. `WorkerPool` therefore forks its workers once, from a process
which has everything imported, and sends them work:

    def job(scale):                     # a module-level function: workers import it by name
        dist.init_process_group("gloo")
        ...
        return some_tensor

    with WorkerPool(4) as pool:
        results = pool.run(2, job, 3.0)  # [result of rank 0, result of rank 1]

Every run gets fresh rendezvous variables (`RANK`, `WORLD_SIZE`, `MASTER_PORT`, ...) of the form
that `torchrun` sets, so `dist.init_process_group("gloo")` and a Lightning Trainer both find them.
After a run the worker destroys whatever process group is left, restores its environment and seeds
the random generators anew: runs do not see each other, yet they keep torch's warm caches.

When a rank fails, the first failure to arrive is raised as `WorkerError` with that rank's
traceback and output; peers blocked in a collective get a short grace time and are then replaced.
When a run takes too long, every stuck worker first writes its Python stacks, then is killed by its
process id and replaced. The pool stays usable after either. The time of a run counts from the
moment at which all its ranks have called the function: a worker may still be leaving the process
group of the run before, or have just been forked.

Fork is safe here because the parent never starts a second OpenMP thread team or CUDA on behalf of
the workers, and each worker calls `torch.set_num_threads(1)` before anything else: a child forked
from a parent with a live OpenMP team hangs in its first parallel region otherwise.
"""

import contextlib
import faulthandler
import gc
import importlib
import logging
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from typing_extensions import Self

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
"""How long the peers of a failed rank may take to fail by themselves."""

_START_SECONDS = 60.0
"""How long a worker may take from the order to the call of the function, at least."""

_STACK_SECONDS = 5.0
"""How long a stuck worker may take to write its Python stacks."""

_STARTED = b"started"
"""What a worker sends when it calls the function; the pickled answer follows."""

_OUTPUT_TAIL = 8000
"""How many characters of a worker's output go into an error."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What one rank left behind when it failed."""

    rank: int
    """The rank in the run."""
    summary: str
    """One line: the exception, or how the process ended."""
    traceback: str = ""
    """The formatted traceback; empty when the process was killed or died."""
    output: str = ""
    """The end of what the rank wrote to standard output and standard error."""
    exception: BaseException | None = None
    """The exception itself, where it could be pickled."""
    time: float = math.inf
    """When it was raised, on the clock of the machine; the cause comes before its echoes."""

    def __str__(self) -> str:
        """Return the failure as a block of text."""
        parts = [f"rank {self.rank}: {self.summary}", self.traceback.rstrip()]
        if self.output.strip():
            parts.append(f"--- output of rank {self.rank} ---\n{self.output.rstrip()}")
        return "\n".join(part for part in parts if part)


class WorkerError(RuntimeError):
    """At least one rank of a run failed.

    Args:
        failures: of all ranks; the first in time is the likely cause, the others are mostly peers
            that lost their connection.

    Attributes:
        failures: the failures in order of time.
        rank: the rank that failed first.
    """

    def __init__(self, failures: list[Failure]) -> None:
        self.failures = failures = sorted(failures, key=lambda failure: failure.time)
        self.rank = failures[0].rank
        blocks = [str(failures[0])]
        blocks += [f"also rank {f.rank}: {f.summary}" for f in failures[1:]]
        super().__init__("\n".join(blocks))


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One rank's share of a run."""

    env: dict[str, str]
    sys_path: list[str]
    directory: str
    payload: bytes
    """The pickled (function, args, kwargs): opened once `sys_path` is in place."""


@dataclass
class _Worker:
    """The parent's side of one worker process."""

    process: BaseProcess
    connection: Connection
    log: Path

    def output(self) -> str:
        """Return the end of what the worker wrote during its current job."""
        with contextlib.suppress(OSError):
            return self.log.read_text(errors="replace")[-_OUTPUT_TAIL:]
        return ""

    def has_written_its_stacks(self) -> bool:
        """Say whether faulthandler is done: with the main thread, its last, as far as `_serve`."""
        _, _, stack = self.output().rpartition("(most recent call first):\n")
        # It leaves out what lies deeper than a hundred calls.
        return f" in {_serve.__name__}\n" in stack or "\n  ...\n" in stack


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
        payload = pickle.dumps((fn, args, kwargs))
        port = _free_port()
        run = _Run(pending={rank: self._worker(rank) for rank in range(world_size)})
        for rank, worker in run.pending.items():
            job = _Job(
                env=_rendezvous(rank, world_size, port) | dict(env or {}),
                sys_path=list(sys.path),
                directory=os.getcwd(),
                payload=payload,
            )
            worker.connection.send(job)
        try:
            self._wait(run, self.timeout if timeout is None else timeout)
        finally:
            # Also when the wait is interrupted: a worker that still computes must not be reused.
            for rank in run.pending:
                self._kill(rank)
        if run.failures:
            error = WorkerError(run.failures)
            raise error from error.failures[0].exception
        return [run.results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all workers; the pool cannot be used afterwards."""
        self._finalizer()

    def _wait(self, run: _Run, timeout: float) -> None:
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
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)

    def _collect(self, run: _Run, rank: int) -> None:
        """Take a rank's next message: its start, its result, its failure, or its process's end."""
        worker = run.pending[rank]
        try:
            message = worker.connection.recv_bytes()
        except (EOFError, ConnectionError):
            worker.process.join(1)
            summary = f"the process ended with exit code {worker.process.exitcode}"
            answer: Any = Failure(
                rank=rank, summary=summary, output=worker.output(), time=time.monotonic()
            )
            self._kill(rank)
        else:
            run.starting.discard(rank)
            if message == _STARTED:
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
        for worker in run.pending.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(_pid(worker), signal.SIGUSR1)
        patience = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < patience and not all(
            worker.has_written_its_stacks() or not worker.process.is_alive()
            for worker in run.pending.values()
        ):
            time.sleep(0.05)
        for rank, worker in list(run.pending.items()):
            if rank in run.starting:
                summary = "did not start"
            elif secondary:
                summary = "was still running"
            else:
                summary = f"no result after {timeout:g} s"
            run.failures.append(Failure(rank=rank, summary=summary, output=worker.output()))
            self._kill(rank)
            del run.pending[rank]

    def _worker(self, rank: int) -> _Worker:
        """Return the live worker of a rank, starting it where needed."""
        worker = self._workers.get(rank)
        if worker is None or not worker.process.is_alive():
            worker = self._workers[rank] = self._start(rank)
        return worker

    def _start(self, rank: int) -> _Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        # A worker must not hold our ends of the pipes, else its peers never see us go.
        inherited = [ours, *(w.connection for w in self._workers.values())]
        log = Path(self._directory.name, f"rank{rank}.log")
        process = context.Process(target=_serve, args=(theirs, inherited, log), daemon=False)
        process.start()
        theirs.close()
        return _Worker(process, ours, log)

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


def _pid(worker: _Worker) -> int:
    pid = worker.process.pid
    assert pid is not None
    return pid


def _free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
        "OMP_NUM_THREADS": "1",
    }
    if any(name == "lo" for _, name in socket.if_nameindex()):
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def _serve(connection: Connection, inherited: list[Connection], log: Path) -> None:
    """Run jobs until the parent hangs up: the main function of a worker."""
    torch.set_num_threads(1)
    for other in inherited:
        other.close()
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    _redirect_output(log)
    # When the parent asks, write all stacks to the captured output: a timeout then has a place.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        while True:
            job: _Job = connection.recv()
            os.truncate(log, 0)
            connection.send_bytes(_perform(job, log, connection))
            # Afterwards: it takes a while, and ends peers whose failure is not to arrive first.
            _leave_process_group()
    os._exit(0)


def _exit_with_parent(parent: int) -> None:
    """End this process soon after its parent is gone, even when it hangs in a collective."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _redirect_output(log: Path) -> None:
    """Send standard output and error, and log handlers bound to older streams, to `log`."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)


def _perform(job: _Job, log: Path, connection: Connection) -> bytes:
    """Run one job and return the pickled answer: a 1-tuple with the result, or a `Failure`.

    Tells the parent of the start as late as it can: stacks asked for from then on are of the job.
    """
    rank = int(job.env["RANK"])
    before = dict(os.environ)
    os.environ.update(job.env)
    os.chdir(job.directory)
    sys.path[:] = job.sys_path
    _reset(rank)
    try:
        fn, args, kwargs = pickle.loads(job.payload)
        connection.send_bytes(_STARTED)
        with warnings.catch_warnings():
            answer = pickle.dumps((fn(*args, **kwargs),))
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures of the job too
        answer = _pickled_failure(rank, error, log)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return answer


def _pickled_failure(rank: int, error: BaseException, log: Path) -> bytes:
    """Describe an error, with the exception object where it survives pickling."""
    raised = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    summary = traceback.format_exception_only(error)[-1].strip()
    failure = Failure(
        rank=rank,
        summary=summary,
        traceback="".join(traceback.format_exception(error)),
        output=log.read_text(errors="replace")[-_OUTPUT_TAIL:],
        exception=error,
        time=raised,
    )
    try:
        answer = pickle.dumps(failure)
        pickle.loads(answer)
    except Exception:  # whatever a foreign exception does when it is copied
        answer = pickle.dumps(replace(failure, exception=None))
    # The frames of the job hold its modules and process groups.
    error.__traceback__ = None
    return answer


def _reset(rank: int) -> None:
    """Put process-wide state where a fresh process has it."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    random.seed(0)
    torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)


def _leave_process_group() -> None:
    """Destroy the process groups that a job left, so that its peers see it go."""
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    gc.collect()
