"""What every item of a trunk takes, from steps that ran.

A stage's forward notes when each of its items has returned, its backward when the gradient of each
item's output has arrived (a hook on that tensor), which is when the backward of the item begins:
autograd goes through the items in reverse. So the time between two notes belongs to one item. The
weight part of a split backward is shared out by parameters, as its products are in proportion to
them. What surrounds the items (code of the step before its trunk, sending, ZeRO's work on the
gradients of a stage) comes with every stage, whatever its items, and is left out, but for the loss:
it stays with the last item.

Of all microbatches and steps the median counts: a disturbed one does no harm.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

from lightning_megatron._torch import tree_flatten
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.pipeline.timing import Clock
from lightning_megatron.schedules.schedule import Kind, Schedule

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
        self.clock: Clock | None = None
        self.steps: list[float] = []
        self.schedule: Schedule | None = None
        self._final, self._watched = final, trunk.stage_items
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


def _arrived(clock: Clock, item: int, gradient: Tensor) -> None:
    clock.note(item)
