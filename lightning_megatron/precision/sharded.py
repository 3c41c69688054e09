"""Base of the precision plugins: clipping, steps on shards, skipped steps.

Lightning's plugins know one device: they clip by the norm of its tensors, and the optimizer gets
the parameters as they are. Here gradients are clipped by the norm over all ranks, each element
counted once, and optimizers step on plain local tensors (`optim.sharded_step`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron._lightning import PrecisionAroundClosure
from lightning_megatron._torch import (
    DisableTorchFunctionSubclass,
    EnableTorchFunction,
    gather_through,
    gathers_through,
)
from lightning_megatron.layers.delayed_wgrad import GEMM_BACKEND, set_gemm_backend
from lightning_megatron.optim.gathered_step import GatheredStep, steps_on_whole
from lightning_megatron.optim.sharded_step import ShardedStep, steps_on_shards
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.fully_sharded import FullySharded
from lightning_megatron.parallel.gradients import GradientSet
from lightning_megatron.parallel.whole_parameters import WholeParameters
from lightning_megatron.parallel.zero import ComputeTypes
from lightning_megatron.precision.wide_forward import widen_where_needed


class _LeftOut(Exception):
    """Signal that leaves the step of an optimizer that runs the closure itself."""


class ShardedPrecision(PrecisionAroundClosure):
    """Base of the plugins: clips by the global norm and steps on shards.

    Attributes:
        gradients: gradients of the module; the strategy sets them once it is on its layout.
        skipped: whether the latest optimizer step was skipped.
        overflowed: whether the gradients of the next step are not finite because of the loss scale;
            such a step is skipped anyway, and is no fault.
        left_out: number of steps so far that a callback asked to skip.
    """

    skipped = False
    overflowed = False
    left_out = 0
    _skip = False
    gradients: GradientSet | None = None
    _local_steps: dict[Optimizer, ShardedStep | GatheredStep] | None = None

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
        """Run the closure, then step on the shards that this rank owns."""
        self.skipped = False
        if not steps_on_shards(optimizer) and self._gradients().lends_nothing(optimizer):
            # All is here; this one may call the closure as often as it wants.
            try:
                with DisableTorchFunctionSubclass():
                    return super().optimizer_step(optimizer, model, closure, **kwargs)
            except _LeftOut:
                return None
        result = closure()
        self.finish_closure(model, optimizer)
        returned = self.step(optimizer, **kwargs)
        return result if returned is None else returned

    @override
    def before_update(self) -> None:
        """Leave the step of an optimizer that runs the closure itself, if it is skipped."""
        if self._leave_out():
            raise _LeftOut

    @override
    def around_closure(self) -> AbstractContextManager[None]:
        """Context of the user's code that an optimizer's step calls."""
        found: AbstractContextManager[None] = EnableTorchFunction()
        return found

    def skip_step(self) -> None:
        """Skip the next step; called on all ranks or on none."""
        self._skip = True

    @property
    def will_skip(self) -> bool:
        """Whether the next step will be skipped."""
        return self._skip or self.overflowed

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped so far, for any reason."""
        return self.left_out

    def forget_weights(self) -> None:
        """Drop what depends on the weights, which changed other than by a step."""

    def forget_batch(self) -> None:
        """Drop the plugin's state of the forward and backward since the last step."""

    def _leave_out(self) -> bool:
        """Return whether `skip_step` was called for this step, and reset it."""
        asked, self._skip = self._skip, False
        if asked:
            self.skipped = True
            self.left_out += 1
        return asked

    @override
    def state_dict(self) -> dict[str, Any]:
        """Number of skipped steps."""
        return {"left_out": self.left_out} if self.left_out else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.left_out = int(state_dict.get("left_out", 0))

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert the module before it is put on its layout."""
        if self.types.parameters is not None:
            widen_where_needed(module)
        return super().convert_module(module)

    def prepare(self, parallel: ParallelModule) -> None:
        """Prepare the layers of a module that is on its layout; called before it runs."""
        for layer in parallel.module.modules():
            if getattr(layer, GEMM_BACKEND, None) is not None:  # of an earlier Trainer's plugin
                set_gemm_backend(layer, None)
        if isinstance(parallel.data, WholeParameters):
            parallel.data.pack_plainly()
        if isinstance(parallel.data, FullySharded):
            for parameter in parallel.module.parameters():
                if gathers_through(parameter):
                    gather_through(parallel.data.units, cast(DTensor, parameter), None)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step on this rank's part of the parameters, with the present gradients.

        Returns:
            The result of the optimizer's own step.
        """
        if self._leave_out():
            return None
        if self._local_steps is None:
            self._local_steps = {}
        specs = self._gradients().shard_specs
        if optimizer not in self._local_steps:
            kind = GatheredStep if steps_on_whole(optimizer, specs) else ShardedStep
            self._local_steps[optimizer] = kind(optimizer, specs, self._gradients().lends)
        swapped = self._local_steps[optimizer].tensors_swapped()
        with DisableTorchFunctionSubclass(), swapped, self._around(optimizer):
            return optimizer.step(**kwargs)

    def _around(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Context of an optimizer's step, entered once the optimizer holds local tensors."""
        del optimizer
        return nullcontext()

    @property
    def loss_factor(self) -> float:
        """Factor of a loss in `scale_loss`."""
        return 1.0

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate, perhaps scaled; the step unscales gradients."""
        return loss

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip the optimizer's gradients by the norm over all ranks, each element counted once."""
        self._gradients().clip_norm(float(clip_val), optimizer)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp the elements of this rank's part of the optimizer's gradients."""
        self._gradients().clip_value(float(clip_val), optimizer)

    def use(self, gradients: GradientSet) -> None:
        """Clip these gradients from now on, and drop what was prepared for earlier ones."""
        self.gradients = gradients
        self._local_steps = None

    def _gradients(self) -> GradientSet:
        if self.gradients is None:
            raise RuntimeError("gradients can be clipped once the strategy has set up the module")
        return self.gradients
