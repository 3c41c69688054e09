"""Base of the precision plugins: clipping, steps on shards, skipped steps.

Lightning's plugins know one device: they clip by the norm of its tensors, and the optimizer gets
the parameters as they are. Here gradients are clipped by the norm over all ranks, each element
counted once, and optimizers step on plain local tensors (`optim.sharded_step`).

*Layers of torch that cannot run with 16-bit parameters.* Under mixed precision a layer's forward
sees 16-bit copies of its parameters. Autocast converts the operands of a matrix product to one
format, but it does not cover every operation: torch refuses a batch norm in bfloat16 beside running
statistics in float32 and, on CPUs, a layer norm in bfloat16 of a residual stream in float32.
Parametrizations of 16-bit weights (the singular value of
`torch.nn.utils.parametrizations.spectral_norm`, the exponential of ``orthogonal``) are too rough or
not implemented. One device under autocast has float32 parameters in all of these layers.

So these layers see their parameters widened while they run, to the widest format of their inputs
and buffers. Nothing more is gathered or kept; the cost is ``4 P`` bytes for the ``P`` elements of
the layer until it is done, and nothing where all formats agree.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron._lightning.hooks import PrecisionAroundClosure
from lightning_megatron._torch.fsdp import gather_through, gathers_through
from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass, EnableTorchFunction
from lightning_megatron._torch.step_hooks import step_hooks
from lightning_megatron.layers.delayed_wgrad import GEMM_BACKEND, set_gemm_backend
from lightning_megatron.optim.gathered_step import GatheredStep
from lightning_megatron.optim.sharded_step import ShardedStep, steps_on_shards
from lightning_megatron.optim.staged_step import StagedStep
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.forward_wrapper import BlockForward
from lightning_megatron.whole.stage_weights import StageWeights
from lightning_megatron.zero.data_parallel import ComputeTypes, ZeroDataParallel
from lightning_megatron.zero.fully_sharded import FullySharded
from lightning_megatron.zero.gradients import GradientSet
from lightning_megatron.zero.whole_parameters import WholeParameters


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
        stages: weights of all stages, as hooks see them; None without a pipeline.
    """

    skipped = False
    overflowed = False
    left_out = 0
    _skip = False
    gradients: GradientSet | None = None
    stages: StageWeights | None = None
    _data: "ref[ZeroDataParallel] | None" = None
    _sharded_steps: dict[Optimizer, ShardedStep]
    _gathered_steps: dict[Optimizer, GatheredStep]
    _alone: set[Optimizer]
    """Optimizers that treat parameters one by one."""
    _told: set[Optimizer]
    """Optimizers of which the user was told that they do not."""
    _gathered: GatheredStep | None = None
    """Step that runs now, and whose closure may be called."""

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
        """Run the closure, then step on the shards that this rank owns.

        Hooks of the optimizer see the module's parameters, before the closure and after the step.
        """
        self.skipped = False
        hooks = step_hooks(optimizer)
        if hooks is not None:
            given = hooks.before({"closure": closure, **kwargs})
            with hooks.aside():  # so that it has none
                result = self.optimizer_step(optimizer, model, **given)
            if not self.skipped:
                hooks.after(given)
            return result
        if not steps_on_shards(optimizer):
            try:
                return self._step_with_closure(optimizer, model, closure, **kwargs)
            except _LeftOut:
                return None
        result = closure()
        self.finish_closure(model, optimizer)
        returned = self.step(optimizer, **kwargs)
        return result if returned is None else returned

    def _step_with_closure(
        self,
        optimizer: Optimizer,
        model: LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        """Let an optimizer run the closure, as often as it wants."""
        with self._whole_tensors(optimizer):
            result = super().optimizer_step(optimizer, model, closure, **kwargs)
        self.tell(optimizer)
        return result

    @contextmanager
    def _whole_tensors(self, optimizer: Optimizer) -> Iterator[None]:
        """Context of a step on whole tensors, of all stages where the optimizer unites them."""
        gathered, stages = self._gathered_step(optimizer), self.stages
        if gathered is None:
            with DisableTorchFunctionSubclass():
                yield
            return
        self._gathered = gathered
        staged = isinstance(gathered, StagedStep)
        try:
            within = nullcontext() if stages is None or staged else stages.within_stage()
            with within, gathered.lent(), self._around(optimizer):
                yield
        finally:
            self._gathered = None
        if isinstance(gathered, StagedStep):
            self._look_at(optimizer, gathered)

    def _look_at(self, optimizer: Optimizer, staged: StagedStep) -> None:
        """Let an optimizer step on its own stage, if it is seen to treat parameters one by one."""
        if staged.is_alone:
            self._alone.add(optimizer)
            del self._gathered_steps[optimizer]
        elif staged.unites and optimizer not in self._told:
            self._told.add(optimizer)
            rank_zero_warn(
                f"optimizer={type(optimizer).__name__}: its step takes values of several pipeline "
                f"stages together ({staged.unites}), which are sent to all ranks in each step"
            )

    @override
    def before_update(self) -> None:
        """Leave the step of an optimizer that runs the closure itself, if it is skipped."""
        if self._leave_out():
            raise _LeftOut
        self._gradients().settle()

    @override
    def around_closure(self) -> AbstractContextManager[None]:
        """Context of the user's code that an optimizer's step calls."""
        found: Any = ExitStack()
        if self._gathered is not None:
            found.enter_context(self._gathered.given_back())
        if self.stages is not None:
            found.enter_context(self.stages.as_in_hooks())
        found.enter_context(EnableTorchFunction())
        return found  # type: ignore[no-any-return]

    @override
    def loss_of_closure(self, loss: Any) -> Any:
        """Mean over the ranks that saw other samples, on which an optimizer may decide."""
        axis = self._gradients().topology.loss
        if not isinstance(loss, Tensor) or axis.group is None:
            return loss
        mean = loss.detach() / axis.size
        dist.all_reduce(mean, group=axis.group)
        return mean

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
        self._data = ref(parallel.data)  # a layout that the module leaves is to be gone
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
        self._gradients().settle()
        if steps_on_shards(optimizer):
            with (
                DisableTorchFunctionSubclass(),
                self._sharded_step(optimizer).tensors_swapped(),
                self._around(optimizer),
            ):
                result = optimizer.step(**kwargs)
        else:
            with self._whole_tensors(optimizer):
                result = optimizer.step(**kwargs)
        self.tell(optimizer)
        return result

    def _sharded_step(self, optimizer: Optimizer) -> ShardedStep:
        found = self._sharded_steps.get(optimizer)
        if found is None:
            gradients = self._gradients()
            found = ShardedStep(optimizer, gradients.shard_specs, gradients.lends)
            self._sharded_steps[optimizer] = found
        return found

    def _gathered_step(self, optimizer: Optimizer) -> GatheredStep | None:
        """What lends whole tensors to an optimizer; None if it steps on its own, as they are."""
        found = self._gathered_steps.get(optimizer)
        gradients = self._gradients()
        alone = self.stages is None or optimizer in self._alone
        if found is not None or (alone and gradients.lends_nothing(optimizer)):
            return found
        specs, lends = gradients.shard_specs, gradients.lends
        if self.stages is None or alone:
            found = GatheredStep(optimizer, specs, lends, self.tell)
        else:
            found = StagedStep(optimizer, self.stages, specs, lends, self.tell)
        self._gathered_steps[optimizer] = found
        return found

    def tell(self, optimizer: Optimizer) -> None:
        """Tell other ranks what a step has made of this rank's part; collective."""
        data = None if self._data is None else self._data()
        if data is not None:
            data.after_step(optimizer)

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
        self._sharded_steps, self._gathered_steps = {}, {}
        self._alone, self._told = set(), set()

    def _gradients(self) -> GradientSet:
        if self.gradients is None:
            raise RuntimeError("gradients can be clipped once the strategy has set up the module")
        return self.gradients


BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
OTHERS = (nn.LayerNorm, nn.GroupNorm, nn.Bilinear, ParametrizationList)
LAYERS = (*BATCH_NORMS, *INSTANCE_NORMS, *OTHERS)
"""Layers whose operations autocast does not convert, at least on CPUs."""


class WideForward(BlockForward):
    """Forward of a layer with parameters as wide as its inputs and buffers."""

    stays = True

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        own: dict[str, Any] = self._block._parameters
        wide = self._widest((*args, *kwargs.values(), *self._block._buffers.values()))
        narrow = {
            name: parameter
            for name, parameter in own.items()
            if parameter is not None
            and wide is not None
            and parameter.is_floating_point()
            and parameter.itemsize < wide.itemsize
        }
        if not narrow:
            return self._forward(*args, **kwargs)
        own.update({name: parameter.to(wide) for name, parameter in narrow.items()})
        try:
            return self._forward(*args, **kwargs)
        finally:
            own.update(narrow)

    def _widest(self, used: tuple[Any, ...]) -> torch.dtype | None:
        """Widest format of the layer's inputs and buffers."""
        if isinstance(self._block, ParametrizationList):  # nothing goes in
            return torch.float32
        formats = [x.dtype for x in used if isinstance(x, Tensor) and x.is_floating_point()]
        return max(formats, key=lambda dtype: dtype.itemsize, default=None)


def widen_where_needed(module: nn.Module) -> None:
    """Give the layers inside ``module`` that need it wide parameters while they run."""
    for layer in module.modules():
        held = getattr(layer.__dict__.get("forward"), "__self__", None)
        if isinstance(layer, LAYERS) and not isinstance(held, WideForward):
            WideForward(layer)
