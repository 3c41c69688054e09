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
``16-mixed``    float32     float16     float32
==============  ==========  ==========  ============

Under ``bf16-mixed`` and ``16-mixed`` parameters are gathered in the narrow format and the step runs
under autocast, so that softmax, losses and norms stay in float32. Gradients are added up over
microbatches in the format of the reduction, and are in that of the parameters when the optimizer
sees them. float16 needs a loss scale, which is that of `precision.loss_scale`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_megatron._torch import gather_through, gathers_through, shard_of
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.deferral import PRODUCTS, multiply_with
from lightning_megatron.optim.local_step import LocalStep, steps_on_shards
from lightning_megatron.optim.pieces import KnowsPieces
from lightning_megatron.optim.whole_step import WholeStep, steps_on_whole
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.data import ComputeTypes
from lightning_megatron.parallel.gradients import GradientSet, local
from lightning_megatron.precision.loss_scale import LossScale
from lightning_megatron.precision.stochastic import widened
from lightning_megatron.topology.rng import derive_seed

SUPPORTED = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed")


class _LeftOut(Exception):
    """Leaves the step of an optimizer that runs the closure itself."""


class ShardedPrecision(Precision):
    """Clips the gradients of a whole layout; mixed into each plugin below.

    Attributes:
        gradients: set by the strategy once the module is on its layout.
        skipped: whether the latest optimizer step was left out.
        overflowed: whether the gradients of the step about to be taken are not finite because of
            the loss scale; such a step is left out in any case, and no fault.
        left_out: steps so far that a callback asked to leave out.
    """

    skipped = False
    overflowed = False
    left_out = 0
    _skip = False
    gradients: GradientSet | None = None
    _local_steps: dict[Optimizer, LocalStep | WholeStep] | None = None

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
        pieces = self._gradients().pieces
        self.skipped = False
        if not steps_on_shards(optimizer) and not steps_on_whole(optimizer, pieces):
            # All is here; this one may call the closure as often as it wants.
            try:
                return super().optimizer_step(optimizer, model, closure, **kwargs)
            except _LeftOut:
                return None
        result = closure()
        self._after_closure(model, optimizer)
        self.step(optimizer, **kwargs)
        return result

    @override
    def _wrap_closure(
        self, model: LightningModule, optimizer: Any, closure: Callable[[], Any]
    ) -> Any:
        result = super()._wrap_closure(model, optimizer, closure)
        if self._leave_out():  # before the optimizer has changed anything
            raise _LeftOut
        return result

    def skip_step(self) -> None:
        """Leave the step out that is about to be taken; on all ranks or on none."""
        self._skip = True

    @property
    def will_skip(self) -> bool:
        """Whether the step that is about to be taken will be left out."""
        return self._skip or self.overflowed

    @property
    def skipped_steps(self) -> int:
        """Steps left out so far, for whatever reason."""
        return self.left_out

    def forget_batch(self) -> None:
        """Undo what the forward and backward since the last step left behind in the plugin."""

    def _leave_out(self) -> bool:
        """Whether `skip_step` was called for this step; the next one is another matter."""
        asked, self._skip = self._skip, False
        if asked:
            self.skipped = True
            self.left_out += 1
        return asked

    @override
    def state_dict(self) -> dict[str, Any]:
        """The count of steps left out."""
        return {"left_out": self.left_out} if self.left_out else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.left_out = int(state_dict.get("left_out", 0))

    def prepare(self, parallel: ParallelModule) -> None:
        """Fit the layers of a module that was put on its layout; called before it runs."""
        for layer in parallel.module.modules():
            if getattr(layer, PRODUCTS, None) is not None:  # of an earlier Trainer's plugin
                multiply_with(layer, None)
        for parameter in parallel.module.parameters():
            if gathers_through(parameter):
                gather_through(parallel.data.units, cast(DTensor, parameter), None)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step on this rank's part of the parameters, with the gradients that are there."""
        if self._leave_out():
            return
        if self._local_steps is None:
            self._local_steps = {}
        pieces = self._gradients().pieces
        if optimizer not in self._local_steps:
            if steps_on_shards(optimizer):
                self._local_steps[optimizer] = LocalStep(optimizer, pieces)
            elif steps_on_whole(optimizer, pieces):
                self._local_steps[optimizer] = WholeStep(optimizer, pieces)
        lender = self._local_steps.get(optimizer)
        with lender.lent() if lender is not None else nullcontext(), self._around(optimizer):
            optimizer.step(**kwargs)

    def _around(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """What surrounds a step of an optimizer that has been lent its tensors."""
        del optimizer
        return nullcontext()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """What to differentiate in place of ``loss``; the step takes the factor out again."""
        return loss

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


class Bf16TruePrecision(HalfShardedPrecision):
    """``bf16-true`` with options: ``Trainer(plugins=Bf16TruePrecision(stochastic_rounding=True))``.

    Args:
        stochastic_rounding: whether updates are rounded to weights at random, true on average, so
            that small ones count (`precision.stochastic`).
    """

    def __init__(self, stochastic_rounding: bool = False) -> None:
        super().__init__("bf16-true")
        self._stochastic, self._steps = stochastic_rounding, 0

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if self._stochastic and (
            not steps_on_shards(optimizer) or isinstance(optimizer, KnowsPieces)
        ):
            raise ConfigError(
                f"stochastic_rounding=True, optimizer={type(optimizer).__name__}: the step runs on "
                "float32 copies of shards, which only optimizers that are element-wise can take; "
                "nearest valid: AdamW, or stochastic_rounding=False"
            )
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        self._steps += 1
        return result

    @override
    def _around(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        if not self._stochastic:
            return nullcontext()
        gradients = self._gradients()
        places = {
            shard_of(p) if isinstance(p := role.parameter, DTensor) else p: gradients.place(role)
            for role in gradients.roles
        }

        def generator_of(tensor: Tensor) -> torch.Generator | None:
            place = places.get(tensor)
            if place is None:  # no parameter of the module
                return None
            generator = torch.Generator(tensor.device)
            return generator.manual_seed(derive_seed(gradients.seed, "round", self._steps, *place))

        return widened(optimizer, generator_of)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Steps taken, from which the random bits follow."""
        return {**super().state_dict(), "steps": self._steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        super().load_state_dict(state_dict)
        self._steps = int(state_dict["steps"])


class MixedShardedPrecision(ShardedPrecision, MixedPrecision):  # type: ignore[misc]
    """``bf16-mixed``."""

    _reduction = torch.float32

    @property
    @override
    def types(self) -> ComputeTypes:
        return ComputeTypes(parameters=torch.bfloat16, reduction=self._reduction)


class Bf16MixedPrecision(MixedShardedPrecision):
    """``bf16-mixed`` with options: ``Trainer(plugins=Bf16MixedPrecision(reduce_dtype="bf16"))``.

    Args:
        reduce_dtype: format in which gradients are added up over microbatches of a step below
            ``zero=2``, and reduced: ``"fp32"``, or ``"bf16"`` for half the bytes on the wire.

    Raises:
        ConfigError: there is no such format.
    """

    def __init__(self, reduce_dtype: Literal["fp32", "bf16"] = "fp32") -> None:
        if reduce_dtype not in ("fp32", "bf16"):
            raise ConfigError(
                f"reduce_dtype={reduce_dtype!r}: must be 'fp32' or 'bf16'; nearest valid: "
                "reduce_dtype='fp32'"
            )
        super().__init__("bf16-mixed", "cpu")
        self._reduction = torch.float32 if reduce_dtype == "fp32" else torch.bfloat16

    @override
    def use(self, gradients: GradientSet) -> None:
        super().use(gradients)
        self.device = gradients.device.type


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

    Raises:
        ConfigError: an argument makes no sense.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        # Built as bf16-mixed: for 16-mixed Lightning would make and use a scaler of its own.
        super().__init__("bf16-mixed", "cpu")
        self.precision = "16-mixed"
        self.loss_scale = LossScale(initial_scale, growth_factor, backoff_factor, growth_interval)

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
        return [local(p.grad) for p in members if p.grad is not None]

    @override
    def state_dict(self) -> dict[str, Any]:
        """The scale and the counts."""
        return {**super().state_dict(), **self.loss_scale.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        super().load_state_dict(state_dict)
        self.loss_scale.load_state_dict(state_dict)


def _with_scale_of(scaler: Any) -> Fp16Precision:
    """From a ``GradScaler``, the plugin that scales as it would have."""
    return Fp16Precision(
        initial_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
    )


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
    if type(plugin) is MixedPrecision and plugin.precision == "16-mixed":
        return _with_scale_of(plugin.scaler)
    nearest = "bf16-true" if str(plugin.precision) == "16-true" else "bf16-mixed"
    raise ConfigError(
        f"precision={plugin.precision!r} ({type(plugin).__name__}): MegatronStrategy runs "
        f"{', '.join(SUPPORTED)}; nearest valid: precision={nearest!r}"
    )
