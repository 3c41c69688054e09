"""1f1b and interleaved: a rank alternates one forward with one backward as soon as it can.

**1f1b** (PipeDream-flush; Narayanan et al., arXiv 2104.04473, section 2.2.1). 4 ranks, 6
microbatches, backward taking twice as long as forward, ``.`` idle. ::

    rank 0  F0 F1 F2 F3 ..................B0--- F4 B1--- F5 B2--- ...B3--- ...B4--- ...B5---
    rank 1  ...F0 F1 F2 ............B0--- F3 B1--- F4 B2--- F5 B3--- ...B4--- ...B5--- ......
    rank 2  ......F0 F1 ......B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- ...B5--- ............
    rank 3  .........F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- ..................

* bubble: the same as gpipe, ``(p - 1) / (m + p - 1)`` of the step
* live activations: ``min(p - r, m)`` on rank ``r``, whatever the number of microbatches, so that a
  larger batch makes the bubble smaller at no cost in memory. This is why it is the default.

With transfers that take time 1f1b loses a little against gpipe, as every steady-state cycle waits
for a message; `simulate` shows how much.

**interleaved** (same paper, section 2.2.2): the network visits every rank ``v`` times, so that the
ramps at both ends of the step are ``v`` times shorter, for ``v`` times as many transfers. 3 ranks
with 2 stages each (small letters: the second), 3 microbatches. ::

    rank 0  F0 F1 F2 f0 f1 f2 ............b0--- ...b1--- ...b2--- B0--- B1--- B2---
    rank 1  ...F0 F1 F2 f0 f1 f2 ...b0--- ...b1--- ...b2--- B0--- B1--- B2--- ......
    rank 2  ......F0 F1 F2 f0 b0--- f1 b1--- f2 b2--- B0--- B1--- B2--- ............

* bubble: ``(p - 1) / v`` steps of a rank; ``(p - 1) / (v m + p - 1)`` of the step
* live activations: ``(v + 1) p - 2 r - 1`` of a stage on rank ``r``, ``p + (p - 1) / v`` of a rank

A rank takes the microbatches of a group on one stage before it turns to the next. The paper's
groups have ``p`` microbatches, so ``m`` must be a multiple of ``p``. Here ``m // p`` groups of
nearly equal size take any number of them: the bubble is the same, and live activations grow by
``v - 1`` for each microbatch that the largest group has beyond ``p``.
"""

import itertools

from lightning_megatron.schedules.actions import Action, Kind, Rows


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of 1f1b."""
    return tuple(
        alternate(
            [Action(Kind.FORWARD, rank, i) for i in range(num_microbatches)],
            [Action(Kind.BACKWARD, rank, i) for i in range(num_microbatches)],
            ahead=num_ranks - 1 - rank,
        )
        for rank in range(num_ranks)
    )


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Rows:
    """Rows of interleaved; of 1f1b, when a rank holds one stage."""
    if stages_per_rank == 1:
        return one_f_one_b(num_ranks, num_microbatches)
    groups = group_sizes(num_ranks, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = (
            in_groups(kind, rank, num_ranks, stages_per_rank, groups)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        ahead = (stages_per_rank - 1) * groups[0] + 2 * (num_ranks - 1 - rank)
        rows.append(alternate(forwards, backwards, ahead))
    return tuple(rows)


def group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Cut the microbatches into groups of nearly equal size, at least ``num_ranks`` where possible.

    A rank works through a group on one of its stages before it turns to the next one. A group
    smaller than the number of ranks has not come round to the first rank by then.

    >>> group_sizes(4, 11)
    [6, 5]
    """
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    return [size + 1] * larger + [size] * (count - larger)


def in_groups(
    kind: Kind, rank: int, num_ranks: int, stages_per_rank: int, groups: list[int]
) -> list[Action]:
    """Forwards (or backwards) of a rank: group by group, in a group stage by stage."""
    stages = range(rank, num_ranks * stages_per_rank, num_ranks)
    starts = itertools.accumulate(groups, initial=0)
    return [
        Action(kind, stage, start + i)
        for start, size in zip(starts, groups, strict=False)
        for stage in (stages if kind is Kind.FORWARD else reversed(stages))
        for i in range(size)
    ]


def alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """First ``ahead`` forwards, then one forward and one backward in turn."""
    ahead = min(ahead, len(forwards))
    row = forwards[:ahead]
    for forward, backward in itertools.zip_longest(forwards[ahead:], backwards):
        row += [backward] if forward is None else [forward, backward]
    return tuple(row)
