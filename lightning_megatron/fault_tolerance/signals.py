"""Signals that ask a run to end: what their handlers do, and what DataLoader workers do.

A handler runs between two instructions of the main thread, wherever that is: inside a collective's
wrapper, with a lock held, halfway through an update. All that is safe there is to note that the
signal came. `StopFlag` does that; the ranks agree on it later, at a point of their choosing.

A cluster that takes a machine back warns once and kills some 30 seconds later, and users press keys
twice. So a second signal means: leave now, without a save. But launchers pass on what also reached
their children by the process group, so that signals which come close together are one. A key is
pressed twice sooner than a cluster signals twice: two seconds are enough to tell two interrupts.

One run at a time listens. One that was never torn down, as an exception in some callback's
`on_exception` prevented it, is deaf from the start of the next; and what reaches a process forked
from that of the run, which has its handlers and its pipe, does not concern the run.

A scheduler that signals all processes of a job also signals DataLoader workers, which die of it;
the run then fails for want of data before it can save. `WorkerStart` lets a worker take such
signals from its parent only: a DataLoader's last resort at the end is to send its workers SIGTERM.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

SAME_S = 5.0
"""Signals that come within so many seconds of the first are copies of it."""

SAME_INTERRUPT_S = 2.0
"""Interrupts (Ctrl-C) that come within so many seconds of the first are copies of it."""

SHIELDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
"""Signals that schedulers and terminals send to all processes of a job."""

_JOIN_S = 1.0
"""Seconds in which a thread must notice that its pipe is closed."""

_INTERRUPTED = 128 + signal.SIGINT


class StopFlag:
    """Notes that a signal came; to be installed as its handler.

    Attributes:
        number: of the first signal, 0 when there was none.
        exit_code: of a process that leaves because of a signal; see `code_for`.
        speaks: whether this process says what an interrupt brings about.
        grace_s: how long the process may live after the first signal, wherever it may hang; None
            leaves that to whoever sent it.
        same_s, same_interrupt_s: see `SAME_S` and `SAME_INTERRUPT_S`.
    """

    _watching: ClassVar["StopFlag | None"] = None
    """Flag whose thread watches for signals in this process."""

    def __init__(self, exit_code: int = 143) -> None:
        self.number = 0
        self.exit_code = exit_code
        self.grace_s: float | None = None
        self.speaks = False
        self.same_s = SAME_S
        self.same_interrupt_s = SAME_INTERRUPT_S
        self._process = os.getpid()
        self._since: float | None = None
        self._first = 0  # as the thread has it; the main thread may hang and never note it
        self._pipe: tuple[int, int] | None = None
        self._former = -1
        self._thread: threading.Thread | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Note the signal; the second one ends the process."""
        del frame
        if os.getpid() != self._process:  # forked from it, and none of the run's
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.number = self.number or int(number)
        if self._pipe is None:  # else the thread keeps the time: a handler may come to run late
            self._came(number)

    def code_for(self, number: int) -> int:
        """Exit code of a process that leaves because of this signal.

        Args:
            number: of the signal. After an interrupt shells expect 130, whatever `exit_code` is.
        """
        return _INTERRUPTED if number == signal.SIGINT else self.exit_code

    def clear(self) -> None:
        """Begin anew, in this process: the next signal is a first one."""
        self.number = 0
        self._since = None
        self._process = os.getpid()

    def watch(self, numbers: Collection[int]) -> None:
        """Have a thread see signals, also while the main thread hangs, and keep time."""
        if threading.current_thread() is not threading.main_thread():
            return
        if StopFlag._watching is not None:
            StopFlag._watching.release()
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        self._former = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if self._former != -1:  # an event loop's, which needs it more
            signal.set_wakeup_fd(self._former)
            os.close(writing)
            os.close(reading)
            return
        self._pipe = reading, writing
        StopFlag._watching = self
        arguments = reading, frozenset(numbers)
        self._thread = threading.Thread(
            target=self._keep_watch, args=arguments, daemon=True, name="signals"
        )
        self._thread.start()

    def release(self) -> None:
        """End the thread."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            StopFlag._watching = None
            signal.set_wakeup_fd(self._former)
            os.close(pipe[1])
            assert self._thread is not None
            self._thread.join(_JOIN_S)

    @staticmethod
    def leave_to_parent() -> None:
        """Close the pipe in a forked process, whose signals would be written to it."""
        flag, StopFlag._watching = StopFlag._watching, None
        if flag is None or flag._pipe is None:
            return
        pipe, flag._pipe = flag._pipe, None
        signal.set_wakeup_fd(-1)
        for end in pipe:
            os.close(end)

    def _keep_watch(self, reading: int, numbers: frozenset[int]) -> None:
        while True:
            ready, _, _ = select.select([reading], [], [], self._left())
            if not ready:
                name = name_of(self._first)
                self._leave(f"{self.grace_s:g} s after {name} the run has not ended: leaving it")
            came = os.read(reading, 64)
            if not came:  # released
                os.close(reading)
                return
            for number in came:
                if number in numbers:
                    self._came(number)

    def _left(self) -> float | None:
        if self._since is None or self.grace_s is None:
            return None
        return max(self._since + self.grace_s - time.monotonic(), 0)

    def _came(self, number: int) -> None:
        now = time.monotonic()
        same_s = self.same_interrupt_s if number == signal.SIGINT else self.same_s
        if self._since is None:
            self._since = now
            self._first = number
            if self.speaks and number == signal.SIGINT:
                self._say("interrupt: the run ends after this batch; once more: at once, unsaved")
        elif now - self._since > same_s:
            self._leave(f"{name_of(number)} again: leaving at once, without a save")

    def _say(self, what: str) -> None:
        # Not through sys.stderr: the main thread may be amid a write.
        os.write(2, f"{what} (process {os.getpid()})\n".encode())

    def _leave(self, why: str) -> None:
        self._say(why)
        os._exit(self.code_for(self._first))


os.register_at_fork(after_in_child=StopFlag.leave_to_parent)


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """Handle an interrupt as Python does, and ignore those that follow.

    An interrupt may reach a process twice, by its group and by the process that started it.
    """
    del frame
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def name_of(number: float) -> str:
    """SIGTERM for 15."""
    try:
        return signal.Signals(int(number)).name
    except ValueError:
        return f"signal {int(number)}"


@dataclass(frozen=True)
class Stop:
    """Decision of all ranks to stop."""

    number: int
    """Number of the signal."""
    ranks: tuple[int, ...]
    """Ranks that got it."""

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"{name_of(self.number)} on rank{'s' if len(self.ranks) > 1 else ''} {ranks}"


@dataclass(frozen=True)
class WorkerStart:
    """A DataLoader's ``worker_init_fn`` that has its workers take signals from the parent only.

    A Python handler does not learn who sent a signal, and torch's own, which does, ends the worker
    otherwise. So the signals are blocked, and a thread waits for them; it sleeps in the kernel.
    """

    first: Callable[[int], Any] | None = None
    """The loader's own ``worker_init_fn``, which is called first."""
    signals: tuple[int, ...] = SHIELDED

    def __call__(self, worker: int) -> None:
        """Begin a worker."""
        signal.set_wakeup_fd(-1)  # a forked worker's is the parent's
        if self.first is not None:
            self.first(worker)
        # Threads that the dataset starts inherit the mask.
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        threading.Thread(
            target=_end_with_parents_signal, args=(self.signals, os.getppid()), daemon=True
        ).start()


def shield(first: Callable[[int], Any] | None) -> WorkerStart:
    """Function that takes the place of a loader's ``worker_init_fn``."""
    return first if isinstance(first, WorkerStart) else WorkerStart(first)


def _end_with_parents_signal(signals: tuple[int, ...], parent: int) -> None:
    while True:
        if signal.sigwaitinfo(signals).si_pid == parent:
            os._exit(0)  # as torch's handler does
