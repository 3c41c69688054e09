"""Pipeline bubble: the share of a step in which ranks are idle.

Logs, every `every` batches, what the pipeline of the strategy measured in that batch:

* ``pp/bubble_fraction``: share of the ranks' time between the beginning and the end of forwards and
  backwards in which they did not compute;
* ``pp/bubble_fraction_ideal``: the same on paper, for the schedule and the time that each forward
  and backward really took, with transfers that take no time; never above the measured one. A large
  ideal asks for another schedule, more microbatches or another partition; a large difference
  between the two for faster transfers. Waiting for tp ranks within a forward or backward counts as
  computing in both;
* ``pp/imbalance``: forward and backward time of the slowest pipeline rank over the mean of all,
  1 at best. What is above 1 another partition may win.

Measuring costs one small collective over the pipeline in the batches that are measured.
"""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.pipeline.runner import Pipeline
from lightning_megatron.pipeline.timing import Bubble
from lightning_megatron.services import services_if_any


class PipelineMonitor(pl.Callback):
    """Logs ``pp/bubble_fraction``, its ideal and ``pp/imbalance``; nothing without a pipeline.

    Args:
        every: batches between two measurements.

    Attributes:
        latest: what was measured last; None until then.

    Raises:
        ConfigError: ``every`` is smaller than one batch.
    """

    def __init__(self, every: int = 50) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: must be at least 1; nearest valid: every=1")
        self._every = every
        self._batches = 0
        self.latest: Bubble | None = None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        pipeline = _pipeline_of(trainer)
        if pipeline is not None:
            # Not the first batch, which pays for everything that happens once.
            self._batches += 1
            pipeline.measure(self._batches % self._every == 0 and trainer.global_step > 0)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        pipeline = _pipeline_of(trainer)
        found = None if pipeline is None else pipeline.bubble()
        if found is None:
            return
        self.latest = found
        values = {
            "pp/bubble_fraction": found.fraction,
            "pp/bubble_fraction_ideal": found.ideal,
            "pp/imbalance": found.imbalance,
        }
        pl_module.log_dict(values, batch_size=1)


def _pipeline_of(trainer: pl.Trainer) -> Pipeline | None:
    services = services_if_any(trainer)
    return None if services is None else services.pipeline
