"""Precision plugins for sharded parameters.

``Trainer(precision=...)`` makes one of Lightning's plugins, which know one device: their clipping
takes the norm of the local shards. `sharded_precision` exchanges it for the plugin of the same
name here, which keeps Lightning's contexts and conversions and clips by the true global norm.

==============  ==========  ==========  ============
precision       at rest     compute     reduction
==============  ==========  ==========  ============
``32-true``     float32     float32     float32
``64-true``     float64     float64     float64
``bf16-mixed``  float32     bfloat16    float32
``bf16-true``   bfloat16    bfloat16    float32
==============  ==========  ==========  ============

Under ``bf16-mixed`` parameters are gathered in bfloat16 and the step runs under autocast, so that
softmax, losses and norms stay in float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.optim.local_step import LocalStep, steps_on_shards
from lightning_megatron.parallel.data import ComputeTypes
from lightning_megatron.parallel.gradients import GradientSet

SUPPORTED = ("32-true", "64-true", "bf16-mixed", "bf16-true")


class ShardedPrecision(Precision):
    """Clips the gradients of a whole layout; mixed into each plugin below.

    Attributes:
        gradients: set by the strategy once the module is on its layout.
    """

    gradients: GradientSet | None = None
    _local_steps: dict[Optimizer, LocalStep] | None = None

    @property
    def types(self) -> ComputeTypes:
        """Number formats for ZeRO."""
        return ComputeTypes()

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Run the closure, then step on local shards where the optimizer allows it."""
        if not steps_on_shards(optimizer):
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        self._after_closure(model, optimizer)
        self.step(optimizer, **kwargs)
        return result

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step on this rank's part of the parameters, with the gradients that are there."""
        if self._local_steps is None:
            self._local_steps = {}
        if optimizer not in self._local_steps:
            self._local_steps[optimizer] = LocalStep(optimizer, self._gradients().pieces)
        with self._local_steps[optimizer].lent():
            optimizer.step(**kwargs)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the global norm over all shards, each parameter counted once."""
        self._gradients().clip_norm(float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp the elements of the local shards."""
        self._gradients().clip_value(float(clip_val))

    def use(self, gradients: GradientSet) -> None:
        """Clip these gradients from now on; what was prepared for earlier ones is forgotten."""
        self.gradients, self._local_steps = gradients, None

    def _gradients(self) -> GradientSet:
        if self.gradients is None:
            raise RuntimeError("gradients can be clipped once the strategy has set up the module")
        return self.gradients


class FullShardedPrecision(ShardedPrecision):
    """``32-true``."""


class DoubleShardedPrecision(ShardedPrecision, DoublePrecision):
    """``64-true``."""


class HalfShardedPrecision(ShardedPrecision, HalfPrecision):
    """``bf16-true``."""

    @property
    @override
    def types(self) -> ComputeTypes:
        return ComputeTypes(reduction=torch.float32)


class MixedShardedPrecision(ShardedPrecision, MixedPrecision):  # type: ignore[misc]
    """``bf16-mixed``."""

    @property
    @override
    def types(self) -> ComputeTypes:
        return ComputeTypes(parameters=torch.bfloat16, reduction=torch.float32)


def sharded_precision(plugin: Precision) -> ShardedPrecision:
    """The plugin of this package that stands for one of Lightning's.

    Raises:
        ConfigError: the precision is not supported.
    """
    if isinstance(plugin, ShardedPrecision):
        return plugin
    if type(plugin) is Precision:
        return FullShardedPrecision()
    if type(plugin) is DoublePrecision:
        return DoubleShardedPrecision()
    if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        return HalfShardedPrecision("bf16-true")
    if type(plugin) is MixedPrecision and plugin.precision == "bf16-mixed":
        return MixedShardedPrecision("bf16-mixed", plugin.device)
    nearest = "bf16-true" if str(plugin.precision) == "16-true" else "bf16-mixed"
    raise ConfigError(
        f"precision={plugin.precision!r} ({type(plugin).__name__}): MegatronStrategy runs "
        f"{', '.join(SUPPORTED)}; nearest valid: precision={nearest!r}"
    )
