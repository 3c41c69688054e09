"""The part of the strategy that lets user's code see whole weights where ranks have parts."""

from contextlib import AbstractContextManager, nullcontext

from lightning_megatron.layers.weights import WeightParts
from lightning_megatron.parallel.gradients import GradientSet
from lightning_megatron.parallel.stage_numbers import StageNumbers
from lightning_megatron.parallel.weight_places import weight_places
from lightning_megatron.strategy import collectives
from lightning_megatron.strategy.observers import looks_at_weights
from lightning_megatron.strategy.run import Run


class WeightWatch:
    """Lets weights know their places, and watches what user's code does with those of a stage.

    Args:
        run: with the weights.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._parts: WeightParts | None = None
        self._numbers: StageNumbers | None = None
        self._sees_steps = False

    def begin(self) -> None:
        """Let weights know what they are from now on; collective under a pipeline."""
        run = self._run
        self._parts = WeightParts(weight_places(run.parallel.gradients))
        if run.topology.pp.size == 1 or not run.trainer.training:
            return
        decisions = looks_at_weights(run.trainer, run.module)
        # On all ranks alike.
        somewhere, in_step = (
            collectives.agree(found, run.root_device, all=False) for found in decisions
        )
        if somewhere or in_step:
            self._numbers = StageNumbers(run.parallel.gradients, run.module)
            self._sees_steps = in_step
            self._numbers.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Undo `begin`."""
        if self._parts is not None:
            self._parts.end()
            self._parts = None
        if self._numbers is not None:
            self._numbers.end()
            self._numbers = None

    def follow(self, gradients: GradientSet) -> None:
        """Let the weights of another layout know what they are."""
        if self._parts is not None:
            self._parts.end()
            self._parts = WeightParts(weight_places(gradients))
        if self._numbers is not None:
            self._numbers.follow(gradients)

    def around_step(self) -> AbstractContextManager[None]:
        """Context of a step of the user's, which is seen if steps are."""
        return nullcontext() if self._sees_steps else self.lifted()

    def lifted(self) -> AbstractContextManager[None]:
        """Context in which the network runs, which knows its weights."""
        return nullcontext() if self._numbers is None else self._numbers.lifted()
