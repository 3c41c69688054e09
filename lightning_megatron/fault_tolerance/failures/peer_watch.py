"""A thread that ends this process when another one of the machine has died.

A process that waits for a dead one may wait long: gloo notices a broken connection in the next
collective only, NCCL not at all, and torchrun gives what it terminates 30 s. Who is busy in his own
code goes on for as long as that takes. The thread looks at the process table a few times a second.
It first lets the main thread find out by itself, for `GRACE_S`, as that can say more; processes
that have left in order do not count.

On one rank of each machine the thread also answers when others look for the cause of a failure:
this machine is there (`EndingBoard.answer`).

Nobody is watched after training: then ranks end when they like. A run that nobody ends, as its
strategy was given up or its process groups were destroyed, is over as well: these processes may be
in another run by now, with other peers.
"""

import os
import threading
import time
from collections.abc import Callable

from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.failures.board import ANSWER_S, Ending

GRACE_S = 4.0
"""How long the main thread has to notice by itself."""
_PERIOD_S = 0.25


class PeerWatch:
    """Watches the other processes until it is closed.

    Args:
        causes: who has failed, as it is known now; None when the run is over. Called several times
            a second.
        rank: of this process, for the message.
        leave: ends this process; by default with exit code 1, wherever its main thread is.
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
        self._causes, self._rank, self._answer = causes, rank, answer
        self._leave = leave or _leave
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="peer-watch")
        self._thread.start()

    def close(self) -> None:
        """Watch no more; whoever calls this ends by himself."""
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
                    ["this rank did not notice by itself, and is ended"],
                    rank=self._rank,
                )
                self._leave()
                return


def _leave() -> None:
    os._exit(1)
