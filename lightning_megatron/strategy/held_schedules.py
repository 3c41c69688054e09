"""Learning rate schedules that stay where they are when an optimizer step was skipped.

Lightning advances the schedules after every batch that was to end in an optimizer step, and does
not ask whether there was one. Warmup and decay would then run ahead of the training by as many
steps as the loss scale takes to settle, a dozen at the start of every float16 run.
"""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig


class HeldSchedules:
    """Makes the next ``step`` of schedulers do nothing."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def hold(self, configs: Sequence[LRSchedulerConfig], trainer: Trainer) -> None:
        """Hold what Lightning is about to advance: schedules by step that are due now.

        Those that follow a metric are no count of steps, and go on.
        """
        if not trainer.lightning_module.automatic_optimization:
            return  # the user steps the schedulers
        batches = trainer.fit_loop.epoch_loop.batch_idx + 1
        for config in configs:
            if counts_steps(config) and batches % config.frequency == 0:
                self._hold(config.scheduler)

    def release(self) -> None:
        """Let go of what has not been advanced (a module may override ``lr_scheduler_step``)."""
        for scheduler in self._held:
            scheduler.__dict__.pop("step", None)
        self._held.clear()

    def _hold(self, scheduler: Any) -> None:
        # On the instance, for this one call: before the next checkpoint it is as it was.
        def step(*args: Any, **kwargs: Any) -> None:
            del scheduler.__dict__["step"]

        scheduler.__dict__["step"] = step
        self._held.append(scheduler)


def counts_steps(config: LRSchedulerConfig) -> bool:
    """Whether a schedule follows the number of optimizer steps."""
    return config.interval == "step" and not config.reduce_on_plateau
