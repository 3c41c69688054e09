"""zbv, v-half and v-min: the first and the last stage on one rank, memory as one chooses.

The network visits the ranks down and up again, so every rank has one stage whose activations live
long and one whose activations live short, and all ranks need the same room. Qi et al., *Pipeline
Parallelism with Controllable Memory*, arXiv 2405.15362, build schedules from a *pattern*: one
microbatch's way through the ranks, repeated every 6 units of time, which is the work of a
microbatch on a rank (forward and two halves of a backward, on two stages). Live activations follow
from the pattern: they are the time that activations live, over 6. So memory is chosen by choosing
how fast the way is.

A pattern is a number of units from rank to rank ``down`` (forwards of first stages, backwards of
second ones) and ``up`` (forwards of second stages, backwards of first ones). Two microbatches never
want a rank at one time if the four starts on every rank differ modulo 6; waiting a little at the
turns achieves that where it can be. On a rank a microbatch's two activations then live about ``2 p
(down + up)`` units. Weight halves are filled in (`weights`).

Drawings: 3 ranks with 2 stages each (small letters: the second), 4 microbatches, forward and halves
of the backward taking equal times, ``.`` idle. Below, ``T`` is the time of a microbatch on a rank.

**zbv** (arXiv 2401.10241, section 6): down 1, up 5. ::

    rank 0  F0 F1 F2 F3 ...f0 i0 f1 w0 i1 f2 w1 i2 I0 w2 f3 i3 W0 I1 w3 I2 W1 I3 W2 W3 ...
    rank 1  ...F0 F1 F2 f0 F3 f1 i0 w0 f2 i1 w1 I0 W0 f3 i2 w2 I1 i3 I2 W1 I3 w3 W2 W3 ...
    rank 2  ......F0 f0 F1 f1 F2 f2 i0 w0 I0 F3 W0 f3 i1 w1 I1 i2 I2 i3 I3 W1 w2 W2 w3 W3

* bubble: ``(p - 1) T / 6``, which is the time until the last rank has something to do
* live activations: ``2 p`` of a stage, as many bytes as 1f1b has on rank 0

**v-half**: down 1, up 2. ::

    rank 0  F0 F1 F2 ......f0 i0 w0 ......f1 i1 I0 w1 F3 W0 f2 i2 I1 w2 W1 f3 i3 I2 w3 W2 ...I3 W3
    rank 1  ...F0 F1 F2 f0 ......i0 w0 f1 I0 W0 i1 w1 f2 F3 I1 W1 i2 w2 f3 ...I2 i3 W2 w3 I3 W3 ...
    rank 2  ......F0 f0 F1 f1 ......i0 I0 w0 F2 W0 f2 i1 I1 w1 F3 W1 f3 i2 I2 w2 W2 i3 I3 w3 W3 ...

* bubble: at most ``(p - 1) T / 2``, half of that of 1f1b
* live activations: ``2 ((p + 2) // 2)`` of a stage, half of those of 1f1b and one rank's more

**v-min**: down 1, up 1, the fastest way there is; 4 ranks, 3 microbatches. ::

    rank 0  F0 F1 ...............f0 i0 F2 w0 ......f1 i1 I0 w1 W0 ...f2 i2 I1 w2 W1 .........I2 W2
    rank 1  ...F0 ............f0 F1 ...i0 w0 ...f1 F2 I0 i1 W0 w1 f2 ...I1 i2 W1 w2 ......I2 W2 ...
    rank 2  ......F0 ......f0 ......F1 ...i0 f1 w0 I0 F2 W0 i1 f2 w1 I1 W1 ...i2 w2 ...I2 W2 ......
    rank 3  .........F0 f0 ............F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 ......i2 I2 w2 W2 ......

* bubble: at most ``2 (p - 1) T / 3 + T / 6``, two thirds of that of 1f1b
* live activations: ``2 ((p + 4) // 3)`` of a stage, a third of those of 1f1b and one rank's more

A short way leaves no slack, so v-min suffers most when stages are uneven or transfers slow. Where
there are so few microbatches that a pattern with a smaller bubble fits into the same room, that one
is used.
"""

import itertools
from dataclasses import dataclass

from lightning_megatron.schedules.actions import Action, Kind, Rows, v_shaped
from lightning_megatron.schedules.wgrad_placement import fill_weights, room_needed

_PERIOD = 6
"""Units of work per microbatch on a rank: forward and two halves of a backward, on two stages."""

Route = list[list[tuple[int, Kind, int]]]
"""Start, kind and stage of the work on one microbatch, by rank, weight halves apart."""


def repeat(way: Route, num_microbatches: int) -> list[list[Action]]:
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
    """Route from rank 0 to the last: forwards of first stages, backwards of second ones."""
    up: int
    """Route from the last rank to rank 0: forwards of second stages, backwards of first ones."""

    def way(self, num_ranks: int) -> Route:
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
    """Rows of the first pattern in order of bubble that needs no more room than ``limit``.

    Of its fillings with either habit and without (`weights`) the one that ends first.
    """
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
