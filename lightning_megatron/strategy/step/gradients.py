"""Gradients of a batch between the step that makes them and the ``backward`` that shows them.

Lightning's closure calls ``training_step``, then ``zero_grad``, then ``backward``. A batch on
microbatches has run its backwards by the end of ``training_step``. What they made must survive
``zero_grad``, and until ``backward`` hooks must find the gradients of earlier batches of the same
accumulation, as they do in one process::

    call               .grad holds afterwards            held aside
    begin              nothing, or gradients that are    those of earlier batches, unless
                       reduced with the batch's          they stay in place
    (backwards)        those of the batch as well        the same
    keep               those of earlier batches          those of the batch
    show               all of them                       nothing
"""

from lightning_megatron.whole.memory import memory_of_parts
from lightning_megatron.zero.gradients import GradientSet, HeldGradient


@memory_of_parts
class BatchGradients:
    """Owner of the gradients of one batch until they are shown.

    Args:
        gradients: those of all parameters of this rank.
    """

    def __init__(self, gradients: GradientSet) -> None:
        self._all = gradients
        self._earlier: list[HeldGradient] = []
        self._own: list[HeldGradient] = []
        self._are_complete = False

    def begin(self, *, cleared: bool, deferred: bool) -> None:
        """Make room for the gradients of the batch.

        Args:
            cleared: whether gradients that are there belong to the update before, and
                ``zero_grad``, which comes later, is to clear them.
            deferred: whether those of earlier batches stay in place, as they are to be reduced
                with those of this one.
        """
        self._are_complete = self._all.complete
        if cleared:
            self._all.drop()
        elif not deferred:
            self._earlier = self._all.take_out()
        self._all.begin()

    def keep(self) -> None:
        """Hold the gradients of the batch aside, behind its last backward."""
        self._own = self._all.take_out()
        self._all.add(self._earlier)
        self._earlier = []

    def discard(self) -> None:
        """Drop what the backwards have made so far."""
        self._all.drop()

    def show(self) -> None:
        """Add the gradients of the batch to those that are there."""
        self._all.complete = self._are_complete
        self._all.set_aside()
        self._all.add(self._own)
        self._own = []
