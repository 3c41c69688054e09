"""Times of a pipeline step as it really ran.

`ActionClock` notes when every action began to compute and when it ended; waiting for messages is
not counted. From the notes of all ranks `bubble` computes the share of the step in which the ranks
stood idle, and the share on paper, with the times that the actions took. The difference is lost by
the runner and its transfers.

With the mean times of each stage the paper may be worse than the step: ranks that share cores or
power compute faster while others wait in the bubble. Ranks have no common clock, so the time of the
step is that of the rank that took longest, from its own beginning. Where the last action ran on a
rank that began late this is too short, and the time on paper counts.

`ItemTimes` measures every item of the trunk. A note is taken when an item's forward returns, and
when the gradient of its output arrives in the backward (a hook on that tensor). Autograd goes
through the items in reverse, so the time between two notes belongs to one item. The weight part of
a split backward is divided by numbers of parameters, to which its products are proportional. Work
around the items (code of the step before its trunk, sending, ZeRO's work on the gradients of a
stage) does not depend on the partition and is left out, except the loss, which counts for the last
item. The median over microbatches and steps is taken, so a disturbed one does no harm.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatron._torch.devices import device_module, on_host
from lightning_megatron._torch.graphs import tree_flatten
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.schedules.schedule import Action, Kind, Schedule
from lightning_megatron.schedules.simulate import simulate


class ActionClock:
    """Notes when actions run, without waiting for the device.

    Args:
        device: of the stages.
    """

    def __init__(self, device: torch.device) -> None:
        self._now: Callable[[], Any] = time.perf_counter
        self._between: Callable[[Any, Any], float] = lambda start, end: end - start
        if not on_host(device):
            module = device_module(device)

            def event() -> Any:
                made = module.Event(enable_timing=True)
                made.record()
                return made

            def between(start: Any, end: Any) -> float:
                end.synchronize()
                return float(start.elapsed_time(end)) / 1e3

            self._now = event
            self._between = between
        self._marks: list[Any] = []
        self._notes: list[tuple[int, int, Any]] = []
        self._begin: Any = None
        self._end: Any = None

    def begin(self) -> None:
        """A step begins."""
        self._marks = []
        self._notes = []
        self._begin = self._now()

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


_BEGIN = -1
"""Note of a forward that reaches its first item, and of a backward that is through with it."""


class ItemTimes:
    """Watches the items of one rank, from now on until `close`.

    Args:
        trunk: reduced to this rank's stages.
        mine: number of each of these stages.
        final: number of the network's last stage.

    Attributes:
        clock: of the training step that runs; None outside.
        steps: seconds of every step on this rank, waiting included.
        schedule: of the latest step.
    """

    def __init__(self, trunk: PipelineSequential, mine: Sequence[int], final: int) -> None:
        self.clock: ActionClock | None = None
        self.steps: list[float] = []
        self.schedule: Schedule | None = None
        self._final = final
        self._watched = trunk.stage_items
        self._items = dict(zip(mine, trunk.held, strict=True))
        self._sizes = {
            index: sum(p.numel() for p in item.parameters())
            for part, stage in zip(trunk.held, self._watched, strict=True)
            for index, item in zip(part, stage.items, strict=True)
        }
        self._seconds: dict[int, dict[Kind, list[float]]] = {item: {} for item in self._sizes}
        for part, stage in zip(trunk.held, self._watched, strict=True):
            stage.observer = partial(self._passed, part.start)

    def close(self) -> None:
        """Watch no longer."""
        self.clock = None
        for stage in self._watched:
            stage.observer = None

    def _passed(self, first: int, position: int, output: Any) -> None:
        clock = self.clock
        if clock is None:  # an evaluation
            return
        item = first + position if position >= 0 else _BEGIN
        leaves = [output] if isinstance(output, Tensor) else tree_flatten(output)[0]
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(_arrived, clock, item))  # type: ignore[no-untyped-call]
        clock.note(item)

    def add(self, schedule: Schedule, rank: int) -> None:
        """A step has ended; waits for the device.

        Args:
            schedule: what ran.
            rank: this one's place in the pipeline.
        """
        clock, self.clock = self.clock, None
        assert clock is not None
        self.schedule = schedule
        self.steps.append(clock.read().step)
        for action, spans in zip(schedule.row(rank), clock.spans(), strict=True):
            items = self._items[action.stage]
            found = dict.fromkeys(items, 0.0)
            if action.kind is Kind.BACKWARD_WEIGHT:
                whole = sum(self._sizes[item] for item in items)
                total = sum(span.seconds for span in spans)
                for item in items:
                    found[item] = total * (self._sizes[item] / whole if whole else 1 / len(items))
            else:
                for span in spans:
                    forward = action.kind is Kind.FORWARD
                    owner = span.after if forward else span.before
                    if owner is None and action.stage == self._final:
                        owner = items[-1]  # the loss
                    if owner is not None and owner in found:
                        found[owner] += span.seconds
            for item, seconds in found.items():
                self._seconds[item].setdefault(action.kind, []).append(seconds)

    def by_item(self) -> "dict[int, ItemSeconds]":
        """Times of a microbatch in each item of this rank."""
        return {item: _seconds(kinds) for item, kinds in self._seconds.items()}


class ItemSeconds(NamedTuple):
    """Times of a microbatch in one item."""

    forward: float
    backward: float
    """Both parts."""
    weight: float
    """Seconds of the backward's delayed half; 0 where no backward was split."""


def _seconds(kinds: Mapping[Kind, list[float]]) -> ItemSeconds:
    medians = {kind: median(times) for kind, times in kinds.items()}
    weight = medians.get(Kind.BACKWARD_WEIGHT, 0.0)
    backward = medians.get(Kind.BACKWARD_INPUT, 0.0) + weight
    whole = medians.get(Kind.BACKWARD)
    if whole is not None:
        # A schedule may split some backwards only: then the two ways count by how often.
        often, split = len(kinds[Kind.BACKWARD]), len(kinds.get(Kind.BACKWARD_WEIGHT, ()))
        backward = (whole * often + backward * split) / (often + split)
    return ItemSeconds(medians[Kind.FORWARD], backward, weight)


def _arrived(clock: ActionClock, item: int, gradient: Tensor) -> None:
    clock.note(item)
