"""The protocol of whatever measures the first steps of a run and then changes how it trains."""

from typing import Protocol


class Tuner(Protocol):
    """Measures the first training batches, then changes something once.

    The strategy calls every tuner in each training batch, on all ranks, so tuners may communicate.
    They change how steps are computed, never what comes of them.
    """

    @property
    def outlives_layout(self) -> bool:
        """Whether the tuner goes on when the module moves to another layout."""
        ...

    def before_batch(self, *, accumulated: bool) -> None:
        """A training batch begins.

        Args:
            accumulated: whether gradients of earlier batches are pending.
        """

    def after_batch(self, count: int) -> None:
        """The training step has run on ``count`` microbatches; not called for skipped batches."""
