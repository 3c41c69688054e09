"""1f1b and interleaved: a rank alternates one forward with one backward as soon as it can."""

import itertools

from lightning_megatron.pipeline.actions import Action, Kind

Rows = tuple[tuple[Action, ...], ...]


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
