"""NaN, Inf and spikes of the loss, found before the update: `NumberGuard`.

One bad batch, flipped bit or overflow is enough: the next optimizer step writes it into every
weight, and from then on the run trains nothing (Lightning goes on to the end with weights that are
NaN). `NumberGuard` checks every step after its backward and before its update, while the weights
are still good. All ranks see the same numbers and decide alike. They check

* the loss of every rank, which is part of the exchange of every batch, so that the ranks of a fault
  are known;
* the sum of the gradients of each rank, which is not finite if any gradient is not. It is part of
  the same exchange. If the Trainer clips by the norm, the norm is used, as it is computed anyway;
* for spikes, the mean loss, by the losses of the last steps (`fault_tolerance.numbers.spikes`).

Responses to a fault:

========  ==========================================================================================
raise     the run ends on all ranks, with the weights from before the batch
skip      the update is skipped; random streams, running statistics and learning rate schedules that
          count steps continue as if the batch did not exist
rollback  weights, optimizer, schedules and random streams return to a copy that is at least
          ``steps`` updates old, and some batches are skipped: those since the copy, as the weights
          may have been bad before the loss showed it, and further ones
rerun     the batch runs once more with the same random numbers. Another result means a hardware
          fault; it is used if it is good. The same result comes from data or weights, and
          ``after_rerun`` is the response
========  ==========================================================================================

PaLM passed some twenty spikes by going back about 100 steps and skipping 200 to 500 batches
(Chowdhery et al., arXiv 2204.02311, section 5.1). The data is not rewound: batches are skipped
forwards, so that each is read once. The copy is in host memory: a checkpoint may be thousands of
steps old, and the batches since then would be lost to training.
"""

