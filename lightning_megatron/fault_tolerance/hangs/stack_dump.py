"""Python stacks of a process, requested from outside, and its state by the kernel.

`faulthandler` writes the stacks of all threads from a signal handler in C, which runs whatever the
process does: it needs neither Python nor the GIL. So a process with `StackRequests` writes its
stacks on a signal, unless it is stopped or in the kernel; ``/proc`` shows these two states.

The handler may crash when it walks through the frames of a thread that runs at that moment, as it
may read freed memory. So a process that can still run Python writes its stacks itself, in
`StackRequests.write`, while it holds the GIL. The signal is for other processes, in which the
thread with the GIL stands still in C.

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
"""Request for stacks: a real-time signal, as schedulers and users use SIGUSR1 and SIGUSR2."""

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
        path: the file, to which tracebacks are appended.
    """

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("a")
        signal.signal(SIGNAL, signal.SIG_IGN)  # the handler after `close`
        faulthandler.register(SIGNAL, file=self._file, all_threads=True, chain=False)

    def write(self) -> None:
        """Append the stacks now."""
        faulthandler.dump_traceback(self._file, all_threads=True)

    def close(self) -> None:
        """End; later requests are ignored."""
        faulthandler.unregister(SIGNAL)
        self._file.close()


@dataclass(frozen=True)
class Frame:
    """Line of a Python program."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.name}"


def ask(pid: int) -> bool:
    """Request the stacks of a process; returns whether it exists."""
    try:
        os.kill(pid, SIGNAL)
    except OSError:
        return False
    return True


def read_since(path: Path, before: int, deadline: float) -> str:
    """Text of a file of stacks after its first ``before`` bytes, once it stops growing."""
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
    """Bytes of a file; 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def frames_of(text: str, thread: int) -> list[Frame]:
    """Frames of one thread in a traceback of all threads, innermost first."""
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
    """State of a process by the kernel.

    Attributes:
        letter: state as `ps` shows it; empty if there is no such process.
        started: start of the process in ticks.
        ticks: CPU time in ticks.
        waits_in: function of the kernel in which it sleeps, if known.
    """

    letter: str = ""
    started: int = 0
    ticks: int = 0
    waits_in: str = ""

    @property
    def exists(self) -> bool:
        """Whether it exists and has not ended."""
        return self.letter not in ("", "Z", "X", "x")

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.letter in ("T", "t")

    def __str__(self) -> str:
        text = _STATES.get(self.letter, self.letter or "gone")
        return f"{text} in {self.waits_in}" if self.waits_in else text


def state_of(pid: int) -> ProcessState:
    """Read the state of a process of this machine."""
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
