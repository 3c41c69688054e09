"""float16, whose range is so small that gradients need a scale (`precision.loss_scale`)."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.parallel.data import ComputeTypes
from lightning_megatron.parallel.gradients import GradientSet
from lightning_megatron.precision.loss_scale import SMALLEST, LossScale
from lightning_megatron.precision.sharded import ShardedPrecision


class Fp16Precision(ShardedPrecision, MixedPrecision):
    """``16-mixed``: float16 products with a loss scale on which all ranks agree.

    ``Trainer(precision="16-mixed")`` makes one with the defaults; on CPUs Lightning turns that into
    ``bf16-mixed``, and only ``Trainer(plugins=Fp16Precision())`` runs float16. A step whose
    gradients overflow on any rank is skipped on all: weights, optimizer state and learning rate
    schedules that count steps stay as they are. ``optim/loss_scale`` and ``optim/skipped_steps``
    are logged, and kept in checkpoints. (Lightning's ``global_step`` counts skipped steps too.)

    Args:
        initial_scale: of the loss at the first step.
        growth_factor: of the scale after ``growth_interval`` good steps in a row.
        backoff_factor: of the scale after a skipped step.
        growth_interval: good steps in a row before the scale grows.
        min_scale: the scale does not fall below it; gradients that are not finite even there end
            the run with a FloatingPointError.

    Raises:
        ConfigError: an argument makes no sense.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = SMALLEST,
    ) -> None:
        # Built as bf16-mixed: for 16-mixed Lightning would make and use a scaler of its own.
        super().__init__("bf16-mixed", "cpu")
        self.precision = "16-mixed"
        self.loss_scale = LossScale(
            initial_scale, growth_factor, backoff_factor, growth_interval, min_scale
        )

    @property
    @override
    def types(self) -> ComputeTypes:
        return ComputeTypes(parameters=torch.float16, reduction=torch.float32)

    @override
    def use(self, gradients: GradientSet) -> None:
        super().use(gradients)
        self.device = gradients.device.type

    @override
    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.loss_scale.value

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, take out the scale, and step unless a gradient overflowed anywhere."""
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "precision='16-mixed', optimizer=LBFGS: it runs the closure several times a step, "
                "between which the loss scale cannot follow; nearest valid: precision='bf16-mixed'"
            )
        result = closure()
        if result is None and model.automatic_optimization:
            self._after_closure(model, optimizer)
            return result  # training_step gave no loss, so there was no backward
        device = self._gradients().device
        finite = self.loss_scale.unscale(self._to_unscale(optimizer, model), device)
        self.overflowed = not finite
        try:
            self._after_closure(model, optimizer)
        finally:
            self.overflowed = False
        self.skipped = not finite
        asked = self._skip
        if asked or finite:
            self.step(optimizer, **kwargs)
        if not asked:  # for a reason that says nothing about the scale
            self.loss_scale.update(finite=finite)
        values = {
            "optim/loss_scale": self.loss_scale.value,
            "optim/skipped_steps": float(self.skipped_steps),
        }
        model.log_dict(values, on_step=True, on_epoch=False)
        return result

    @property
    @override
    def skipped_steps(self) -> int:
        return self.left_out + self.loss_scale.skipped

    def _to_unscale(self, optimizer: Optimizer, model: LightningModule) -> list[Tensor]:
        """Gradients of the latest backward: under manual optimization those of the optimizer."""
        if model.automatic_optimization:
            return self._gradients().local_gradients()
        members = {p: None for group in optimizer.param_groups for p in group["params"]}
        return self._gradients().of(members)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The scale and the counts."""
        return {**super().state_dict(), **self.loss_scale.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        super().load_state_dict(state_dict)
        self.loss_scale.load_state_dict(state_dict)
