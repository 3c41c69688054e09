"""What runs the microbatches of a batch: the interface, and the case without a pipeline.

`runner.Pipeline` is the other one. Both call the user's step for every microbatch, differentiate
what `LossOf` makes of its output, and tell a `Reduction` of every forward and backward.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

from lightning_megatron.monitoring.sections import BACKWARD, FORWARD, SectionClock
from lightning_megatron.pipeline.microbatch import detach

Step = Callable[[int, bool], Any]
"""The user's step on a microbatch; the flag says whether it runs to its end."""
LossOf = Callable[[Any, int], Tensor | None]
"""Function of the step's output and the microbatch that gives the scalar to differentiate."""


class Reduction(Protocol):
    """Communication of parameters and gradients around the work on a stage."""

    def before_forward(self, stage: int) -> None:
        """This rank's ``stage``-th stage will run forward once its input has arrived."""
        ...

    def before_backward(self, stage: int, *, last: bool, split: bool) -> None:
        """A backward, or its input part (``split``), of this rank's ``stage``-th stage begins.

        ``last``: after it the stage's gradients are complete.
        """
        ...

    def after_weights(self, stage: int, *, last: bool) -> None:
        """A weight part has ended."""
        ...


class Executor(Protocol):
    """Runs the microbatches of a batch.

    Attributes:
        clock: told of every change between forward and backward.
    """

    clock: SectionClock

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        ...

    def train(self, step: Step, loss_of: LossOf, count: int, reduction: Reduction) -> list[Any]:
        """Forward and backward of every microbatch.

        Args:
            step: the user's step.
            loss_of: what to differentiate.
            count: number of microbatches; all ranks of the pipeline must agree.
            reduction: told of every backward.

        Returns:
            On the last stage the detached outputs of the step by microbatch, elsewhere nothing.
        """
        ...

    def evaluate(self, step: Step, count: int, repeated: int = 0) -> list[Any]:
        """Forward of every microbatch; outputs of the step on the last stage, elsewhere nothing.

        Args:
            step: the user's step.
            count: number of microbatches.
            repeated: how many at the end only run through the trunk, and have no output.
        """
        ...


class NoPipeline(Executor):
    """Runs microbatches one after the other in a process that holds the whole network."""

    is_last = True

    def __init__(self) -> None:
        self.clock = SectionClock()

    @override
    def train(self, step: Step, loss_of: LossOf, count: int, reduction: Reduction) -> list[Any]:
        outputs = []
        for index in range(count):
            self.clock.enter(FORWARD)
            output = step(index, True)
            loss = loss_of(output, index)
            self.clock.enter(BACKWARD)
            if loss is not None:
                reduction.before_backward(0, last=index == count - 1, split=False)
                loss.backward()  # type: ignore[no-untyped-call]
            outputs.append(detach(output))
            del output, loss
        return outputs

    @override
    def evaluate(self, step: Step, count: int, repeated: int = 0) -> list[Any]:
        return [step(index, True) for index in range(count - repeated)]
