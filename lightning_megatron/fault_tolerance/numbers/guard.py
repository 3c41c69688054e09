"""No update from bad numbers: losses and gradients that are not finite, and losses that jump.

One bad batch, one flipped bit, one overflow in a kernel is enough: the next optimizer step writes
it into every weight, and from then on a run trains nothing (Lightning goes on to the end with
weights that are NaN). `NumberGuard` looks at every step after its backward and before its update,
when the weights are still good. All ranks see the same numbers and decide alike:

* the loss of every rank, which travels with what the ranks exchange in every batch anyway, so that
  a fault is known with the ranks that it came from;
* the gradients: their sum on each rank, which is not finite if any of them is not, travels with the
  losses. Where the Trainer clips by their norm, that is computed anyway and tells the same;
* for spikes, the mean loss beside the losses of the last steps (`fault_tolerance.numbers.spikes`).

What may follow:

========  ==========================================================================================
raise     the run ends on all ranks, with the weights of before the batch
skip      the update is left out; random streams, running statistics and learning rate schedules
          that count steps go on as if the batch had not been there
rollback  weights, optimizer, schedules and random streams return to a copy that is at least
          ``steps`` updates old, and a window of batches is passed over: those since the copy, as
          the weights may have gone astray before the loss showed it, and further ones
rerun     the batch runs once more with the same random numbers. Another result means that hardware
          failed, and the new one is used if it is good. The same result lies in data or weights,
          and ``after_rerun`` says what follows
========  ==========================================================================================

Going back about 100 steps and passing over 200 to 500 batches is what brought PaLM over some twenty
spikes (Chowdhery et al., arXiv 2204.02311, section 5.1). The data is not rewound: batches are
passed over forwards, so that each is still read once. And the copy is one in the host's memory, not
a checkpoint: that may be thousands of steps old, whose batches would all be lost to training.
"""

import math
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.callbacks.group import members_of
from lightning_megatron.comm.votes import Vote
from lightning_megatron.errors import raise_if_any
from lightning_megatron.fault_tolerance.numbers.diagnosis import (
    BadNumber,
    Window,
    bad_gradients,
    bad_loss,
    spike,
)
from lightning_megatron.fault_tolerance.numbers.reports import tell_fault, tell_rollback, text_of
from lightning_megatron.fault_tolerance.numbers.responses import (
    AfterRerun,
    Response,
    Responses,
    RollbackConfig,
    SpikeResponse,
)
from lightning_megatron.fault_tolerance.numbers.spikes import SpikeConfig, SpikeHistory
from lightning_megatron.monitoring.gradients import GradientMonitor
from lightning_megatron.monitoring.window import LoggingSteps
from lightning_megatron.precision.fp16 import Fp16Precision
from lightning_megatron.services import MegatronServices, services_if_any, services_of

_NEEDS = "it needs the losses and gradients"


