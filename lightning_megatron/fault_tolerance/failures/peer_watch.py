"""A thread that ends this process after another process of the machine has died.

A process that waits for a dead one may wait long: gloo notices a broken connection only in the next
collective, NCCL not at all, and torchrun waits 30 s for processes that it terminates. A rank that
is busy in its own code continues. The thread checks the process table a few times a second. It
first gives the main thread `GRACE_S` to notice, as its exception says more. Processes that have
left in order do not count.

On one rank of each machine the thread also answers searches for the cause of a failure
(`EndingBoard.answer`).

The watch ends with training, as ranks may then end at any time. It also ends if the strategy was
deleted or its process groups were destroyed: the processes may be in another run by now.
"""

import os
import threading
import time
from collections.abc import Callable

from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.failures.board import ANSWER_S, Ending

GRACE_S = 4.0
"""Seconds in which the main thread may notice by itself."""
_PERIOD_S = 0.25


class PeerWatch:
    """Watches the other processes until it is closed.

    Args:
        causes: returns the ranks known to have failed; None when the run is over. Called several
            times a second.
        rank: global rank of this process, for the message.
        leave: ends this process; by default with exit code 1, whatever its main thread does.
        answer: called every `ANSWER_S`.
    """

    def __init__(
        self,
        causes: Callable[[], list[Ending] | None],
        rank: int,
        leave: Callable[[], None] | None = None,
        *,
        answer: Callable[[], None] | None = None,
    ) -> None:
        self._causes = causes
        self._rank = rank
        self._answer = answer
        self._leave = leave or _leave
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="peer-watch")
        self._thread.start()

    def close(self) -> None:
        """End the watch."""
        self._closed.set()
        # The thread holds the run, its process groups included, for as long as it lives.
        if threading.current_thread() is not self._thread:
            self._thread.join(_PERIOD_S)

    def _watch(self) -> None:
        since: float | None = None
        next_answer = time.monotonic()
        while not self._closed.wait(_PERIOD_S):
            causes = self._causes()
            if causes is None:
                return
            if self._answer is not None and time.monotonic() >= next_answer:
                next_answer = time.monotonic() + ANSWER_S - _PERIOD_S
                self._answer()
            if not causes:
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since > GRACE_S and not self._closed.is_set():
                announce(
                    f"the run ends: {causes[0]}",
                    ["this rank did not notice within the grace period, and is ended"],
                    rank=self._rank,
                )
                self._leave()
                return


def _leave() -> None:
    os._exit(1)
