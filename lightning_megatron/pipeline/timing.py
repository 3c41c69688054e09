"""Times of a pipeline step as it really ran.

A `Clock` notes for every action when it began to compute and when it ended; waiting for messages is
outside. From the notes of all ranks, `bubble` tells how large a share of the step the ranks stood
idle, and how large it would be on paper with the very times that the actions took: what lies
between the two is lost by the runner and its transfers.

With the mean times of each stage the paper may be worse than the step: ranks that share cores or
power compute faster while others stand in the bubble, which is where the step gets longer. The step
is that of the rank that took longest, from its own beginning, as ranks have no common clock; where
the last action ran on a rank that began late, that is too short, and the time on paper counts.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron.schedules.schedule import Action, Kind, Schedule
from lightning_megatron.schedules.simulate import simulate


class Clock:
    """Notes when actions run, without waiting for the device.

    Args:
        device: of the stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._now: Callable[[], Any] = time.perf_counter
        self._between: Callable[[Any, Any], float] = lambda start, end: end - start
        if device.type != "cpu":
            module = torch.get_device_module(device)

            def event() -> Any:
                made = module.Event(enable_timing=True)
                made.record()
                return made

            def between(start: Any, end: Any) -> float:
                end.synchronize()
                return float(start.elapsed_time(end)) / 1e3

            self._now, self._between = event, between
        self._marks: list[Any] = []
        self._notes: list[tuple[int, int, Any]] = []
        self._begin: Any = None
        self._end: Any = None

    def begin(self) -> None:
        """A step begins."""
        self._marks, self._notes, self._begin = [], [], self._now()

    def start(self) -> None:
        """Note that the inputs of an action have arrived."""
        self._marks.append(self._now())

    def note(self, what: int) -> None:
        """Within an action: something has been reached."""
        self._notes.append((len(self._marks) // 2, what, self._now()))

    def stop(self) -> None:
        """The action has computed."""
        self._marks.append(self._now())

    def end(self) -> None:
        """The step has ended."""
        self._end = self._now()

    def read(self) -> "StepTimes":
        """Seconds of the latest step; waits for the device."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        busy = tuple(self._between(start, stop) for start, stop in pairs)
        return StepTimes(busy, self._between(self._begin, self._end))

    def spans(self) -> "list[list[Span]]":
        """Times between the notes of every action of the latest step; waits for the device."""
        spans = []
        for number, (start, stop) in enumerate(
            zip(self._marks[::2], self._marks[1::2], strict=True)
        ):
            reached: list[tuple[int | None, Any]] = [(None, start)]
            reached += [(what, mark) for action, what, mark in self._notes if action == number]
            reached.append((None, stop))
            spans.append(
                [
                    Span(before, after, self._between(first, second))
                    for (before, first), (after, second) in pairwise(reached)
                ]
            )
        return spans


@contextmanager
def saved_bytes() -> Iterator[list[int]]:
    """Within the block, count what autograd keeps: a list of one number, bytes."""
    seen: set[int] = set()
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if not weight and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


class Span(NamedTuple):
    """Time between two notes within an action."""

    before: int | None
    """Note before the span; None for the beginning of the action."""
    after: int | None
    """Note after the span; None for the end of the action."""
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """One rank's step, in seconds."""

    busy: tuple[float, ...]
    """Busy seconds of every action of the rank's row, in order."""
    step: float
    """The whole step."""


@dataclass(frozen=True)
class Bubble:
    """Idle time of a pipeline."""

    fraction: float
    """Share of all ranks' time in which they did not compute."""
    ideal: float
    """Share on paper, for the time that each action took, with transfers that take no time; at
    most ``fraction``."""
    forward: tuple[float, ...]
    """Mean seconds of a microbatch's forward on every stage."""
    backward: tuple[float, ...]
    """Mean seconds of its backward, both parts together, on every stage."""
    backward_input: tuple[float, ...]
    """Mean seconds of the input part; half of the backward where none was split."""
    backward_weight: tuple[float, ...]
    """Mean seconds of the weight part; the other half."""
    imbalance: float
    """Compute time of the busiest rank over the mean of all ranks."""


def bubble(schedule: Schedule, ranks: Sequence[StepTimes]) -> Bubble:
    """Compare a measured step with its simulation.

    Args:
        schedule: what ran.
        ranks: the times of every pipeline rank.
    """
    spent: dict[tuple[Kind, int], list[float]] = {}
    measured: dict[Action, float] = {}
    for row, times in zip(schedule.actions, ranks, strict=True):
        for action, seconds in zip(row, times.busy, strict=True):
            spent.setdefault((action.kind, action.stage), []).append(seconds)
            measured[action] = seconds

    def mean(kind: Kind, stage: int) -> float | None:
        found = spent.get((kind, stage))
        return sum(found) / len(found) if found else None

    stages = range(schedule.num_stages)
    forward = [mean(Kind.FORWARD, s) or 0.0 for s in stages]
    whole = [mean(Kind.BACKWARD, s) for s in stages]
    halves = [
        [mean(kind, s) for s in stages] for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    ]
    # A stage whose backward is always split, or never, has no time of the other way.
    inputs = [i if i is not None else (b or 0.0) / 2 for i, b in zip(halves[0], whole, strict=True)]
    weights = [
        w if w is not None else (b or 0.0) / 2 for w, b in zip(halves[1], whole, strict=True)
    ]
    together = [
        b if b is not None else i + w for b, i, w in zip(whole, inputs, weights, strict=True)
    ]
    ideal = simulate(schedule, measured=measured)
    longest = max(ideal.step_time, *(times.step for times in ranks))
    busy = [sum(times.busy) for times in ranks]
    mean_busy = sum(busy) / len(busy)
    return Bubble(
        fraction=1.0 - mean_busy / longest if longest else 0.0,
        ideal=ideal.bubble_fraction,
        forward=tuple(forward),
        backward=tuple(together),
        backward_input=tuple(inputs),
        backward_weight=tuple(weights),
        imbalance=max(busy) / mean_busy if mean_busy else 1.0,
    )
