"""The worker's side of the pool: jobs come in through a socket, answers go back.

Between two jobs a worker destroys whatever process group is left, restores its environment and
seeds the random generators anew. Its output goes to a file, which starts empty with every job.
"""

import contextlib
import faulthandler
import gc
import logging
import os
import pickle
import random
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_megatron._torch.dtensor import forget_meshes
from lightning_megatron._torch.groups import abandon_process_groups, restart_group_names
from lightning_megatron.testing.failures import Failure
from lightning_megatron.topology.mesh import close_outlived

STARTED = b"started"
"""Message of a worker before it calls the function; the pickled answer follows."""
LEAVE = "leave"
"""Message to a worker that has sent a result: all its peers have answered."""

_STAY_SECONDS = 10.0
"""Seconds that a worker waits for it: peers that need more are stuck, and see it go."""

_LONG_SEARCH = 0.004
"""Processor seconds of a search for garbage that finds much which stays, as imported modules: later
searches leave it out."""

_LEFT_THREADS = 4
"""Threads that a worker may keep from its jobs, such as those of the backward pass."""

_OUTPUT_TAIL = 16_000
"""Last characters of a worker's output in an error: enough for a stack of a hundred calls."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank's share of a run."""

    env: dict[str, str]
    sys_path: list[str]
    directory: str
    payload: bytes
    """The pickled (function, args, kwargs): opened once `sys_path` is in place."""
    timeout: float
    """Seconds after which the worker writes its stacks."""


def end_of_output(log: Path) -> str:
    """Return the end of what a worker wrote during its current job."""
    with contextlib.suppress(OSError):
        return log.read_text(errors="replace")[-_OUTPUT_TAIL:]
    return ""


def spent(log: Path) -> Path:
    """File by which the worker of an output asks the server to have another take its place."""
    return log.with_suffix(".spent")


def has_written_its_stacks(log: Path) -> bool:
    """Say whether a worker's faulthandler is done: with the main thread, its last, to `serve`."""
    _, _, stack = end_of_output(log).rpartition("(most recent call first):\n")
    # It leaves out what lies deeper than a hundred calls.
    return f" in {serve.__name__}\n" in stack or "\n  ...\n" in stack


def serve(listening: socket.socket, inherited: list[socket.socket | Connection], log: Path) -> None:
    """Run the jobs of one pool after another: the main function of a worker."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)  # of what the parent trained; workers begun later have it not
    _until_exit = abandon_process_groups()
    # What was imported stays: not searched for garbage after every job, nor copied by the search.
    gc.freeze()
    for other in inherited:
        other.close()
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    _redirect_output(log)
    threads = _thread_count()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            connected, _ = listening.accept()
            with (
                contextlib.suppress(EOFError, ConnectionError),
                Connection(connected.detach()) as connection,
            ):
                while True:
                    _serve_one(connection, log)
                    if _is_spent(threads):
                        spent(log).touch()
    os._exit(0)


def _serve_one(connection: Connection, log: Path) -> None:
    """Run the next job of a pool; raises `EOFError` when the pool has hung up."""
    job: Job | str = connection.recv()
    if not isinstance(job, Job):
        return  # LEAVE, which it has waited for
    os.truncate(log, 0)
    try:
        answer = _perform(job, log, connection)
        connection.send_bytes(answer.text)
        # A failure ends its peers: afterwards, as theirs is not to arrive first. A result does so
        # later, as they may still be connecting to this rank.
        if not answer.failed:
            connection.poll(_STAY_SECONDS)
    finally:
        _leave_process_group()


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
                # Its stream may be closed, as that of an earlier test; setStream would flush it.
                handler.stream = sys.stderr


class Result(NamedTuple):
    """Result of a job."""

    value: Any
    processor_s: float
    """Processor seconds that it took on this rank."""


class _Answer(NamedTuple):
    """Answer of a job."""

    text: bytes
    """Pickled `Result` or `Failure`."""
    failed: bool


def _perform(job: Job, log: Path, connection: Connection) -> _Answer:
    """Run one job and return its answer."""
    rank = int(job.env["RANK"])
    begun, before = time.process_time(), dict(os.environ)
    os.environ.update(job.env)
    os.chdir(job.directory)
    sys.path[:] = job.sys_path
    _reset(rank)
    try:
        fn, args, kwargs = pickle.loads(job.payload)
        # To the captured output, by a thread that needs neither the interpreter nor a signal:
        # Lightning's Trainer resets the handlers of all signals.
        faulthandler.dump_traceback_later(job.timeout, file=2)
        connection.send_bytes(STARTED)
        with warnings.catch_warnings():
            value = fn(*args, **kwargs)
            result = Result(value, time.process_time() - begun)
            answer = _Answer(pickle.dumps(result), failed=False)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are failures of the job too
        answer = _Answer(_pickled_failure(rank, error, log), failed=True)
    finally:
        faulthandler.cancel_dump_traceback_later()
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
        output=end_of_output(log),
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
    close_outlived()
    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    restart_group_names()
    # Else the groups live on in torch's caches, and their threads take time from every later job.
    forget_meshes()
    begun = time.thread_time()
    # A destructor of torch's lets go of more: what stays now and is garbage later is not found.
    while gc.collect():
        pass
    if time.thread_time() - begun > _LONG_SEARCH:
        gc.freeze()


def _is_spent(threads: int) -> bool:
    """Say whether more than a few threads are left of earlier jobs, of `threads` at the beginning.

    Those of a gloo group end with its last reference, and wake a hundred times a second till then.
    Such a reference may be one that Python does not see: a graph that refers to itself in C++.
    """
    if _thread_count() - threads <= _LEFT_THREADS:
        return False
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    return _thread_count() - threads > _LEFT_THREADS


def _thread_count() -> int:
    """Threads of this process, Python's or not; 0 where the system does not list them."""
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
