"""zbv, v-half and v-min: the first and the last stage on one rank, memory as one chooses."""

import itertools
from dataclasses import dataclass

from lightning_megatron.pipeline.actions import Action, Kind, v_shaped
from lightning_megatron.pipeline.schedules.weights import Rows, fill_weights, room_needed

_PERIOD = 6
"""Units of work per microbatch on a rank: forward and two halves of a backward, on two stages."""


Way = list[list[tuple[int, Kind, int]]]
"""For every rank start, kind and stage of what it does for one microbatch, weight halves apart."""


def repeat(way: Way, num_microbatches: int) -> list[list[Action]]:
    """Order of the actions on every rank when microbatches follow each other `_PERIOD` apart."""
    orders = []
    for steps in way:
        timed = sorted(
            (start + _PERIOD * i, stage, kind.value, i)
            for start, kind, stage in steps
            for i in range(num_microbatches)
        )
        orders.append([Action(Kind(kind), stage, i) for _, stage, kind, i in timed])
    return orders


@dataclass(frozen=True)
class Pattern:
    """One microbatch's way through the V: units of time from rank to rank."""

    down: int
    """From rank 0 to the last: forwards of first stages, backwards of second ones."""
    up: int
    """From the last rank to rank 0: forwards of second stages, backwards of first ones."""

    def way(self, num_ranks: int) -> Way:
        """Forwards and input halves of one microbatch.

        The turns are as early as they can be without two microbatches, `_PERIOD` apart, ever
        wanting a rank at the same time.
        """
        last = num_ranks - 1
        forward_turn = self.down * last + 1
        soonest = None
        for waits in itertools.product(range(_PERIOD), repeat=3):
            turn = forward_turn + waits[0]
            loss = turn + self.up * last + 1 + waits[1]
            home = loss + self.down * last + 1 + waits[2]
            ways = [
                [
                    (self.down * rank, Kind.FORWARD, rank),
                    (turn + self.up * (last - rank), Kind.FORWARD, last + 1 + last - rank),
                    (loss + self.down * rank, Kind.BACKWARD_INPUT, last + 1 + last - rank),
                    (home + self.up * (last - rank), Kind.BACKWARD_INPUT, rank),
                ]
                for rank in range(num_ranks)
            ]
            free = all(len({start % _PERIOD for start, *_ in way}) == len(way) for way in ways)
            if free and (soonest is None or home < soonest[0]):
                soonest = home, ways
        if soonest is None:
            raise AssertionError(f"{self} lets microbatches collide")
        return soonest[1]


ZBV = Pattern(down=1, up=5)
HALF = Pattern(down=1, up=2)
MIN = Pattern(down=1, up=1)


def zbv(num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of zbv."""
    return _fastest_within(2 * num_ranks, num_ranks, num_microbatches)


def v_half(num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of v-half."""
    return _fastest_within(2 * ((num_ranks + 2) // 2), num_ranks, num_microbatches)


def v_min(num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of v-min."""
    return _fastest_within(2 * ((num_ranks + 4) // 3), num_ranks, num_microbatches)


def _fastest_within(limit: int, num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of the first pattern in order of bubble that needs no more room than ``limit``."""
    for pattern in (ZBV, HALF, MIN):
        orders = repeat(pattern.way(num_ranks), num_microbatches)
        if max(map(room_needed, orders)) <= limit:
            placement = v_shaped(num_ranks)
            filled = [
                fill_weights(orders, placement, limit, eager=eager, prompt=prompt)
                for eager in (True, False)
                for prompt in (True, False)
            ]
            return min(filled, key=lambda candidate: candidate.end).rows
    raise AssertionError(f"no pattern runs in room for {limit} activations")
