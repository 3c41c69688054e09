"""The Euclidean norm of all parameters, which tells weight decay that is too weak or too strong."""

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.services import services_of

_NEEDS = "it needs to know the shards"


class ParameterNorm(pl.Callback):
    """Logs ``optim/param_norm``, of the trained parameters of the whole model.

    Works under `MegatronStrategy`; costs one small collective when it is logged.

    Args:
        every: batches between two values.

    Raises:
        ConfigError: ``every`` is smaller than one batch, or the strategy is another.
    """

    def __init__(self, every: int = 50) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: must be at least 1; nearest valid: every=1")
        self._every = every
        self._batches = 0

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        services_of(trainer, self, _NEEDS)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._batches += 1
        if self._batches == 1 or self._batches % self._every == 0:
            norm = services_of(trainer, self, _NEEDS).gradients.parameter_norm()
            pl_module.log("optim/param_norm", norm, batch_size=1)
