"""Callbacks that look at all metrics once a window of steps.

Lightning keeps what was logged last under `trainer.callback_metrics`. To read it costs a walk over
everything that is logged, and, on a device, a wait until the numbers are there; so it is read only
in the steps in which Lightning itself logs. That happens when the next batch starts: by then all
callbacks have logged, whatever their order.
"""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.devices import on_host
from lightning_megatron.errors import ConfigError


class WindowCallback(pl.Callback):
    """Calls `on_window` with the newest metrics, every ``every_n_steps`` optimizer steps.

    Args:
        every_n_steps: length of a window; by default the Trainer's ``log_every_n_steps``.

    Raises:
        ConfigError: ``every_n_steps`` is smaller than one.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(
                f"every_n_steps={every_n_steps}: must be at least 1; nearest valid: 1"
            )
        self._every_n_steps = every_n_steps
        self._looked_at = 0

    def on_window(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: dict[str, float]
    ) -> None:
        """Look at the metrics after a window."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._looked_at = trainer.global_step

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        every = self._every_n_steps or logging_interval(trainer)
        if trainer.global_step // every > self._looked_at // every:
            self._look(trainer, pl_module)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step > self._looked_at:
            self._look(trainer, pl_module)

    def _look(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._looked_at = trainer.global_step
        self.on_window(trainer, pl_module, metrics_of(trainer))


class LoggingSteps:
    """Tells after which batches Lightning hands to its loggers what was logged last.

    ``log`` costs about as much as everything else that a callback does in a batch, and what it is
    given in other steps nobody reads. So callbacks log in these.
    """

    def __init__(self) -> None:
        self._before = -1

    def now(self, trainer: pl.Trainer, under_way: int = 0) -> bool:
        """Whether this is one of them; true once a step, however many batches it has.

        Args:
            trainer: who counts.
            under_way: 1 before the optimizer's step, 0 after it.
        """
        step = trainer.global_step + under_way
        due = step != self._before and step > 0 and step % logging_interval(trainer) == 0
        if due:
            self._before = step
        return due


def logging_interval(trainer: pl.Trainer) -> int:
    """Return how many optimizer steps there are between those in which Lightning logs."""
    every: int = getattr(trainer, "log_every_n_steps", 50)  # 0 where nothing is logged
    return every or 50


def metrics_of(trainer: pl.Trainer) -> dict[str, float]:
    """Return what was logged last, as numbers; what is no single number is left out."""
    found = {}
    for name, value in trainer.callback_metrics.items():
        if not isinstance(value, Tensor) or value.numel() == 1:
            found[name] = float(value)
    return found


def loss_of(outputs: Any, wait: bool) -> float | None:
    """Return the loss of a batch; None where there is none.

    Args:
        outputs: of ``training_step``, as hooks get them.
        wait: also if that means to wait for a device.
    """
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if isinstance(loss, Tensor) and loss.numel() == 1 and (wait or on_host(loss.device)):
        return float(loss)
    return None


def learning_rates(trainer: pl.Trainer) -> dict[str, float]:
    """Return the learning rate of the first group of each optimizer."""
    rates = [float(o.param_groups[0]["lr"]) for o in trainer.optimizers if o.param_groups]
    return {f"optim/lr_{i}" if i else "optim/lr": rate for i, rate in enumerate(rates)}
