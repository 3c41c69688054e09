"""The training loss over all ranks, and the learning rate.

==================  ================================================================================
``loss/avg``        mean of the ranks' losses in this batch
``loss/max``        the highest of them; far above the mean, it points to the data of one rank
``loss/max_rank``   the first rank that has it
``optim/lr``        learning rate of the first group of the first optimizer; then ``optim/lr_1``
==================  ================================================================================

in the steps in which the Trainer logs, for one small collective. Ranks that work on the same batch
(tp, pp) have the same loss.
"""

import math
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_megatron.monitoring.rank_stats import gather_stats, number_device, rank_metrics_of
from lightning_megatron.monitoring.window import LoggingSteps, learning_rates, loss_of


class LossMonitor(pl.Callback):
    """Logs ``loss/avg``, ``loss/max`` and ``optim/lr``; under any strategy."""

    def __init__(self) -> None:
        self._logging = LoggingSteps()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if not self._logging.now(trainer):
            return
        values = learning_rates(trainer)
        loss = loss_of(outputs, wait=True)
        mine = {"loss": math.nan if loss is None else loss}
        found = gather_stats(mine, number_device(trainer))["loss"]
        if loss is not None:
            rank_metrics_of(trainer).put("loss/of", found.values)
            values |= {
                "loss/avg": found.mean,
                "loss/max": found.highest,
                "loss/max_rank": float(found.highest_rank),
            }
        pl_module.log_dict(values, batch_size=1)
