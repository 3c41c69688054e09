"""Where the second halves of split backwards go: into the time that a rank would stand idle.

Nobody waits for a ``W``, so the order of the other actions makes the schedule, and the ``W`` are
filled in: a rank does the next action of its order when that can start, otherwise the oldest ``W``
it owes. It also does a ``W`` before a forward for which it has no room, as an activation is held
until its ``W``. This needs times, for which a forward and each half of a backward count 1; the
order that comes of it is then fixed, whatever the true times are.

Two habits make an order run better, or worse, which only trying shows:

* *eager*: a rank whose next action cannot start yet, and that has room, does its next forward
  early, so that fewer forwards are left when the backwards come. Only as far as the order with the
  forward moved would still fit into the room if every ``W`` followed on its ``I``, so that the
  limit can never block a rank for good.
* *prompt*: a rank that is full does a ``W`` at once, and not only when a forward wants the room.
  That leaves slack before the next action that waits for a message.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_megatron.schedules.actions import Action, Kind, Rows

_DURATION = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 1,
}


@dataclass(frozen=True)
class Filled:
    """Complete rows, and what they cost when every action takes as long as any other."""

    rows: Rows
    """Work of every rank."""
    end: int
    """Time at which the last rank is done."""
    peak_live: int
    """Most activations of one microbatch and one stage that a rank holds at a time."""


def fill_weights(
    orders: Sequence[Sequence[Action]],
    stage_ranks: Sequence[int],
    limit: int,
    *,
    eager: bool = False,
    prompt: bool = False,
) -> Filled:
    """Insert the ``W`` of every ``I``.

    Args:
        orders: for every rank, its forwards and (halves of) backwards in a legal order.
        stage_ranks: rank of every stage.
        limit: activations (of one microbatch on one stage) that a rank has room for. The orders
            must not need more if every ``W`` followed on its ``I`` (`room_needed`).
        eager: see above.
        prompt: see above.
    """
    return _Filler(orders, stage_ranks, limit, eager=eager, prompt=prompt).run()


class _Filler:
    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        stage_ranks: Sequence[int],
        limit: int,
        *,
        eager: bool,
        prompt: bool,
    ) -> None:
        count = len(orders)
        self._orders = [list(order) for order in orders]
        self._stage_ranks = stage_ranks
        self._limit = limit
        self._eager = eager
        self._prompt = prompt
        self._rows: list[list[Action]] = [[] for _ in range(count)]
        self._owed: list[deque[Action]] = [deque() for _ in range(count)]
        self._next, self._free, self._live, self._peak = ([0] * count for _ in range(4))
        self._settled = [0] * count
        """Live activations of every rank once it has done the ``W`` it owes."""
        self._ends: dict[tuple[bool, int, int], int] = {}
        """End of each forward (True) and each input's gradient (False) of a stage, microbatch."""
        self._wakes = [(0, rank) for rank in range(count)]
        """Times at which a rank may have something to do."""

    def run(self) -> Filled:
        while self._wakes:
            now, rank = heapq.heappop(self._wakes)
            if self._free[rank] > now:
                continue  # it is woken again when it is free
            action = self._choose(rank, now)
            if action is not None:
                self._do(action, rank, now)
        if any(self._owed) or any(map(len, self._left())):
            raise AssertionError("the order of a schedule is not legal, or over its own limit")
        return Filled(tuple(map(tuple, self._rows)), max(self._free), max(self._peak))

    def _left(self) -> list[Sequence[Action]]:
        return [order[done:] for order, done in zip(self._orders, self._next, strict=True)]

    def _choose(self, rank: int, now: int) -> Action | None:
        order, owed = self._orders[rank], self._owed[rank]
        has_room = self._live[rank] < self._limit
        if owed and self._prompt and not has_room:
            return owed.popleft()
        if self._next[rank] < len(order):
            action = order[self._next[rank]]
            if (has_room or action.kind is not Kind.FORWARD) and self._arrival(action) <= now:
                self._next[rank] += 1
                return action
            if self._eager and has_room:
                early = self._early_forward(rank, now)
                if early is not None:
                    action = order.pop(early)
                    order.insert(self._next[rank], action)
                    self._next[rank] += 1
                    return action
        return owed.popleft() if owed else None

    def _early_forward(self, rank: int, now: int) -> int | None:
        """Place in the order of the first stage's next forward, if it can and may be done now."""
        order, live = self._orders[rank], self._settled[rank]
        for place in range(self._next[rank], len(order)):
            action = order[place]
            if action.kind is Kind.FORWARD and action.stage == rank:
                return place if place > self._next[rank] and self._arrival(action) <= now else None
            live += 1 if action.kind is Kind.FORWARD else -1
            if live >= self._limit:
                return None
        return None

    def _arrival(self, action: Action) -> float:
        """Time at which the other stage's input of ``action`` has arrived."""
        forward = action.kind is Kind.FORWARD
        neighbour = action.stage - 1 if forward else action.stage + 1
        if neighbour in (-1, len(self._stage_ranks)):
            return 0
        return self._ends.get((forward, neighbour, action.microbatch), float("inf"))

    def _do(self, action: Action, rank: int, now: int) -> None:
        kind, stage, microbatch = action
        end = now + _DURATION[kind]
        self._rows[rank].append(action)
        self._free[rank] = end
        heapq.heappush(self._wakes, (end, rank))
        if kind is Kind.FORWARD:
            self._live[rank] += 1
            self._peak[rank] = max(self._peak[rank], self._live[rank])
        elif kind is not Kind.BACKWARD_INPUT:
            self._live[rank] -= 1
        if kind is Kind.BACKWARD_WEIGHT:
            return
        if kind is Kind.BACKWARD_INPUT:
            self._owed[rank].append(Action(Kind.BACKWARD_WEIGHT, stage, microbatch))
        forward = kind is Kind.FORWARD
        self._settled[rank] += 1 if forward else -1
        self._ends[forward, stage, microbatch] = end
        neighbour = stage + 1 if forward else stage - 1
        if 0 <= neighbour < len(self._stage_ranks):
            heapq.heappush(self._wakes, (end, self._stage_ranks[neighbour]))


def room_needed(order: Sequence[Action]) -> int:
    """Most activations that ``order`` holds at a time when every ``W`` follows on its ``I``."""
    counts = itertools.accumulate(1 if a.kind is Kind.FORWARD else -1 for a in order)
    return max(counts, default=0)