import math
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron.callback_group import members_of
from lightning_megatron.comm.peers import Peers
from lightning_megatron.comm.votes import Vote
from lightning_megatron.errors import raise_if_any
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.numbers.diagnosis import (
    BadNumber,
    Window,
    bad_gradients,
    bad_loss,
    not_finite,
    spike,
)
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
    """Prevents updates by losses and gradients that are not finite, and by spikes of the loss.

    Works under `MegatronStrategy`, in every layout. Accumulated batches are skipped, undone or kept
    together. With ``16-mixed`` the loss scale handles gradients that overflow; they are a fault
    only when the scale is 1. Under manual optimization ``raise`` and ``skip`` check the gradients
    at each step of an optimizer; the other responses are refused.

    Args:
        nonfinite: response to a loss or gradient that is NaN or infinite: ``"raise"``, ``"skip"``,
            ``"rollback"`` or ``"rerun"``.
        spike: response to a loss far above the last ones: ``"log"``, ``"skip"``, ``"rollback"`` or
            ``"rerun"``; None does not look for spikes.
        after_rerun: response to a second run of a batch that is no better.
        rollback: steps to go back, and batches to skip.
        spikes: definition of a spike.
        max_skips_in_a_row: steps skipped in a row after which the run ends.

    Attributes:
        skipped: updates skipped so far.
        rollbacks: rollbacks so far.
        faults: faults that this process has seen, the latest last.

    Raises:
        ConfigError: an option is not valid, alone or with the Trainer.
        FloatingPointError: in training, on every rank, a fault ends the run.
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
        self._rollback = rollback
        self._max_in_a_row = max_skips_in_a_row
        self._history = SpikeHistory(spikes)
        self._window = Window()
        self._in_a_row = 0
        self._going_back = False
        self.skipped = 0
        self.rollbacks = 0
        self.faults: list[BadNumber] = []
        self._trainer: pl.Trainer | None = None
        self._vote = Vote("loss", default=math.nan)
        self._sums: Vote | None = None
        self._finite = False
        self._loss = torch.zeros(())
        self._skip_after_resume = 0
        self._logging = LoggingSteps()
        self._logged = (-1, -1)

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
        self._sums = strategy.votes.register("gradients") if together else None
        strategy.votes.on_settled(self._settled)
        strategy.recovery.accept_step = self._accept_step
        # Under manual optimization a batch has no beginning to return to.
        strategy.recovery.can_undo = automatic and self._responses.undoes_batches

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        recovery = services_of(trainer, self, _NEEDS).recovery
        self._window = Window()
        recovery.batches_to_skip = self._skip_after_resume
        self._skip_after_resume = 0
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

    # Collecting the numbers ----------------------------------------------------------------------

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
        """Keep the losses of a batch, which the ranks have exchanged."""
        trainer = self._trainer
        if trainer is None or self._strategy.recovery.skips_batch:
            return
        if trainer.lightning_module.automatic_optimization:
            self._window.batches.append(trainer.fit_loop.epoch_loop.batch_idx)
            self._window.losses.append(self._vote.values)
            if self._sums is not None:
                self._finite = math.isfinite(self._sums.max)

    # The decision --------------------------------------------------------------------------------

    def _accept_step(self) -> bool:
        """Whether to make the update; called on every rank after the backward."""
        fault = self._find_fault()
        go_on = fault is None or self._respond(fault)
        self._window = Window()
        self._finite = False
        if go_on:
            self._in_a_row = 0
        return go_on

    def _find_fault(self) -> BadNumber | None:
        """Fault of the step, the same on every rank; None if there is none."""
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
        return bad_gradients(norm, Peers().all_gather(not_finite(gradients.by_name())))

    def _respond(self, fault: BadNumber) -> bool:
        """Apply the response to a fault; returns whether the update is made."""
        response: str = self._responses.to(fault.what)
        note = ""
        if response == "rerun":
            again = self._run_again()
            if again is None:
                self._report(fault, "rerun", "transient: a second run of the batch is good")
                return True
            result = "the same" if again.is_same_as(fault) else f"another fault: {again.detail}"
            note = f"persistent: the second run of the batch gave {result}"
            response = self._responses.after_rerun
        return self._apply(fault, response, note)

    def _apply(self, fault: BadNumber, response: str, note: str) -> bool:
        self._report(fault, response, note)
        if response == "log":
            return True
        if response == "raise":
            raise FloatingPointError(_describe(self._running, fault))
        self._in_a_row += 1
        self.skipped += 1
        if response == "rollback":
            if self.rollbacks >= self._rollback.max_rollbacks:
                raise FloatingPointError(
                    f"{_describe(self._running, fault)}; max_rollbacks="
                    f"{self._rollback.max_rollbacks} rollbacks are done"
                )
            self._going_back = True
        elif self._in_a_row >= self._max_in_a_row:
            raise FloatingPointError(
                f"{_describe(self._running, fault)}; {self._in_a_row} steps in a row were skipped "
                f"(max_skips_in_a_row={self._max_in_a_row})"
            )
        return False

    def _run_again(self) -> BadNumber | None:
        strategy, batches = self._strategy, self._window.batches
        strategy.recovery.run_again()
        self._finite = False
        [losses] = strategy.votes.exchange([float(self._loss)])
        self._window = Window(batches, [losses])
        return self._find_fault()

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
                return  # the norm is finite after all
            response: str = self._responses.nonfinite
            if response == "rerun":
                response = self._responses.after_rerun
            self._apply(fault, response, "the loss scale is 1, its least")
            precision.skip_step()

    def _scales_loss(self) -> bool:
        """Whether gradients may overflow because the loss scale is too large."""
        return isinstance(self._strategy.precision, Fp16Precision)

    def _report(self, fault: BadNumber, action: str, note: str) -> None:
        self.faults.append(fault)
        _report_fault(self._running, self._strategy, fault, action, note)

    # After the batch -----------------------------------------------------------------------------

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
                values = {"optim/skipped_steps": float(skipped), "optim/rollbacks": float(back)}
                pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)

    def _go_back(self) -> None:
        """Return to an older state and skip batches; the update was skipped."""
        trainer, recovery = self._running, self._strategy.recovery
        copies = recovery.rollback
        assert copies is not None
        made, read = copies.updates, trainer.fit_loop.epoch_loop.total_batch_idx + 1
        there = copies.go_back()
        if there is None:
            raise FloatingPointError(
                f"step {trainer.global_step}: there is no copy to roll back to, as layers or "
                "trained parameters have changed since the last copy"
            )
        self.rollbacks += 1
        updates, batches = there
        recovery.batches_to_skip = max(0, self._rollback.skip_batches - (read - batches))
        count = f"{self.rollbacks} of at most {self._rollback.max_rollbacks}"
        _report_rollback(trainer, self._strategy, count, made - updates, read - batches)

    @override
    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        ahead = 0 if trainer is None else self._strategy.recovery.batches_to_skip
        counts = {"skipped": self.skipped, "rollbacks": self.rollbacks, "in_a_row": self._in_a_row}
        return {**counts, "to_pass_over": ahead, "history": self._history.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]
        self.rollbacks = state_dict["rollbacks"]
        self._in_a_row = state_dict["in_a_row"]
        self._skip_after_resume = state_dict["to_pass_over"]
        self._history.load_state_dict(state_dict["history"])

    @property
    def _running(self) -> pl.Trainer:
        assert self._trainer is not None
        return self._trainer

    @property
    def _strategy(self) -> MegatronServices:
        return services_of(self._running, self, _NEEDS)


def _describe(trainer: pl.Trainer, fault: BadNumber) -> str:
    """Step and detail of a fault."""
    return f"step {trainer.global_step}: {fault.detail}"


def _report_fault(
    trainer: pl.Trainer, services: MegatronServices, fault: BadNumber, action: str, note: str
) -> None:
    """Report a fault by an event on every rank and a block on stderr of rank 0.

    Args:
        trainer: Trainer of the run.
        services: its strategy.
        fault: the fault.
        action: response to it.
        note: result of a second run of the batch; empty without one.
    """
    services.events.write(
        "fault",
        what=fault.what,
        rank_of_fault=list(fault.ranks),
        section="backward",
        detail="; ".join(part for part in (fault.detail, note) if part),
        action=action,
    )
    if action == "skip":
        services.events.write("skip", batch=trainer.fit_loop.epoch_loop.batch_idx)
    if services.is_global_zero:
        lines = [_describe(trainer, fault), f"epoch {trainer.current_epoch}; action: {action}"]
        announce(f"bad numbers: {fault.what}", [*lines, note] if note else lines)


def _report_rollback(
    trainer: pl.Trainer, services: MegatronServices, count: str, updates: int, batches: int
) -> None:
    """Report a rollback.

    Args:
        trainer: Trainer of the run.
        services: its strategy, which knows the number of batches to skip.
        count: number of this rollback, as text.
        updates: updates that are undone.
        batches: batches read since the restored state.
    """
    ahead = services.recovery.batches_to_skip
    services.events.write(
        "rollback", updates_back=updates, batches_since=batches, batches_ahead=ahead
    )
    if services.is_global_zero:
        announce(
            f"rollback {count}",
            [
                f"step {trainer.global_step}: {updates} updates are undone",
                f"the {batches} batches since then and the next {ahead} are skipped",
            ],
        )
