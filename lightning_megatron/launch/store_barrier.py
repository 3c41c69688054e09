"""`StoreBarrier`: a barrier over the store of the processes, which can say who has not come.

A collective that some ranks call alone waits until the timeout of its group, or pairs up with one
that was meant for something else. Where a mistake of the user (``save_pretrained`` on rank 0 alone)
or the failure of one rank may have that effect, ranks meet at the store first, by which they found
each other. It needs no process group, and no collective blocks it.

It costs three small requests a rank, and polls, which become rarer.
"""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from lightning_megatron._torch.groups import default_store
from lightning_megatron.errors import ConfigError

PATIENCE_S = 120.0
"""Seconds that ranks may come after each other to a call of the user's."""
_KEY = "lightning_megatron/barrier"
_MET, _GIVEN_UP = b"met", b"given up"
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.1
_POLLS_PER_S = 4000
"""Polls per second of all ranks together, at most."""


class StoreBarrier:
    """Place in the store where some ranks meet, any number of times.

    Args:
        key: purpose of the meetings, the same on all ranks.
        ranks: global ranks that take part.
        rank: global rank of this process.
    """

    def __init__(self, key: str, ranks: Sequence[int], rank: int) -> None:
        self._ranks = tuple(ranks)
        self._rank = rank
        # The number of calls stands in the store, so that a new object of the same ranks goes on.
        digest = hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16]
        self._key = self._meeting = f"{_KEY}/{key}/{digest}"

    def require_all(self, what: str) -> None:
        """Wait until all ranks have called this as often as this one, for `PATIENCE_S`.

        Ranks that come to a meeting which others gave up meet at the next one.

        Args:
            what: call of the user's, as the beginning of the message.

        Raises:
            ConfigError: some have not come; on each of those that have.
        """
        if self.wait(PATIENCE_S):
            return
        store, size = default_store(), len(self._ranks)
        came = [str(rank) for rank in self._ranks if store.check([f"{self._meeting}/{rank}"])]
        numbered = self._ranks == tuple(range(size))
        raise ConfigError(
            f"{what}: called on ranks {', '.join(came)} of "
            f"{size if numbered else ', '.join(map(str, self._ranks))} alone within "
            f"{PATIENCE_S:.0f} s, and each has a part of the model; nearest valid: the same call "
            "on all ranks, not inside of `if trainer.is_global_zero`"
        )

    def wait(self, patience_s: float, *, again: bool = True) -> bool:
        """Wait until all ranks have called this as often as this one; returns whether they have.

        The first rank that sees all of them, or loses patience, writes the outcome of the meeting,
        which holds for all.

        Args:
            patience_s: how long to wait.
            again: whether a rank that comes after others gave up waits for them anew, at the next
                meeting.

        Raises:
            RuntimeError: the store is gone.
        """
        if len(self._ranks) == 1:
            return True
        store = default_store()
        while self._enter(store) == _GIVEN_UP:
            if not again:
                return False
        outcome = _GIVEN_UP
        try:
            if self._see_all(store, time.monotonic() + patience_s):
                outcome = _MET
        finally:  # an interrupt gives up, too
            key = f"{self._meeting}/outcome"
            outcome = bytes(store.compare_set(key, "", outcome.decode()))
        return outcome == _MET

    def _enter(self, store: Any) -> bytes:
        """Go on to the next meeting; returns its outcome, empty as long as it has none."""
        number = store.add(f"{self._key}/calls of {self._rank}", 1)
        self._meeting = f"{self._key}/{number}"
        return bytes(store.compare_set(f"{self._meeting}/outcome", "", ""))

    def _see_all(self, store: Any, deadline: float) -> bool:
        """Come to the meeting, and see whether all others do."""
        size = len(self._ranks)
        store.set(f"{self._meeting}/{self._rank}", "here")
        count = store.add(self._meeting, 1)
        pause, longest = (max(x, size / _POLLS_PER_S) for x in (_PAUSE_S, _LONGEST_PAUSE_S))
        while count < size and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, longest)
            count = store.add(self._meeting, 0)
        return bool(count >= size)
