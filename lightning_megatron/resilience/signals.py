"""Signals that ask a run to end: what their handlers do, and what DataLoader workers do.

A handler runs between two instructions of the main thread, wherever that is: inside a collective's
wrapper, with a lock held, halfway through an update. All that is safe there is to note that the
signal came. `StopFlag` does that; the ranks agree on it later, at a point of their choosing.

A cluster that takes a machine back warns once and kills some 30 seconds later, and users press keys
twice. So a second signal means: leave now, without a save. But launchers pass on what also reached
their children by the process group, so that signals which come close together are one.

A scheduler that signals all processes of a job also signals DataLoader workers, which die of it;
the run then fails for want of data before it can save. `WorkerStart` lets a worker take such
signals from its parent only: a DataLoader's last resort at the end is to send its workers SIGTERM.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

SAME_S = 5.0
"""Signals that come within so many seconds of the first are copies of it."""

SHIELDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send to all processes of a job."""


class StopFlag:
    """Notes that a signal came; to be installed as its handler.

    Attributes:
        number: of the first signal, 0 when there was none.
        exit_code: of a process that leaves because of a signal.
        same_s: see `SAME_S`.
    """

    def __init__(self, exit_code: int = 143) -> None:
        self.number = 0
        self.exit_code = exit_code
        self.same_s = SAME_S
        self._process = os.getpid()
        self._since = 0.0
        self._wakes: int | None = None
        self._closed = threading.Event()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal; the second one ends the process."""
        del frame
        if os.getpid() != self._process:  # forked from it, and none of the run's
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if not self.number:
            self.number, self._since = int(number), now
            if self._wakes is not None:
                os.write(self._wakes, b"!")
        elif now - self._since > self.same_s:
            self._leave(f"{name_of(number)} again: leaving at once, without a save")

    def clear(self) -> None:
        """Begin anew, in this process: the next signal is a first one."""
        self.number, self._process = 0, os.getpid()

    def limit(self, seconds: float) -> None:
        """From the first signal on, let the process live for so long, wherever it may hang."""
        self.release()
        reading, self._wakes = os.pipe()
        self._closed = threading.Event()
        threading.Thread(
            target=self._end_late, args=(reading, seconds, self._closed), daemon=True, name="grace"
        ).start()

    def release(self) -> None:
        """Take the limit back."""
        self._closed.set()
        wakes, self._wakes = self._wakes, None
        if wakes is not None:
            os.close(wakes)

    def _end_late(self, reading: int, seconds: float, closed: threading.Event) -> None:
        came = os.read(reading, 1)  # empty when the other end is closed
        os.close(reading)
        if came and not closed.wait(max(self._since + seconds - time.monotonic(), 0)):
            name = name_of(self.number)
            self._leave(f"{seconds:g} s after {name} the run has not ended: leaving without it")

    def _leave(self, why: str) -> None:
        # Not through sys.stderr: the main thread may be amid a write.
        os.write(2, f"{why} (process {os.getpid()})\n".encode())
        os._exit(self.exit_code)


def name_of(number: float) -> str:
    """SIGTERM for 15."""
    try:
        return signal.Signals(int(number)).name
    except ValueError:
        return f"signal {int(number)}"


@dataclass(frozen=True)
class WorkerStart:
    """A DataLoader's ``worker_init_fn`` that has its workers take signals from the parent only.

    A Python handler does not learn who sent a signal, and torch's own, which does, ends the worker
    otherwise. So the signals are blocked, and a thread waits for them; it sleeps in the kernel.
    """

    first: Callable[[int], Any] | None = None
    """What the loader had before, which is called first."""
    signals: tuple[int, ...] = SHIELDED

    def __call__(self, worker: int) -> None:
        """Begin a worker."""
        if self.first is not None:
            self.first(worker)
        # Threads that the dataset starts inherit the mask.
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        threading.Thread(
            target=_end_with_parents_signal, args=(self.signals, os.getppid()), daemon=True
        ).start()


def shield(first: Callable[[int], Any] | None) -> WorkerStart:
    """What a loader's ``worker_init_fn`` becomes."""
    return first if isinstance(first, WorkerStart) else WorkerStart(first)


def _end_with_parents_signal(signals: tuple[int, ...], parent: int) -> None:
    while True:
        if signal.sigwaitinfo(signals).si_pid == parent:
            os._exit(0)  # as torch's handler does
