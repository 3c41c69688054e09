"""The part of the strategy that Lightning's loops call for every batch.

How a batch is run is the business of `strategy.step_engine`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.monitoring.events import EventLog
from lightning_megatron.parallel.apply import ParallelModule
from lightning_megatron.parallel.gradients import GradientSet
from lightning_megatron.parallel.whole_reductions import WholeReductions
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.strategy.data.loaders import DataLoading
from lightning_megatron.strategy.held_schedules import HeldSchedules
from lightning_megatron.strategy.rng_state import RandomState
from lightning_megatron.strategy.step_engine import StepEngine, mean_over_tokens
from lightning_megatron.strategy.tuners.tuner import Tuner


class StepHooks(ParallelStrategy):
    """Forward, backward and evaluation of one batch."""

    parallel: ParallelModule
    data: DataLoading
    _engine: StepEngine | None = None
    _reductions: WholeReductions | None = None
    """Sees what hooks do with weights in parts, where any may look at them."""
    _watches_step = False
    """Whether steps are seen, too."""
    _blocked = False
    """Whether the batch is one of several before the optimizer step, and not their last."""

    def __init__(self) -> None:
        super().__init__()
        self._schedules = HeldSchedules()
        self.events = EventLog()
        self.tuners: list[Tuner] = []

    @property
    def gradients(self) -> GradientSet:
        """This rank's part of the gradients, with their global norm; for callbacks."""
        return self.parallel.gradients

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.events.step = self._module().trainer.global_step
        for tuner in tuple(self.tuners):  # one may move the module to a layout with others
            tuner.before_batch(accumulated=not self._fresh())
        if not self._fresh():
            return
        trainer = self._module().trainer
        if trainer.accumulate_grad_batches > 1:
            epoch: Any = trainer.fit_loop.epoch_progress.current
            at = epoch.processed, batch_idx
            self.random_state.note(at, self._module(), self._steps().by_token)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move a batch; what the hooks around it draw (augmentations) is drawn as in a step."""
        if not self._transforms_batches():
            return super().batch_to_device(batch, device, dataloader_idx)
        seeds = self.parallel.topology.step_seeds
        with seeds.batch():
            seeds.microbatch(0)
            return super().batch_to_device(batch, device, dataloader_idx)

    def _transforms_batches(self) -> bool:
        module = self._module()
        sources = (module, getattr(module.trainer, "datamodule", None))
        return any(
            source is not None and is_overridden(hook, source)
            for source in sources
            for hook in ("on_before_batch_transfer", "on_after_batch_transfer")
        )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = self._train(*args, **kwargs)
        for tuner in self.tuners:
            tuner.after_batch(self._steps().count)
        return output

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        engine, trainer = self._steps(), self._module().trainer
        args = (*args, *kwargs.values())
        context = self.precision_plugin.train_step_context
        with self._seen_as_steps():
            if not engine.interleaved:
                output = engine.step_on_batch("training_step", args, context)
                return mean_over_tokens(output, self.parallel.topology)
            divisor = trainer.accumulate_grad_batches
            return engine.train(
                args,
                context,
                fresh=self._fresh(),
                blocked=self._blocked,
                divisor=divisor,
                scaled=self.precision.scale_loss,
            )

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run backward, or, where the step already did, bring its gradients to light."""
        self.pre_backward(closure_loss)
        module = self._module()
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        with self._seen_as_steps():  # which a backward may repeat
            self._backward(loss, module, optimizer, *args, **kwargs)
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def _backward(self, loss: Tensor, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if self._steps().interleaved:
            self._steps().release_gradients()
        else:
            self.parallel.gradients.begin(fresh=self._fresh())
            self.parallel.data.begin(blocked=self._blocked)
            self.parallel.data.before_backward()
            scaled = self.precision.scale_loss(loss)
            self.precision_plugin.backward(scaled, module, *args, **kwargs)
            self.parallel.data.finish()
        if not self._blocked:
            self.parallel.gradients.finish()

    def watch_weights(self, *, step: bool) -> None:
        """From now on, have what hooks (and steps) find out of weights in parts made true."""
        self._reductions = WholeReductions(self.parallel.gradients, self._module())
        self._watches_step = step
        self.precision.around_step = self._reductions.lifted
        self._reductions.__enter__()  # type: ignore[no-untyped-call]

    def unwatch_weights(self) -> None:
        """Undo `watch_weights`."""
        if self._reductions is not None:
            self._reductions.end()
            self._reductions, self.precision.around_step = None, nullcontext

    def _seen_as_steps(self) -> AbstractContextManager[None]:
        """What runs within is seen if steps of the user's are."""
        return nullcontext() if self._watches_step else self._unseen()

    def _unseen(self) -> AbstractContextManager[None]:
        """What runs within is the network, which knows its weights."""
        return nullcontext() if self._reductions is None else self._reductions.lifted()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        self._schedules.release()
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if not self.precision.skipped:
            self.parallel.data.after_step(optimizer)
        else:
            self._schedules.hold(self.lr_scheduler_configs, self._module().trainer)
        self.data.position.after_step(self._module().trainer)
        return result

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "validation_step", self.precision_plugin.val_step_context, args, kwargs
        )

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "predict_step", self.precision_plugin.predict_step_context, args, kwargs
        )

    def _evaluate(
        self,
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        with self._unseen():
            return self._steps().evaluate(name, (*args, *kwargs.values()), context)

    @override
    def on_validation_start(self) -> None:
        trainer = self._module().trainer
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.random_state.begin_validation()

    @override
    def on_validation_end(self) -> None:
        self.parallel.data.come_to_rest()
        self.random_state.end_validation()

    @property
    def loss_per_token(self) -> bool | None:
        """Whether steps return sums over tokens; None until one has."""
        return None if self._engine is None else self._engine.by_token

    @loss_per_token.setter
    def loss_per_token(self, value: bool | None) -> None:
        if self._engine is not None:
            self._engine.by_token = value

    def _fresh(self) -> bool:
        """Whether the batch is the first before an optimizer step."""
        trainer = self._module().trainer
        return bool(trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0)

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def precision(self) -> ShardedPrecision:
        """The precision plugin, which knows the shards."""
        assert isinstance(self.precision_plugin, ShardedPrecision)
        return self.precision_plugin

    @property
    def random_state(self) -> RandomState:
        """Generators of this process; the strategy's."""
        raise NotImplementedError

    def _steps(self) -> StepEngine:
        assert self._engine is not None
        return self._engine
