"""Costs of a schedule without running it: timeline, bubble and live activations.

The model: a rank does its actions one after the other and starts each as soon as the actions that
it needs (`Schedule.needs`) have ended, plus the time of the transfer if they ran on another rank.
Transfers overlap with compute and with each other, as the runner posts them ahead; a stage
boundary inside one rank costs nothing. A whole backward takes as long as its two halves, unless
told otherwise. The times may be measured ones, in any unit.

The *step time* runs from the first action of any rank to the end of the last. The *bubble fraction*
is the idle share of all ranks' time during the step, ``1 - busy / (num_ranks * step_time)``. For
``p`` even stages and ``m`` microbatches, gpipe and 1f1b have ``(p - 1) / (m + p - 1)``. (Papers
also quote idle over *ideal* time, ``(p - 1) / m``.) The papers on zero bubble count for each rank
from its own first action to its own last, as the next step can begin on one rank while another
still works on this one, if nothing (such as clipping by the norm of all gradients) makes ranks wait
for each other in between: that is the *flowing step time*.

An activation is *live* on a stage from the start of its forward to the end of its backward, where
that is split to the end of its weight half, as the papers count it (the weight half needs the
stage's inputs).

A schedule in which ranks wait for each other in a circle, or for an action that no rank runs, is
refused with the actions named at which every rank stands.

>>> from lightning_megatron.schedules.schedule import make_schedule
>>> timeline = simulate(make_schedule("1f1b", num_ranks=2, num_microbatches=3))
>>> print(render(timeline))
rank 0  F0 F1 ......B0--- F2 B1--- ...B2---
rank 1  ...F0 B0--- F1 B1--- F2 B2--- ......
>>> timeline.step_time, timeline.bubble_fraction, timeline.peak_live
(12.0, 0.25, (2, 1))
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_megatron.schedules.actions import Action, Kind, Schedule


class DeadlockError(ValueError):
    """A schedule cannot run to its end.

    Attributes:
        blocked: the action at which each unfinished rank stands.
    """

    def __init__(self, schedule: Schedule, blocked: Mapping[int, Action], waits: Sequence[str]):
        self.blocked = dict(blocked)
        super().__init__(
            f"schedule {schedule.name} with {schedule.num_ranks} ranks and "
            f"{schedule.num_microbatches} microbatches cannot run: {'; '.join(waits)}"
        )


class Span(NamedTuple):
    """One action with its start and end."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """Start and end of every rank's actions; made by `simulate` or from measured times."""

    schedule: Schedule
    """Schedule that was run."""
    spans: tuple[tuple[Span, ...], ...]
    """Actions of every rank with their times, in order; the step starts at 0."""

    @property
    def step_time(self) -> float:
        """Time from 0 to the end of the last action."""
        return max((span.end for rank in self.spans for span in rank), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that every rank computes."""
        return tuple(sum(span.end - span.start for span in rank) for rank in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the ranks' time, in [0, 1)."""
        total = self.step_time * len(self.spans)
        return 1.0 - sum(self.busy) / total if total else 0.0

    @property
    def flowing_step_time(self) -> float:
        """Longest time of a rank from its first action to its last, see above."""
        return max((rank[-1].end - rank[0].start for rank in self.spans if rank), default=0.0)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Most activations (of one microbatch on one stage) that every rank holds at a time."""
        return tuple(int(peak_live_activations(row)) for row in self.schedule.actions)


def peak_live_activations(
    actions: Sequence[Action], weights: Mapping[int, float] | None = None
) -> float:
    """Most activations that a rank with these ``actions`` holds at a time.

    An activation that no backward ever asks for (an evaluation) is dropped at once.

    Args:
        actions: row of a rank.
        weights: what the activation of a microbatch on each stage counts, such as its bytes; 1 by
            default.
    """
    releasing = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    wanted = {(a.stage, a.microbatch) for a in actions if a.kind in releasing}
    live = peak = 0.0
    for kind, stage, microbatch in actions:
        weight = 1.0 if weights is None else weights[stage]
        if kind is Kind.FORWARD:
            peak = max(peak, live + weight)
            live += weight if (stage, microbatch) in wanted else 0.0
        elif kind in releasing:
            live -= weight
    return peak


def simulate(
    schedule: Schedule,
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] | None = None,
    backward_input: float | Sequence[float] | None = None,
    backward_weight: float | Sequence[float] | None = None,
    send: float | Sequence[float] = 0.0,
    measured: Mapping[Action, float] | None = None,
) -> Timeline:
    """Run ``schedule`` on paper.

    Args:
        schedule: what to run.
        forward: time of one microbatch's forward, for all stages or one for each stage.
        backward: the same for its backward in one piece; the sum of the halves by default, or 2.
        backward_input: the same for the half of the backward that makes the gradient of the stage's
            input; half of ``backward`` by default.
        backward_weight: the same for the other half; given when ``backward_input`` is.
        send: time of one transfer between neighbouring stages, for all boundaries or one for
            each (boundary ``i`` lies behind stage ``i``); the gradient takes as long as the
            activation.
        measured: times of single actions, which go before those of their stages.

    Raises:
        DeadlockError: when the actions wait for each other.
        ValueError: when a sequence of times does not have one entry for each stage (boundary), or
            only one half of the backward is given.
    """
    num_stages = schedule.num_stages
    durations = {
        Kind.FORWARD: _per_stage("forward", forward, num_stages),
        **_backward_times(backward, backward_input, backward_weight, num_stages),
    }
    sends = _per_stage("send", send, num_stages - 1)
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]

    def arrival(action: Action, needed: Action) -> float:
        here, there = schedule.rank_of_stage(action.stage), schedule.rank_of_stage(needed.stage)
        delay = 0.0 if here == there else sends[min(action.stage, needed.stage)]
        return ends[needed] + delay

    def advance(rank: int) -> bool:
        """Do what ``rank`` can do now; whether there was anything."""
        done, actions = spans[rank], schedule.actions[rank]
        before = len(done)
        while len(done) < len(actions):
            action = actions[len(done)]
            needs = schedule.needs(action)
            if any(needed not in ends for needed in needs):
                break
            free = done[-1].end if done else 0.0
            start = max((arrival(action, needed) for needed in needs), default=0.0)
            start = max(start, free)
            usual = durations[action.kind][action.stage]
            ends[action] = start + (usual if measured is None else measured.get(action, usual))
            done.append(Span(start, ends[action], action))
        return len(done) > before

    while sum(advance(rank) for rank in range(schedule.num_ranks)):
        pass  # any() would not give every rank its turn
    _check_finished(schedule, spans, ends)
    return Timeline(schedule, tuple(tuple(rank) for rank in spans))


def render(timeline: Timeline, width: int | None = None, *, short: bool = False) -> str:
    """Draw a timeline as text, one line per rank, time running to the right.

    Actions are labelled with kind and microbatch (and stage, when a rank holds several) and padded
    with ``-`` to their duration, idle time is dotted.

    Args:
        timeline: what to draw.
        width: columns for the time axis; if a label does not fit, all are cut to their letters. By
            default as many as it takes to show the label of the shortest action.
        short: label with kind and microbatch alone also where a rank holds several stages; letters
            are then small but for the rank's first stage.
    """
    label = _labels(timeline.schedule, short)
    spans = [span for rank in timeline.spans for span in rank if span.end > span.start]
    if not spans:
        return "\n".join(f"rank {rank}" for rank in range(len(timeline.spans)))
    if width is None:
        scale = max((len(label(s.action)) + 1) / (s.end - s.start) for s in spans)
    else:
        scale = width / timeline.step_time
    columns = round(timeline.step_time * scale)
    fit = all(len(label(s.action)) <= round(s.end * scale) - round(s.start * scale) for s in spans)
    digits = len(str(len(timeline.spans) - 1))
    lines = []
    for number, rank in enumerate(timeline.spans):
        cells = ["."] * columns
        for span in rank:
            first, last = round(span.start * scale), round(span.end * scale)
            name = label(span.action)
            text = (name if fit else name[0]).ljust(last - first - 1, "-")
            cells[first:last] = text[: last - first].ljust(last - first)
        lines.append(f"rank {number:>{digits}}  {''.join(cells)}".rstrip())
    return "\n".join(lines)


def _labels(schedule: Schedule, short: bool) -> Callable[[Action], str]:
    if schedule.stages_per_rank > 1 and not short:
        return str
    first = {min(schedule.stages_of_rank(rank), default=0) for rank in range(schedule.num_ranks)}

    def label(action: Action) -> str:
        letter = action.kind.value
        return f"{letter if action.stage in first else letter.lower()}{action.microbatch}"

    return label


def _backward_times(
    whole: float | Sequence[float] | None,
    input_half: float | Sequence[float] | None,
    weight_half: float | Sequence[float] | None,
    count: int,
) -> dict[Kind, list[float]]:
    if (input_half is None) != (weight_half is None):
        raise ValueError("backward_input and backward_weight go together")
    if input_half is None or weight_half is None:
        wholes = _per_stage("backward", 2.0 if whole is None else whole, count)
        inputs = weights = [time / 2 for time in wholes]
    else:
        inputs = _per_stage("backward_input", input_half, count)
        weights = _per_stage("backward_weight", weight_half, count)
        wholes = [a + b for a, b in zip(inputs, weights, strict=True)]
        wholes = wholes if whole is None else _per_stage("backward", whole, count)
    return {
        Kind.BACKWARD: wholes,
        Kind.BACKWARD_INPUT: inputs,
        Kind.BACKWARD_WEIGHT: weights,
    }


def _per_stage(name: str, given: float | Sequence[float], count: int) -> list[float]:
    values = list(given) if isinstance(given, Sequence) else [float(given)] * count
    if len(values) != count:
        raise ValueError(f"{name} holds {len(values)} times; the schedule needs {count}")
    return values


def _check_finished(
    schedule: Schedule, spans: Sequence[Sequence[Span]], ends: Mapping[Action, float]
) -> None:
    blocked = {
        rank: actions[len(spans[rank])]
        for rank, actions in enumerate(schedule.actions)
        if len(spans[rank]) < len(actions)
    }
    if not blocked:
        return
    everything = {action for actions in schedule.actions for action in actions}
    waits = []
    for rank, action in blocked.items():
        missing = [needed for needed in schedule.needs(action) if needed not in ends]
        reasons = " and ".join(
            f"{needed} of rank {schedule.rank_of_stage(needed.stage)}"
            + ("" if needed in everything else ", which no rank runs")
            for needed in missing
        )
        waits.append(f"rank {rank} stands at {action}, which waits for {reasons}")
    raise DeadlockError(schedule, blocked, waits)
