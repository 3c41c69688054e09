"""The thread in each rank that makes the rank visible to the node's monitor.

`Watchdog` updates the rank's page (`heartbeat`), writes its stacks on request (`stack_dump`), and
does what the node's monitor orders. The monitor (`node_monitor`) decides.

An exception can be set in the training thread, but it is raised only when that thread runs Python
again: at once in a loop or a short sleep, never in a collective of gloo or NCCL. Ranks that wait
there fail when the process that hangs ends and its connections close. Ending the process always
works, and a launcher that restarts runs needs it. So it is the default, with its own exit code.
"""

import ctypes
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_megatron._torch.collectives import watch_waits
from lightning_megatron._torch.groups import DEVICE_RECORDER, flight_recorder, group_ranks
from lightning_megatron.fault_tolerance.hangs import flight_recorder as recorder
from lightning_megatron.fault_tolerance.hangs.heartbeat import (
    EXIT,
    REPORTED,
    TELL,
    Member,
    Page,
    page_file,
    report_file,
    stack_file,
    trace_file,
    write_whole,
)
from lightning_megatron.fault_tolerance.hangs.node_monitor import MonitorConfig
from lightning_megatron.fault_tolerance.hangs.report import title
from lightning_megatron.fault_tolerance.hangs.section_limits import Limits
from lightning_megatron.fault_tolerance.hangs.stack_dump import StackRequests, state_of
from lightning_megatron.run_log.sections import SectionClock

logger = logging.getLogger(__name__)

EXIT_CODE = 86
"""Exit code of a process that was ended because a rank hung."""

_JOIN_S = 5.0


class HangError(RuntimeError):
    """A rank has hung."""


def this_member(rank: int) -> Member:
    """Return this process as a member; called by the training thread."""
    pid = os.getpid()
    return Member(rank, pid, state_of(pid).started, socket.gethostname(), threading.get_ident())


class Watchdog:
    """Makes this rank visible from outside, from `start` to `stop`.

    Args:
        clock: sections of the rank.
        directory: directory of the node's ranks.
        rank: global rank.
        limits: limits of the sections.
        check_s: seconds between checks of the monitor; the thread checks twice as often.
        on_report: called in the watchdog's thread of one rank with the report of a hang.
    """

    def __init__(
        self,
        clock: SectionClock,
        directory: Path,
        rank: int,
        limits: Limits,
        check_s: float,
        on_report: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._clock = clock
        self._directory = directory
        self._rank = rank
        self._limits = limits
        self._pause = check_s / 2
        self._on_report = on_report
        self._training_thread = threading.get_ident()
        self._page = Page(page_file(directory, rank))
        self._stacks = StackRequests(stack_file(directory, rank))
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hang watchdog", daemon=True)
        self._names: dict[str, str] = {}
        self._open: dict[str, tuple[int, int]] = {}
        self._earlier: dict[str, tuple[int, int]] = {}
        self._done = self._page.order[0]
        self._unwatch: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin to update the page, which the monitor may read from now on."""
        self._page.entered(self._clock)
        self._page.live(self._limits.of(self._clock))
        # Of groups of earlier runs, which will never complete them.
        self._earlier = _open_on_device(flight_recorder(entries=False)["pg_status"])
        self._clock.mirror = self._page
        self._unwatch = watch_waits(self._clock.began_to_wait, self._clock.waited)
        self._thread.start()

    def stop(self) -> None:
        """End: the page says that this rank has left training."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if self._unwatch is not None:
            self._unwatch()
        self._clock.mirror = None
        self._page.live(self._limits.of(self._clock), left=True)
        self._page.close()
        self._stacks.close()

    @property
    def held(self) -> bool:
        """Whether this process is about to be ended because of a hang."""
        return not self._end.is_set() and self._page.held

    def await_end(self, patience_s: float) -> None:
        """Wait to be ended; return after ``patience_s`` seconds."""
        self._end.wait(patience_s)

    def _run(self) -> None:
        while not self._end.wait(self._pause):
            self._page.live(self._limits.of(self._clock))
            try:
                self._look()
            except Exception:  # without this thread the rank has no heartbeat
                logger.exception("the hang watchdog of rank %d goes on after an error", self._rank)

    def _look(self) -> None:
        number, kind = self._page.order
        if number != self._done:
            self._done = number
            self._obey(number, kind)
        self._sample()

    def _sample(self) -> None:
        status = flight_recorder(entries=False)["pg_status"]
        unknown = [n for n, state in status.items() if n not in self._names and _begun(state)]
        if unknown:
            self._names.update(recorder.group_names(flight_recorder(entries=True)))
            self._names.update({n: f"#{n}" for n in unknown if n not in self._names})
        before, self._open = self._open, _open_on_device(status)
        standing = self._open.items() & before.items() - self._earlier.items()
        self._page.sample(recorder.counts(status, self._names), device_waits=bool(standing))

    def _obey(self, number: int, kind: int) -> None:
        if kind == TELL:
            self._stacks.write()
            trace = flight_recorder(entries=True)
            last, begun = recorder.latest(trace), recorder.begun(trace)
            answer = {"collectives": last, "begun": begun, "groups": group_ranks()}
            write_whole(trace_file(self._directory, self._rank, number), answer)
        elif kind == REPORTED:
            told = json.loads(report_file(self._directory, number).read_text())
            if told["teller"] == self._rank:
                self._on_report({**told["report"], "action": told["action"]})
            if told["action"] == "abort":
                _end_process()
            elif told["action"] == "raise":
                _raise_in(
                    self._training_thread, f"{title(told['report'])}: {told['report']['path']}"
                )
        elif kind == EXIT:
            _end_process()


def start_monitor(directory: Path, config: MonitorConfig) -> None:
    """Start the process that watches the ranks of a directory; it outlives this one.

    Args:
        directory: directory with the ranks' pages.
        config: the ranks, and the action on a hang.

    The process inherits ``config.watch.listening``, the socket of the board, if it has one.
    """
    config.write(directory)
    socket_of_board = None if config.watch is None else config.watch.listening
    root = str(Path(__file__).resolve().parents[3])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); "
        "from lightning_megatron.fault_tolerance.hangs.node_monitor import main; main()"
    )
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=() if socket_of_board is None else (socket_of_board,),
        check=True,
    )


def _open_on_device(status: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    return recorder.open_on_device(status, DEVICE_RECORDER)


def _begun(state: Mapping[str, Any]) -> bool:
    return int(state.get("last_enqueued_collective", -1)) > 0


def _end_process() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(EXIT_CODE)


def _raise_in(thread: int, message: str) -> None:
    """Raise `HangError` in a thread, when it next runs Python."""

    class Found(HangError):
        """Python makes an instance itself, without arguments."""

        def __init__(self) -> None:
            super().__init__(message)

    Found.__name__ = Found.__qualname__ = HangError.__name__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Found))
