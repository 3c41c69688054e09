"""Activations that a rank holds, at the moments of a schedule when it may hold the most.

The forward of a microbatch on a stage leaves activations, which *wait* for its backward. While a
backward in one piece *runs*, it frees them from the last to the first. Of one in two halves the
first leaves to the second what the weights' gradients need, computed again where it had been
forgotten: from then on the microbatch is *spent*, and frees it all at the end.

How many bytes that are depends on what is recomputed; here it is only counted what there is of each
kind when an action has come to hold the most, moments at which another holds as much left out.

>>> from lightning_megatron.schedules.schedule import make_schedule
>>> moments(make_schedule("1f1b", num_ranks=2, num_microbatches=4).row(0))
(LiveCount(waiting={0: 1}, spent={0: 0}, running=0),)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_megatron.schedules.actions import Action, Kind


@dataclass(frozen=True)
class LiveCount:
    """Microbatches that a rank holds something of, by stage."""

    waiting: Mapping[int, int]
    """Microbatches whose backward has not begun, by stage."""
    spent: Mapping[int, int]
    """Microbatches between the two halves of their backward, or in the first, by stage."""
    running: int | None
    """Stage of the backward in one piece that runs, of a microbatch that is not among the others.
    """

    def held(self, stage: int) -> int:
        """Microbatches of ``stage`` that wait, or whose backward runs."""
        return self.waiting[stage] + (self.running == stage)


ALONE = (LiveCount(waiting={0: 0}, spent={0: 0}, running=0),)
"""Counts of a process without a pipeline: one microbatch after the other, forward and backward."""


def moments(actions: Sequence[Action]) -> tuple[LiveCount, ...]:
    """The moments that count of a rank with these ``actions``.

    A forward without a backward (an evaluation) leaves nothing.
    """
    stages = sorted({action.stage for action in actions})
    waiting, spent = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    wanted = {action[1:] for action in actions if action.kind is not Kind.FORWARD}
    found: list[LiveCount] = []
    for kind, stage, microbatch in actions:
        if kind is Kind.BACKWARD_WEIGHT:
            spent[stage] -= 1
            continue
        running = stage if kind is Kind.BACKWARD else None
        if kind is not Kind.FORWARD:
            waiting[stage] -= 1
            spent[stage] += kind is Kind.BACKWARD_INPUT
        elif (stage, microbatch) in wanted:
            waiting[stage] += 1
        now = LiveCount(dict(waiting), dict(spent), running)
        if not any(_covers(known, now) for known in found):
            found = [known for known in found if not _covers(now, known)] + [now]
    return tuple(found)


def beside(found: Sequence[LiveCount], stage: int, count: int) -> tuple[LiveCount, ...]:
    """Counts of a rank that holds ``count`` microbatches of another stage throughout as well.

    Args:
        found: moments of its stages.
        stage: a number for what it holds, whose backwards run when the rest may be at its most.
        count: of microbatches.
    """
    stages = found[0].waiting
    most = {s: max(moment.held(s) for moment in found) for s in stages}
    spent = {s: max(moment.spent[s] for moment in found) for s in stages}
    return (
        *(LiveCount({**m.waiting, stage: count}, {**m.spent, stage: 0}, m.running) for m in found),
        LiveCount({**most, stage: count - 1}, {**spent, stage: 0}, stage),
    )


def _covers(one: LiveCount, other: LiveCount) -> bool:
    """Whether ``one`` holds as much as ``other``, whatever the bytes."""
    if other.running not in (None, one.running):
        return False
    waiting = one.waiting if other.running is not None else {s: one.held(s) for s in one.waiting}
    # What is spent takes at least what it took while it waited.
    return all(
        one.spent[s] >= other.spent[s]
        and waiting[s] + one.spent[s] >= other.waiting[s] + other.spent[s]
        for s in one.waiting
    )
