"""Looking at a process from outside: its Python stacks, and what the kernel says about it.

`faulthandler` writes the stacks of all threads from a signal handler in C, which the kernel runs in
the middle of whatever the process does: no Python runs for it, and Python's lock need not be free.
So a process with `StackRequests` shows its stacks to whoever may send it a signal, unless it is
stopped or deep in the kernel; these two `/proc` can tell.

A handler that walks through the frames of a thread which runs at that moment may read freed memory
and crash. So a process that can still run Python writes its stacks itself, in
`StackRequests.write`, holding the lock so that nobody else runs; the signal is for those that
cannot, where whoever holds the lock stands still in C.

This file runs in a process without torch, see `node_monitor`.
"""

import faulthandler
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Asks for stacks. A real-time signal: schedulers and users have uses for SIGUSR1 and SIGUSR2."""

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a device or a file system",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}


class StackRequests:
    """Answers requests for this process's stacks in a file, until it is closed.

    Args:
        path: the file; one traceback follows the other.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a")
        signal.signal(SIGNAL, signal.SIG_IGN)  # what holds again after `close`
        faulthandler.register(SIGNAL, file=self._file, all_threads=True, chain=False)

    def write(self) -> None:
        """Add the stacks now."""
        faulthandler.dump_traceback(self._file, all_threads=True)

    def close(self) -> None:
        """Answer no more; a request that is on its way is ignored."""
        faulthandler.unregister(SIGNAL)
        self._file.close()


@dataclass(frozen=True)
class Frame:
    """A place in a Python program."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


def ask(pid: int) -> bool:
    """Ask a process for its stacks; whether it is there."""
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return False
    return True


def read_since(path: Path, before: int, deadline: float) -> str:
    """What is added to a file of stacks after its first ``before`` bytes, once it grows no more."""
    size = before
    while time.monotonic() < deadline:
        now = size_of(path)
        if now > before and now == size:
            break
        size = now
        time.sleep(0.02)
    if not path.exists():
        return ""
    with path.open(errors="replace") as file:
        file.seek(before)
        return file.read()


def size_of(path: Path) -> int:
    """Bytes in a file; 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def frames_of(text: str, thread: int) -> list[Frame]:
    """The frames of one thread in a traceback of all, innermost first."""
    frames, inside = [], False
    for row in text.splitlines():
        heading = _THREAD.match(row)
        if heading:
            inside = int(heading[1], 16) == thread
        found = _FRAME.match(row) if inside else None
        if found:
            frames.append(Frame(found["file"], int(found["line"]), found["name"]))
    return frames


@dataclass(frozen=True)
class ProcessState:
    """What the kernel says about a process.

    Attributes:
        letter: its state, as `ps` has it; empty if there is no such process.
        started: when it began, in ticks.
        ticks: CPU time it has used.
        waits_in: function of the kernel it sleeps in, if that is shown.
    """

    letter: str = ""
    started: int = 0
    ticks: int = 0
    waits_in: str = ""

    @property
    def exists(self) -> bool:
        """Whether it still can do anything."""
        return self.letter not in ("", "Z", "X", "x")

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.letter in ("T", "t")

    def __str__(self) -> str:
        text = _STATES.get(self.letter, self.letter or "gone")
        return f"{text} in {self.waits_in}" if self.waits_in else text


def state_of(pid: int) -> ProcessState:
    """Look at a process of this machine."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ProcessState()
    fields = text.rpartition(")")[2].split()
    try:
        waits_in = Path(f"/proc/{pid}/wchan").read_text().strip("0\n ")
    except OSError:
        waits_in = ""
    ticks = int(fields[11]) + int(fields[12])
    return ProcessState(fields[0], int(fields[19]), ticks, waits_in)
