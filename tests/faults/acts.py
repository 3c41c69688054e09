"""Faults, and the code that commits them: real signals, crashes, flipped bits and full disks.

`ACTS` has the faults that a process commits on itself, which need nothing but the `Fault`. The
other functions get the workers or directories that they damage.
"""

import ctypes
import errno
import math
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemWriter

_LONGEST_S = 2**31 - 1
"""Longest time that sleep(3) takes on every machine: 68 years."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong, once in a run."""

    kind: str
    """One of `ACTS`, or another that `FaultInjector` knows."""
    rank: int
    """Global rank."""
    step: int = 0
    """Optimizer steps before which it does not strike."""
    section: str = "forward"
    """data, forward, backward, optimizer, checkpoint or validation."""
    amount: float = math.inf
    """Seconds, milliseconds, exit code or factor, by kind."""
    steps: int = 1
    """Steps that it lasts, of ``slow``, ``disk_full``, and faults of the loss and gradients."""
    after: float = 0.0
    """Seconds since 1970 before which it does not strike."""
    draw: int = 0
    """Number that chooses what is damaged."""


class InjectedFaultError(RuntimeError):
    """Error of a fault of the kind ``exception``."""


def _kill(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_LONGEST_S)  # until it arrives


def _segfault(fault: Fault) -> None:
    ctypes.string_at(0)


def _abort(fault: Fault) -> None:
    os.abort()


def _exit(fault: Fault) -> None:
    os._exit(int(fault.amount))


def _exception(fault: Fault) -> None:
    raise InjectedFaultError(f"injected in {fault.section}")


def _hang(fault: Fault) -> None:
    time.sleep(min(fault.amount, _LONGEST_S))


def _hold_gil(fault: Fault) -> None:
    # A signal, as of somebody who asks for stacks, would end the sleep; other threads take it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        # A PyDLL does not release the lock around its calls, unlike any other library of ctypes.
        ctypes.PyDLL(None).sleep(math.ceil(min(fault.amount, _LONGEST_S)))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(fault: Fault) -> None:
    if math.isfinite(fault.amount):
        # By somebody else, as this process cannot wake itself; no child, which would want a wait().
        waking = f"(sleep {fault.amount:g}; kill -CONT {os.getpid()}) &"
        subprocess.run(["/bin/sh", "-c", waking], check=True, stdin=subprocess.DEVNULL)
    os.kill(os.getpid(), signal.SIGSTOP)


def _terminate(fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _slow(fault: Fault) -> None:
    time.sleep(fault.amount / 1e3)


ACTS: dict[str, Callable[[Fault], None]] = {
    "kill": _kill,
    "segfault": _segfault,
    "abort": _abort,
    "exit": _exit,
    "exception": _exception,
    "hang": _hang,
    "gil": _hold_gil,
    "stop": _stop,
    "sigterm": _terminate,
    "slow": _slow,
}
"""Functions of the faults that a process commits on itself, by kind."""

FATAL = frozenset({"kill", "segfault", "abort", "exit", "exception"})
"""Kinds that the process does not survive."""


def kill_loader_worker(draw: int) -> None:
    """Send SIGKILL to one of this process' DataLoader workers, if it has any."""
    workers = [p for p in multiprocessing.active_children() if p.daemon]
    if workers:
        worker = workers[draw % len(workers)]
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)


def flip_bit_of_newest(folders: Iterable[str | os.PathLike[str]], draw: int) -> None:
    """Flip one bit of the largest file of the newest checkpoint, as a bad disk does."""
    found = [path for folder in folders for path in Path(folder).glob("*.ckpt") if path.is_dir()]
    if not found:
        return
    newest = max(found, key=lambda path: path.stat().st_mtime)
    files = sorted(
        (file for file in newest.rglob("*") if file.is_file()),
        key=lambda file: (file.stat().st_size, file),
    )
    with files[-1].open("r+b") as file:
        place = draw % files[-1].stat().st_size
        file.seek(place)
        octet = file.read(1)[0]
        file.seek(place)
        file.write(bytes([octet ^ 1 << draw % 8]))


def fill_disk() -> ExitStack:
    """Make this process fail to write checkpoints, with the error of a full disk.

    Limits of the system would affect logs as well. So torch's `FileSystemWriter`, by which all of
    Lightning's sharded strategies write shards, raises the error.

    Returns:
        Stack that restores writing when it is closed.
    """
    room = ExitStack()
    write = FileSystemWriter.write_data

    def refuse(self: FileSystemWriter, *args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    setattr(FileSystemWriter, "write_data", refuse)  # noqa: B010 (a method)
    room.callback(setattr, FileSystemWriter, "write_data", write)
    return room
