"""Which items of the network go to which pipeline stage.

The slowest stage sets the pace of a pipeline: a step takes about ``(m + p - 1)`` times its
forward and backward. So the items (embedding, layers, norm, head: all of them, in order) are cut
into contiguous stages such that the most expensive stage is as cheap as possible. What an item
costs is the caller's choice: parameters, FLOPs or measured time. Where a rank holds several stages
the rule is the same, as the schedules count on equal stages, not on equal ranks.

This is the *linear partition problem*. Two passes solve it exactly:

1. The least possible maximum ``c``: bisection over integers, where one greedy sweep tells whether
   ``p`` stages of at most ``c`` are enough.
2. Many partitions share this maximum (a large head alone often sets it), so dynamic programming
   over (number of stages, items taken) picks among them the one with the smallest sum of squared
   stage costs, then the smallest sum of squared item counts, i.e. the most even one. Its inner loop
   ends where a stage would exceed ``c``, so that it takes about ``items**2`` steps, for any number
   of stages. What is still equal goes to the partition with the smaller first stages, as these
   hold the activations of the most microbatches (see `schedule`).

Costs are scaled to integers first, without rounding: sums of floats that are equal on paper would
otherwise break ties at random, and every rank must come to the same result.
"""

import math
from collections.abc import Sequence

from lightning_megatron.errors import raise_if_any


