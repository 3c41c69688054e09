"""A better partition from measured times: which items to move, and what that gains.

Parameters and operations only hint at time: kernels differ in speed, memory-bound items take longer
than their operations say, tables of embeddings are cheap to read and dear to update. After some
measured steps the times are known. The search begins with the partition whose slowest stage is as
fast as possible (`partition.partition_by_cost`) and with the current one, and lets stages hand
single items to each other as long as the simulated step gets shorter.

The search matters where there are few microbatches. A step of 1F1B with a forward and backward of
``t_s`` on stage ``s`` takes about ``sum(t) + (m - 1) max(t)``, and less when the slowest stage is
early, as the ranks behind it do not wait for all of it. So the least maximum alone is within 5 % of
the best partition at 4 microbatches per rank (7 % with hardly more items than stages), but only
within 11 % at 2 and 16 % at 1; found by brute force over layers that differ by up to 4 times. For
placements with several stages on a rank the simulation also sees what the maximum over stages does
not: that ranks differ.

Pure functions of their arguments: ranks that pass the same numbers agree.

>>> from lightning_megatron.schedules.schedule import make_schedule
>>> plan = repartition(
...     make_schedule("1f1b", 2, 8),
...     [range(0, 3), range(3, 6)],
...     forward=[1, 1, 1, 1, 1, 4],
...     backward=[2, 2, 2, 2, 2, 8],
... )
>>> plan.stages, plan.step_time_before, plan.step_time_after
((range(0, 5), range(5, 6)), 153.0, 129.0)
>>> f"{plan.gain:.0%}"
'16%'
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lightning_megatron.schedules.actions import Schedule
from lightning_megatron.schedules.partition import partition_by_cost, stage_costs
from lightning_megatron.schedules.simulate import simulate

_MOST_ACTIONS = 500_000
"""Simulated during the search; some 3 seconds. A count, not a clock, so that ranks agree."""

_SHORTER = 1 - 1e-9
"""Sums of the same times in another order are no gain."""

_Stages = tuple[range, ...]


@dataclass(frozen=True, kw_only=True)
class Repartition:
    """A partition, and what it is worth."""

    stages: tuple[range, ...]
    """Item indices of every stage; the current ones when nothing better was found."""
    step_time_before: float
    """Simulated time of a step with the current stages, in the unit of the measured times."""
    step_time_after: float
    """Step time with the new ones; never longer."""

    @property
    def gain(self) -> float:
        """Share of the step time that is saved, in [0, 1)."""
        before = self.step_time_before
        return 1.0 - self.step_time_after / before if before else 0.0


def repartition(
    schedule: Schedule,
    stages: Sequence[range],
    forward: Sequence[float],
    backward: Sequence[float],
    *,
    weight_share: float = 0.5,
    send: float | Sequence[float] = 0.0,
) -> Repartition:
    """Plan other stages for the same schedule and placement.

    Args:
        schedule: what is run.
        stages: item indices of every current stage.
        forward: time of every item's forward of one microbatch, in any unit; loss included in that
            of the last. `spread_over_items` estimates them from the times of stages.
        backward: the same for the whole backward.
        weight_share: part of the backward that makes the gradients of the weights, which schedules
            with a split backward put off.
        send: time of one transfer between neighbouring stages, as for `simulate`.

    Raises:
        ValueError: the numbers of items or stages differ from each other.
        ConfigError: a time is negative or not finite.
    """
    current = tuple(stages)
    _check(schedule, current, len(forward), len(backward))
    num_actions = max(sum(len(row) for row in schedule.actions), 1)
    allowed = max(_MOST_ACTIONS // num_actions, 1)

    def step_time(candidate: _Stages) -> float:
        whole = stage_costs(backward, candidate)
        return simulate(
            schedule,
            forward=stage_costs(forward, candidate),
            backward_input=[(1.0 - weight_share) * time for time in whole],
            backward_weight=[weight_share * time for time in whole],
            send=send,
        ).step_time

    both = [f + b for f, b in zip(forward, backward, strict=True)]
    balanced = tuple(partition_by_cost(both, len(current)))
    times = {current: step_time(current)}
    best = current
    for start in (balanced, current):
        found = _descend(start, step_time, times, allowed)
        if times[found] < times[best] * _SHORTER:
            best = found
    return Repartition(stages=best, step_time_before=times[current], step_time_after=times[best])


def _descend(
    start: _Stages,
    step_time: Callable[[_Stages], float],
    times: dict[_Stages, float],
    allowed: int,
) -> _Stages:
    """Go to a better neighbour while there is one; ``times`` remembers what was simulated."""
    best = start
    times.setdefault(start, step_time(start))
    frontier = _neighbours(start)
    while (candidate := next(frontier, None)) is not None and len(times) <= allowed:
        if candidate in times:
            continue
        times[candidate] = step_time(candidate)
        if times[candidate] < times[best] * _SHORTER:
            best, frontier = candidate, _neighbours(candidate)
    return best


def spread_over_items(
    seconds: Sequence[float], stages: Sequence[range], costs: Sequence[float]
) -> list[float]:
    """Times of items from those of the stages that hold them, in proportion to ``costs``.

    Args:
        seconds: time of every stage.
        stages: item indices of every stage, in order.
        costs: of every item, such as its operations; where those of a stage are all 0, its items
            count alike.

    >>> spread_over_items([6.0, 4.0], [range(0, 3), range(3, 5)], [1, 1, 2, 0, 0])
    [1.5, 1.5, 3.0, 2.0, 2.0]
    """
    times: list[float] = []
    for time, stage in zip(seconds, stages, strict=True):
        weights = [costs[item] for item in stage]
        weights = weights if any(weights) else [1.0] * len(stage)
        times += [time * weight / sum(weights) for weight in weights]
    return times


def _neighbours(stages: _Stages) -> Iterator[_Stages]:
    """Partitions in which one stage gave an item and another took one; the nearest pairs first.

    Every stage between the two passes an item on, so that a run of borders moves by one.
    """
    borders = [stages[0].start, *(stage.stop for stage in stages)]
    inner = range(1, len(stages))
    runs = [(first, last) for first in inner for last in inner if first <= last]
    for first, last in sorted(runs, key=lambda run: run[1] - run[0]):
        for step in (-1, 1):
            moved = [b + step * (first <= i <= last) for i, b in enumerate(borders)]
            found = tuple(range(a, b) for a, b in zip(moved, moved[1:], strict=False))
            if all(found):
                yield found


def _check(schedule: Schedule, stages: _Stages, num_forward: int, num_backward: int) -> None:
    if len(stages) != schedule.num_stages:
        raise ValueError(f"{len(stages)} stages are given; the schedule has {schedule.num_stages}")
    num_items = stages[-1].stop
    if not num_forward == num_backward == num_items:
        raise ValueError(
            f"{num_forward} forward and {num_backward} backward times are given for {num_items} "
            "items"
        )
