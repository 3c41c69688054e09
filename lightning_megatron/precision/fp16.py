"""float16 training, whose small range makes a scaled loss necessary (`precision.loss_scale`)."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_megatron._torch.step_hooks import step_hooks
from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.sharded_step import steps_on_shards
from lightning_megatron.precision.loss_scale import SMALLEST, LossScale
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.zero.data_parallel import ComputeTypes
from lightning_megatron.zero.gradients import GradientSet


class Fp16Precision(ShardedPrecision, MixedPrecision):
    """Plugin of ``16-mixed``: float16 products with a loss scale on which all ranks agree.

    ``Trainer(precision="16-mixed")`` makes one with the defaults; on CPUs Lightning makes it
    ``bf16-mixed``, and only ``Trainer(plugins=Fp16Precision())`` runs float16. A step whose
    gradients overflow on any rank is skipped on all: weights, optimizer state and learning rate
    schedules that count steps stay as they are. ``optim/loss_scale`` and ``optim/skipped_steps``
    are logged, and kept in checkpoints. (Lightning's ``global_step`` counts skipped steps too.)

    Args:
        initial_scale: scale of the loss at the first step.
        growth_factor: factor of the scale after ``growth_interval`` good steps in a row.
        backoff_factor: factor of the scale after a skipped step.
        growth_interval: number of good steps in a row before the scale grows.
        min_scale: lowest scale; gradients that are not finite even there end the run with a
            FloatingPointError.

    Raises:
        ConfigError: an argument is out of range.
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
        self._scales = False
        """Whether a loss has been scaled."""
        self._finite: dict[Optimizer, bool] = {}
        """Whether all gradients were finite, for each optimizer whose gradients are unscaled."""

    @property
    @override
    def types(self) -> ComputeTypes:
        return ComputeTypes(parameters=torch.float16, reduction=torch.float32)

    @override
    def use(self, gradients: GradientSet) -> None:
        super().use(gradients)
        self.device = gradients.device.type

    @property
    @override
    def loss_factor(self) -> float:
        return self.loss_scale.value

    @override
    def scale_loss(self, loss: Tensor) -> Tensor:
        """Scale the loss, and unscaled gradients to which its backward will add."""
        for optimizer in self._finite:
            for gradient in self._gradients().local_gradients(optimizer):
                gradient.mul_(self.loss_scale.value)
        self._finite.clear()
        self._scales = True
        return loss * self.loss_factor

    def _unscale(self, optimizer: Optimizer) -> bool:
        """Unscale an optimizer's gradients; returns whether they are finite on all ranks."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if optimizer not in self._finite:
            gradients = self._gradients()
            local = gradients.local_gradients(optimizer)
            self._finite[optimizer] = self.loss_scale.unscale(local, gradients.device)
        return self._finite[optimizer]

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, unscale gradients, and step unless a gradient overflowed on any rank."""
        if step_hooks(optimizer) is not None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        self.skipped = False
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "precision='16-mixed', optimizer=LBFGS: it runs the closure several times a step, "
                "and the loss scale cannot change in between; nearest valid: precision='bf16-mixed'"
            )
        result = closure()
        if result is None and model.automatic_optimization:
            self.finish_closure(model, optimizer)
            return result  # training_step gave no loss, so there was no backward
        if not (self._scales or model.automatic_optimization):
            raise ConfigError(
                "precision='16-mixed', automatic_optimization=False: the gradients of this step "
                "come from no self.manual_backward, so they are not scaled, and the step would "
                "divide them by the scale; nearest valid: self.manual_backward(loss), or "
                "precision='bf16-mixed'"
            )
        finite = self._unscale(optimizer)
        self.overflowed = not finite
        try:
            self.finish_closure(model, optimizer)
        finally:
            self.overflowed = False
            self._finite.pop(optimizer, None)
        self.skipped = not finite
        asked = self._skip
        if asked or finite:
            if not steps_on_shards(optimizer):
                kwargs["closure"] = self._evaluated_once(optimizer, result)
            returned = self.step(optimizer, **kwargs)
            result = result if returned is None else returned
        if not asked:  # for a reason that says nothing about the scale
            self.loss_scale.update(finite=finite)
        values = {
            "optim/loss_scale": self.loss_scale.value,
            "optim/skipped_steps": float(self.skipped_steps),
        }
        model.log_dict(values, on_step=True, on_epoch=False)
        return result

    def _evaluated_once(self, optimizer: Optimizer, result: Any) -> Callable[[], Any]:
        """Closure that has run already, for an optimizer that runs it once, before all else."""
        calls = 0

        def closure() -> Any:
            nonlocal calls
            calls += 1
            gathered = self._gathered_step(optimizer)
            if calls > 1 or (gathered is not None and gathered.is_looked_at):
                raise ConfigError(
                    f"precision='16-mixed', optimizer={type(optimizer).__name__}: it runs the "
                    "closure within a step, and the loss scale cannot change in between; nearest "
                    "valid: precision='bf16-mixed'"
                )
            return result

        return closure

    @property
    @override
    def skipped_steps(self) -> int:
        return self.left_out + self.loss_scale.skipped

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip unscaled gradients: under manual optimization they are still scaled.

        (Lightning's own plugin clips the scaled ones.)
        """
        if clip_val > 0:
            self._unscale(optimizer)
        super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Scale and counts of steps."""
        return {**super().state_dict(), **self.loss_scale.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        super().load_state_dict(state_dict)
        self.loss_scale.load_state_dict(state_dict)