def partition_by_cost(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cut items into contiguous, non-empty stages with the least maximal cost.

    Args:
        costs: cost of every item, finite and not negative, in any unit.
        num_stages: number of stages, over all pipeline ranks.

    Returns:
        For every stage the indices of its items.

    Raises:
        ConfigError: when `partition_problems` finds a fault.

    >>> partition_by_cost([4, 1, 1, 1, 1, 4], 3)
    [range(0, 1), range(1, 5), range(5, 6)]
    """
    raise_if_any(partition_problems(len(costs), num_stages, costs=costs))
    exact = _to_integers(costs)
    return _most_even(exact, num_stages, _least_maximum(exact, num_stages))


def explicit_partition(counts: Sequence[int], num_items: int, num_stages: int) -> list[range]:
    """Stages of the sizes that the user listed.

    Args:
        counts: number of items on every stage.
        num_items: number of items that the network has.
        num_stages: number of stages, over all pipeline ranks.

    Raises:
        ConfigError: when `partition_problems` finds a fault.

    >>> explicit_partition([1, 3, 2], num_items=6, num_stages=3)
    [range(0, 1), range(1, 4), range(4, 6)]
    """
    raise_if_any(partition_problems(num_items, num_stages, counts=counts))
    return _ranges(counts)


def stage_costs(costs: Sequence[float], stages: Sequence[range]) -> list[float]:
    """Cost of every stage of a partition."""
    return [sum(costs[item] for item in stage) for stage in stages]


def partition_problems(
    num_items: int,
    num_stages: int,
    *,
    counts: Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
) -> list[str]:
    """Faults of a request for a partition; empty when it will work.

    Args:
        num_items: number of items that the network has.
        num_stages: number of stages, over all pipeline ranks (pp * stages_per_rank).
        counts: sizes of the stages, when the user lists them.
        costs: cost of every item, when the stages are to be balanced.

    >>> print(*partition_problems(6, 3, counts=[3, 2, 2]))
    partition=[3, 2, 2]: the stages take 7 items in all, the network has 6; nearest valid: \
partition=[2, 2, 2]
    """
    if num_stages < 1:
        return [
            f"pp*stages_per_rank={num_stages}: a pipeline has at least one stage; "
            f"nearest valid: pp*stages_per_rank=1"
        ]
    if num_items < num_stages:
        nearest = f"pp*stages_per_rank={num_items}, or " if num_items else ""
        return [
            f"pp*stages_per_rank={num_stages}, items={num_items}: every stage holds at least one "
            f"item of the PipelineSequential; nearest valid: {nearest}{num_stages} items"
        ]
    if counts is not None:
        return _count_problems(list(counts), num_items, num_stages)
    return _cost_problems(costs, num_items) if costs is not None else []


def nearest_counts(counts: Sequence[int], num_items: int, num_stages: int) -> list[int]:
    """Legal sizes of stages close to ``counts``, which may be any; balanced ones of another length.

    Args:
        counts: what was asked for.
        num_items: number of items to place, at least ``num_stages``.
        num_stages: number of stages, over all pipeline ranks.

    >>> nearest_counts([4, 0, 3], num_items=6, num_stages=3)
    [2, 1, 3]
    """
    if len(counts) != num_stages:
        return [len(stage) for stage in partition_by_cost([1] * num_items, num_stages)]
    numbers = [c if isinstance(c, int | float) and math.isfinite(c) else 1 for c in counts]
    nearest = [min(max(1, round(number)), num_items) for number in numbers]
    while sum(nearest) > num_items:
        nearest[nearest.index(max(nearest))] -= 1
    while sum(nearest) < num_items:
        nearest[-1 - nearest[::-1].index(min(nearest))] += 1
    return nearest


def _count_problems(counts: list[int], num_items: int, num_stages: int) -> list[str]:
    whole = all(isinstance(c, int) and not isinstance(c, bool) and c >= 1 for c in counts)
    total = sum(counts) if whole else None
    if len(counts) != num_stages:
        rule = f"{len(counts)} stages are listed, pp*stages_per_rank is {num_stages}"
    elif not whole:
        rule = "every stage holds a whole number of items, at least 1"
    elif total != num_items:
        rule = f"the stages take {total} items in all, the network has {num_items}"
    else:
        return []
    nearest = nearest_counts(counts, num_items, num_stages)
    return [f"partition={counts}: {rule}; nearest valid: partition={nearest}"]


def _cost_problems(costs: Sequence[float], num_items: int) -> list[str]:
    if len(costs) != num_items:
        return [
            f"costs={list(costs)}: {len(costs)} costs are listed, the network has {num_items} "
            f"items; nearest valid: one cost for each item"
        ]
    return [
        f"costs[{item}]={cost}: a cost is a finite number of at least 0; "
        f"nearest valid: costs[{item}]=0"
        for item, cost in enumerate(costs)
        if not (math.isfinite(cost) and cost >= 0)
    ]


def _to_integers(costs: Sequence[float]) -> list[int]:
    """Scale ``costs`` by one factor, exactly (a float is a fraction)."""
    fractions = [cost.as_integer_ratio() for cost in costs]
    common = math.lcm(*(denominator for _, denominator in fractions))
    return [numerator * (common // denominator) for numerator, denominator in fractions]


def _least_maximum(costs: Sequence[int], num_stages: int) -> int:
    """The least ``limit`` such that ``num_stages`` stages of at most ``limit`` hold all items."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(costs, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_needed(costs: Sequence[int], limit: int) -> int:
    stages, filled = 1, 0
    for cost in costs:
        if filled + cost > limit:
            stages, filled = stages + 1, 0
        filled += cost
    return stages


def _most_even(costs: Sequence[int], num_stages: int, limit: int) -> list[range]:
    """The stages of at most ``limit`` with the smallest squares (see the module docstring).

    ``best[i]`` is the least (sum of squared costs, sum of squared counts) of the items ``i`` to the
    end on the stages from the current one on; the first stage of equals is taken small.
    """
    end = len(costs)
    best: list[tuple[int, int] | None] = [None] * end + [(0, 0)]
    choices: list[list[int]] = []
    for _ in range(num_stages):
        reached: list[tuple[int, int] | None] = [None] * (end + 1)
        choice = [end] * (end + 1)
        for first in range(end):
            cost = 0
            for after in range(first + 1, end + 1):
                cost += costs[after - 1]
                if cost > limit:
                    break
                rest = best[after]
                if rest is None:
                    continue
                value = (cost * cost + rest[0], (after - first) ** 2 + rest[1])
                current = reached[first]
                if current is None or value < current:
                    reached[first], choice[first] = value, after
        best = reached
        choices.append(choice)
    cuts = [0]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return [range(first, after) for first, after in zip(cuts, cuts[1:], strict=False)]


def _ranges(counts: Sequence[int]) -> list[range]:
    stages, first = [], 0
    for count in counts:
        stages.append(range(first, first + count))
        first += count
    return stages
