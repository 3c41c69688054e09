"""Callback that changes the size of the global batch, and the learning rates with it.

The arithmetic is `data.reading.batch_sizes`, where schedules are explained. The strategy reads the
sizes from here, gives its training loader batches of them, and scales learning rates around
optimizer steps. What is left is to measure, where sizes follow the gradient noise scale, and to
log.

One batch of Lightning's is one optimizer step, of whatever size: ``global_step``,
``limit_train_batches``, ``val_check_interval`` and schedulers count batches as ever. How many an
epoch has is not known in advance, so that Lightning treats the loader as one without a length:
``trainer.estimated_stepping_batches`` is ``max_steps``, and fractions of an epoch are refused.
"""

from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.data.reading.batch_sizes import BatchSizes, LearningRateRule, Sizes
from lightning_megatron.monitoring.noise_scale import GradientNoiseScale
from lightning_megatron.services import services_of

_NEEDS = "it needs the loaders"


class BatchSchedule(pl.Callback):
    """Changes the size of the global batch with the number of consumed samples.

    Works under `MegatronStrategy`, with a map-style training dataset. Every size is that of an
    optimizer step over all data-parallel ranks, and the loader's own ``batch_size`` has no meaning;
    with ``microbatch_size`` larger batches take more time and not more memory. A run that is
    resumed goes on with the sizes that it would have had, under any layout.

    Logs ``data/global_batch_size`` and, where it is not 1, ``optim/lr_scale``.

    Args:
        sizes: list of ``(consumed samples, size)`` that begins with position 0, or a `Rampup`, or
            a `NoiseScale`.
        lr: multiplies learning rates by ``size / first size``, by its root, or by nothing. What the
            run's schedulers set stays as they set it: the factor holds during optimizer steps.

    Raises:
        ConfigError: the schedule is not one; when the run starts, its sizes do not fit the number
            of data-parallel ranks, or the strategy is another.

    Example:
        >>> BatchSchedule([(0, 128), (2000, 256)], lr="sqrt").batch_sizes.at(2000)
        256
    """

    def __init__(self, sizes: Sizes, lr: LearningRateRule = "none") -> None:
        self.batch_sizes = BatchSizes(sizes, lr)
        self._monitor: GradientNoiseScale | None = None
        self._owns_monitor = False
        noise = self.batch_sizes.noise
        if noise is not None:
            pairs = min(20, max(noise.every // 4, 2))  # several to a decision
            self._monitor, self._owns_monitor = GradientNoiseScale(every=pairs), True

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        services_of(trainer, self, _NEEDS)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        users = [one for one in callbacks if isinstance(one, GradientNoiseScale)]
        if self._monitor is not None and users:
            self._monitor, self._owns_monitor = users[0], False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._monitor is not None and self._owns_monitor:
            self._monitor.on_train_start(trainer, pl_module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._monitor is not None and self._owns_monitor:
            self._monitor.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._monitor is not None and self._owns_monitor:
            self._monitor.on_before_optimizer_step(trainer, pl_module, optimizer)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        services, sizes = services_of(trainer, self, _NEEDS), self.batch_sizes
        size = services.data.batch_size
        values = {"data/global_batch_size": float(size)}
        if sizes.factor(size) != 1.0:
            values["optim/lr_scale"] = sizes.factor(size)
        pl_module.log_dict(values, batch_size=1)
        noise, step = sizes.noise, trainer.global_step
        if noise is None or self._monitor is None or step == 0 or step % noise.every:
            return
        consumed = services.data.consumed_samples
        decided = sizes.decide(self._monitor.noise_scale, consumed)
        sizes.follow(services.broadcast(decided), consumed)

    @override
    def state_dict(self) -> dict[str, Any]:
        state = self.batch_sizes.state_dict()
        if self._monitor is not None and self._owns_monitor:
            state["monitor"] = self._monitor.state_dict()
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batch_sizes.load_state_dict(state_dict)
        if self._monitor is not None and self._owns_monitor and "monitor" in state_dict:
            self._monitor.load_state_dict(state_dict["monitor"])
