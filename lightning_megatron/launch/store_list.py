"""`StoreList`: a list in a store; any process appends to it, and readers read what is new.

With `StoreBarrier` it is what ranks use that have no process groups yet, or whose groups hang as a
rank has failed: `rendezvous` lists who calls and what is wrong with him, the board of failures
(`fault_tolerance/failures/board.py`) who failed first. No reader asks for rank after rank: it polls
one number, and fetches the few new entries at once.
"""

from typing import Any


class StoreList:
    """Reader and writer of a list.

    A process may die after it was counted and before it has written, so an entry that is not there
    is read later, or never.

    Args:
        store: the store.
        name: key of the number of entries, and beginning of their keys.
        most: number of entries that are kept; further ones are only counted.
        from_now: whether to leave out what is there.
    """

    def __init__(
        self, store: Any, name: str, *, most: int | None = None, from_now: bool = False
    ) -> None:
        self._store = store
        self._name = name
        self._most = most
        self._counted = int(store.add(name, 0)) if from_now else 0
        self._unread: set[int] = set()

    def append(self, text: str) -> None:
        """Add an entry."""
        number = self._store.add(self._name, 1)
        if self._most is None or number <= self._most:
            self._store.set(f"{self._name}/{number}", text)

    def new(self) -> list[str]:
        """Entries that this reader has not seen yet, in their order."""
        store, count = self._store, int(self._store.add(self._name, 0))
        count = count if self._most is None else min(count, self._most)
        self._unread.update(range(self._counted + 1, count + 1))
        self._counted = count
        numbers = sorted(self._unread)
        keys = [f"{self._name}/{number}" for number in numbers]
        if len(keys) > 1 and store.has_extended_api() and store.check(keys):
            found = dict(zip(numbers, store.multi_get(keys), strict=True))
        else:
            there = zip(numbers, keys, strict=True)
            found = {number: store.get(key) for number, key in there if store.check([key])}
        self._unread -= found.keys()
        return [text.decode() for text in found.values()]

    def forget_unwritten(self) -> None:
        """Do not look any more for entries that were counted and are not there."""
        self._unread.clear()