class NumberGuard(pl.Callback):
    """Keeps losses and gradients that are not finite, and spikes, out of the weights.

    Works under `MegatronStrategy`, in every layout. Batches whose gradients are accumulated share
    one fate. With ``16-mixed``, gradients that overflow are the business of the loss scale, and no
    fault until the scale is down at 1. Under manual optimization ``raise`` and ``skip`` see the
    gradients at each step of an optimizer; the rest is refused.

    Args:
        nonfinite: what follows a loss or a gradient that is infinite or no number: ``"raise"``,
            ``"skip"``, ``"rollback"`` or ``"rerun"``.
        spike: what follows a loss far above those before: ``"log"``, ``"skip"``, ``"rollback"``,
            ``"rerun"``, or None, not to look for any.
        after_rerun: what follows when the second run of a batch is no better.
        rollback: how far back, and what is passed over.
        spikes: which losses are spikes.
        max_skips_in_a_row: skips one after the other with which a run ends, as no batch is good.

    Attributes:
        skipped: updates left out so far.
        rollbacks: how often the run has gone back.
        faults: the faults of this process' run, the latest last.

    Raises:
        ConfigError: an option makes no sense, alone or with the Trainer.
        FloatingPointError: in training, on every rank, where a fault is to end the run.
    """

    def __init__(
        self,
        nonfinite: Response = "raise",
        spike: SpikeResponse | None = None,
        after_rerun: AfterRerun = "raise",
        rollback: RollbackConfig = RollbackConfig(),  # noqa: B008 (frozen)
        spikes: SpikeConfig = SpikeConfig(),  # noqa: B008
        max_skips_in_a_row: int = 20,
    ) -> None:
        self._responses = Responses(nonfinite=nonfinite, spike=spike, after_rerun=after_rerun)
        problems = [*self._responses.problems(), *rollback.problems(), *spikes.problems()]
        if max_skips_in_a_row < 1:
            problems.append(
                f"max_skips_in_a_row={max_skips_in_a_row}: must be at least 1; nearest valid: "
                "max_skips_in_a_row=1"
            )
        raise_if_any(problems)
        self._rollback, self._max_in_a_row = rollback, max_skips_in_a_row
        self._history = SpikeHistory(spikes)
        self._window = Window()
        self._in_a_row = 0
        self._going_back = False
        self.skipped = self.rollbacks = 0
        self.faults: list[BadNumber] = []
        self._trainer: pl.Trainer | None = None
        self._vote = Vote("loss", default=math.nan)
        self._sums: Vote | None = None
        self._finite = False
        self._loss = torch.zeros(())
        self._to_pass_over = 0
        self._logging, self._logged = LoggingSteps(), (-1, -1)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy = services_of(trainer, self, _NEEDS)
        automatic = pl_module.automatic_optimization
        monitors = [one for one in members_of(trainer) if isinstance(one, GradientMonitor)]
        raise_if_any(
            self._responses.problems_with(
                automatic=automatic,
                accumulate=trainer.accumulate_grad_batches,
                monitor=next((one.nonfinite for one in monitors), None),
            )
        )
        self._trainer = trainer
        self._vote = strategy.votes.register("loss", default=math.nan)
        clips = trainer.gradient_clip_val or any(one.clips for one in monitors)
        single = automatic and trainer.accumulate_grad_batches == 1
        together = single and not clips and not self._scales_loss()
        self._sums = strategy.votes.register("gradients", by_rank=False) if together else None
        strategy.votes.on_settled(self._settled)
        strategy.recovery.accept_step = self._accept_step
        # Under manual optimization a batch has no beginning to return to.
        strategy.recovery.can_undo = automatic and self._responses.undoes_batches

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        recovery = services_of(trainer, self, _NEEDS).recovery
        self._window = Window()
        recovery.batches_to_skip, self._to_pass_over = self._to_pass_over, 0
        recovery.keep_states(self._rollback.steps if "rollback" in self._responses.all else None)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        copies = self._strategy.recovery.rollback
        if copies is not None and batch_idx % trainer.accumulate_grad_batches == 0:
            copies.note(trainer.fit_loop.epoch_loop.total_batch_idx)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        services = services_if_any(trainer)
        if stage != "fit" or services is None:
            return
        recovery = services.recovery
        if recovery.accept_step == self._accept_step:
            recovery.accept_step, recovery.can_undo = None, False
            recovery.keep_states(None)
            self._trainer = None

    # What is seen --------------------------------------------------------------------------------

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self._loss = loss.detach()

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Only now: to wait for the loss before the backward is enqueued would leave a GPU idle.
        # Lightning has divided it for accumulation.
        if self._sums is None:
            self._vote.put(float(self._loss) * trainer.accumulate_grad_batches)
            return
        own = self._strategy.gradients.finiteness()
        loss, total = torch.stack([self._loss.to(own), own]).tolist()
        self._vote.put(loss)
        self._sums.put(abs(total))

    def _settled(self) -> None:
        """The losses of a batch are known."""
        trainer = self._trainer
        if trainer is None or self._strategy.recovery.skips_batch:
            return
        if trainer.lightning_module.automatic_optimization:
            self._window.batches.append(trainer.fit_loop.epoch_loop.batch_idx)
            self._window.losses.append(self._vote.values)
            if self._sums is not None:
                self._finite = math.isfinite(self._sums.max)

    # What is decided -----------------------------------------------------------------------------

    def _accept_step(self) -> bool:
        """Whether to make the update; called on every rank when the gradients are there."""
        fault = self._examine()
        go_on = fault is None or self._meet(fault)
        self._window, self._finite = Window(), False
        if go_on:
            self._in_a_row = 0
        return go_on

    def _examine(self) -> BadNumber | None:
        """What is wrong with the step; the same on every rank."""
        window, strategy = self._window, self._strategy
        if self._running.lightning_module.automatic_optimization:
            if not window.losses:
                return None  # training_step returned None
            fault = bad_loss(window, strategy.topology.degrees)
            if fault is not None:
                return fault
        if not self._scales_loss():
            fault = self._bad_gradients()
            if fault is not None:
                return fault
        if self._responses.spike is None:
            return None
        mean = fmean(window.means())
        limit = self._history.exceeds(mean)
        return None if limit is None else spike(window, mean, limit)

    def _bad_gradients(self) -> BadNumber | None:
        if self._finite:
            return None
        gradients = self._strategy.gradients
        norm = float(gradients.norm())
        if math.isfinite(norm):
            return None
        return bad_gradients(norm, gradients.by_name())

    def _meet(self, fault: BadNumber) -> bool:
        """Do what is to follow; whether the update is made after all."""
        answer: str = self._responses.to(fault.what)
        note = ""
        if answer == "rerun":
            again = self._run_again()
            if again is None:
                self._report(
                    fault, "rerun", "a second run of the batch is good: a fault that passes"
                )
                return True
            result = "the same again" if again.is_same_as(fault) else f"now {again.detail}"
            note = f"persistent: a second run of the batch is no better, {result}"
            answer = self._responses.after_rerun
        return self._answer(fault, answer, note)

    def _answer(self, fault: BadNumber, answer: str, note: str) -> bool:
        self._report(fault, answer, note)
        if answer == "log":
            return True
        if answer == "raise":
            raise FloatingPointError(text_of(self._running, fault))
        self._in_a_row += 1
        self.skipped += 1
        if answer == "rollback":
            if self.rollbacks >= self._rollback.max_rollbacks:
                raise FloatingPointError(
                    f"{text_of(self._running, fault)}, after {self.rollbacks} rollbacks "
                    "(max_rollbacks)"
                )
            self._going_back = True
        elif self._in_a_row >= self._max_in_a_row:
            raise FloatingPointError(
                f"{text_of(self._running, fault)}, and so it was in {self._in_a_row} steps one "
                "after the other (max_skips_in_a_row)"
            )
        return False

    def _run_again(self) -> BadNumber | None:
        strategy, batches = self._strategy, self._window.batches
        strategy.recovery.run_again()
        self._finite = False
        [losses] = strategy.votes.exchange([float(self._loss)])
        self._window = Window(batches, [losses])
        return self._examine()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        precision = self._strategy.precision
        if not isinstance(precision, Fp16Precision) or self._going_back:
            return
        if precision.overflowed and precision.loss_scale.value <= 1:
            fault = self._bad_gradients()
            if fault is None:
                return  # a gradient that was finite as a sum of squares
            answer: str = self._responses.nonfinite
            if answer == "rerun":
                answer = self._responses.after_rerun
            self._answer(fault, answer, "the loss scale is down at 1")
            precision.skip_step()

    def _scales_loss(self) -> bool:
        """Whether gradients may overflow for a loss scale that is too large."""
        return isinstance(self._strategy.precision, Fp16Precision)

    def _report(self, fault: BadNumber, action: str, note: str) -> None:
        self.faults.append(fault)
        tell_fault(self._running, self._strategy, fault, action, note)

    # What is done when the batch is over ---------------------------------------------------------

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._going_back:
            self._going_back = False
            self._go_back()
        if self._responses.undoes_batches:
            skipped, back = self._strategy.precision.skipped_steps, self.rollbacks
            if self._logging.now(trainer) or (skipped, back) != self._logged:
                self._logged = skipped, back
                values = {"optim/skipped_steps": float(skipped), "ft/rollbacks_total": float(back)}
                pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def _go_back(self) -> None:
        """Return to an older state, and pass over batches; the update was left out."""
        trainer, recovery = self._running, self._strategy.recovery
        copies = recovery.rollback
        assert copies is not None
        made, read = copies.updates, trainer.fit_loop.epoch_loop.total_batch_idx + 1
        there = copies.go_back()
        if there is None:
            raise FloatingPointError(
                f"step {trainer.global_step}: there is no state to go back to, as layers or "
                "trained parameters have changed since the last one was kept"
            )
        self.rollbacks += 1
        updates, batches = there
        recovery.batches_to_skip = max(0, self._rollback.skip_batches - (read - batches))
        count = f"{self.rollbacks} of at most {self._rollback.max_rollbacks}"
        tell_rollback(trainer, self._strategy, count, made - updates, read - batches)

    @override
    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        ahead = 0 if trainer is None else self._strategy.recovery.batches_to_skip
        counts = {"skipped": self.skipped, "rollbacks": self.rollbacks, "in_a_row": self._in_a_row}
        return {**counts, "to_pass_over": ahead, "history": self._history.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped, self.rollbacks = state_dict["skipped"], state_dict["rollbacks"]
        self._in_a_row = state_dict["in_a_row"]
        self._to_pass_over = state_dict["to_pass_over"]
        self._history.load_state_dict(state_dict["history"])

    @property
    def _running(self) -> pl.Trainer:
        assert self._trainer is not None
        return self._trainer

    @property
    def _strategy(self) -> MegatronServices:
        return services_of(self._running, self, _NEEDS)
