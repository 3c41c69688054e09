"""Steps that can be left out, taken again, or whose batches are skipped.

Whether an update is sound is known when its gradients are there, and must be decided before the
optimizer touches the weights. So the closure that Lightning hands to the optimizer (forward and
backward of the batch) is followed by `accept_step`, which a callback may set: it sees losses and
gradients, and may have the batch run once more. If it says no, the precision plugin leaves the step
out, on all ranks alike, with the schedules of the learning rate standing still.

What a batch changes besides gradients is noted before it begins, and put back before it runs again
and when it is left out: random streams, running statistics of batch norms, histories of FP8 scales,
and the means over the epoch of what is logged, of which one NaN would make NaN. A run from which a
batch was left out is then, to the bit, one that never saw it. (What ``torchmetrics`` objects of the
module have gathered stays.)

A batch that is *skipped* is read, and counts for the position in the data and the Trainer's
progress, but nothing is computed. Its loss is zero, and no callback is asked about its gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron._lightning import initial_states, training_sums
from lightning_megatron.services import Recovery
from lightning_megatron.strategy.rng_state import Moment
from lightning_megatron.strategy.rollback import Rollback
from lightning_megatron.strategy.step_hooks import StepHooks

AcceptStep = Callable[[], bool]
"""Whether the update may be made whose gradients are there; the same answer on all ranks."""


class StepRecovery(StepHooks):
    """Asks whether each step is accepted, and does what follows.

    Attributes:
        accept_step: asked before every update; None for none.
        can_undo: whether what a batch changes is noted, so that it can be put back.
        batches_to_skip: batches that are still to be skipped.
        skips_batch: whether the present batch is.
        rollback: copies of the state to go back to; None where nobody wants any.
    """

    accept_step: AcceptStep | None = None
    can_undo = False
    batches_to_skip = 0
    skips_batch = False
    rollback: Rollback | None = None
    _before: "_Before | None" = None
    _closure: Callable[[], Any] | None = None
    _tracked: tuple[Any, list[Tensor]] = None, []

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._fresh():
            # Of batches whose gradients are added up, all or none.
            self.skips_batch = self.batches_to_skip > 0
            if self.can_undo:
                moment, results = self.random_state.now(), self._results()
                self._before = _Before(moment, self._statistics(), results)
        if self.skips_batch:
            self.batches_to_skip = max(0, self.batches_to_skip - 1)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.skips_batch:
            return torch.zeros((), device=self.root_device)
        return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self.skips_batch:
            self.post_backward(closure_loss)  # ranks tell each other something in every batch
            return closure_loss
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        if self.skips_batch:
            self.precision.skip_step()
        elif self.accept_step is not None:
            closure = self._asking(closure)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.rollback is not None and not self.precision.skipped:
            self.rollback.updates += 1
        return result

    @property
    def recovery(self) -> Recovery:
        """What callbacks know of this class."""
        return self

    def keep_states(self, every: int | None) -> None:
        """Keep copies of the state from now on, one of which is ``every`` updates old; or none."""
        self.rollback = None if every is None else Rollback(self, every)

    def run_again(self) -> None:
        """Run the batch again of which `accept_step` is asked, as if it were new; collective."""
        assert self._closure is not None
        self.undo_batch()
        self._closure()

    def undo_batch(self) -> None:
        """Undo what the present batch has changed, but for its gradients."""
        before = self._before
        assert before is not None
        self.random_state.return_to(before.moment)
        with torch.no_grad():
            for held, value in zip(self._statistics_now(), before.statistics, strict=True):
                held.copy_(value)
        for key, sums in self._results().items():
            metric = self._collection()[key]
            for name, value in sums.items():
                begun = torch.full_like(value, float(initial_states(metric)[name]))
                setattr(metric, name, before.results.get(key, {}).get(name, begun))
        self.precision.forget_batch()

    def _collection(self) -> Any:
        """What is logged in training, as Lightning keeps it."""
        return training_sums(self._module().trainer)

    def _results(self) -> dict[str, dict[str, Tensor]]:
        """The sums over the epoch of what is logged; tensors that are replaced, not changed."""
        return {
            key: {name: getattr(metric, name) for name in initial_states(metric)}
            for key, metric in self._collection().items()
        }

    def _asking(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, followed by `accept_step` the first time that it is called."""
        asked = False

        def asking() -> Any:
            nonlocal asked
            result = closure()
            if asked or self.accept_step is None:  # of optimizers that call it several times
                return result
            asked, self._closure = True, closure
            try:
                if not self.accept_step():
                    if self._before is not None:
                        self.undo_batch()
                    self.precision.skip_step()
            finally:
                self._closure = None
            return result

        return asking

    def _statistics(self) -> list[Tensor]:
        return [value.detach().clone() for value in self._statistics_now()]

    def _statistics_now(self) -> list[Tensor]:
        """What batch norms and the like gather in every forward."""
        if self._tracked[0] is not self.parallel:
            found = [
                value
                for child in self._module().modules()
                if getattr(child, "track_running_stats", False)
                for value in child.buffers(recurse=False)
            ]
            self._tracked = self.parallel, found
        return self._tracked[1]


class _Before:
    """How things were before a batch.

    Args:
        moment: of the generators.
        statistics: of batch norms.
        results: sums of what is logged.
    """

    def __init__(
        self, moment: Moment, statistics: list[Tensor], results: dict[str, dict[str, Tensor]]
    ) -> None:
        self.moment, self.statistics, self.results = moment, statistics, results
