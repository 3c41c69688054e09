"""Steps that can be left out, taken again, or whose batches are skipped.

Whether an update is sound is known when its gradients are there, and must be decided before the
optimizer touches the weights. So the closure that Lightning hands to the optimizer (forward and
backward of the batch) is followed by `accept_step`, which a callback may set: it sees losses and
gradients, and may have the batch run once more. If it says no, the precision plugin leaves the step
out, on all ranks alike, with the schedules of the learning rate standing still.

What a batch changes besides gradients is noted before it begins, and put back before it runs again
and when it is left out: random streams, running statistics of batch norms, histories of FP8 scales,
counts of routers, and the means over the epoch of what is logged, of which one NaN would make NaN.
A run from which a batch was left out is then, to the bit, one that never saw it. (What
``torchmetrics`` objects of the module have gathered stays.)

A batch that is *skipped* is read, and counts for the position in the data and the Trainer's
progress, but nothing is computed. Its loss is zero, and no callback is asked about its gradients.

*Copies of the training state*, and the way back to them (`Rollback`). Two copies of this rank's
share of the trainable weights, the buffers and the optimizer state are kept, the older of which is
overwritten every ``every`` updates: one is then always at least so old, unless the run is younger
itself, and at most twice as old. A copy costs the reading of what is copied, and is made on the
device's own queue: what follows waits there, not on the host.

With them go, as they were after the update, the learning rate schedules that count steps with the
values that they set in the optimizer, the loss scale, and the random streams. So a run that goes
back and reads on draws what a run would have drawn that had gone from there to these batches. What
callbacks and schedules by epoch keep is left alone, and so is the Trainer's count of steps, which
counts steps left out as well.

Where layers move between stages (``partition="measured"``), or parameters begin or cease to be
trained, older copies are useless, and are dropped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from lightning_megatron._lightning.results import initial_states, training_sums
from lightning_megatron._torch.devices import pins
from lightning_megatron.checkpoint.chunks import local_tensor
from lightning_megatron.layers.experts.router import RouterStatistics
from lightning_megatron.optim.held_tensors import states_in
from lightning_megatron.strategy.rng_state import RngSnapshot
from lightning_megatron.strategy.run import Run
from lightning_megatron.whole.memory import own_weights, parts_of_weights

AcceptStep = Callable[[], bool]
"""Whether the update may be made whose gradients are there; the same answer on all ranks."""


class StepRecovery:
    """Asks whether each step is accepted, and does what follows.

    Args:
        run: whose steps these are.

    Attributes:
        accept_step: asked before every update; None for none.
        can_undo: whether what a batch changes is noted, so that it can be put back.
        batches_to_skip: batches that are still to be skipped.
        skips_batch: whether the present batch is.
        rollback: copies of the state to go back to; None where nobody wants any.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.accept_step: AcceptStep | None = None
        self.can_undo = False
        self.batches_to_skip = 0
        self.skips_batch = False
        self.rollback: Rollback | None = None
        self._schedules = HeldSchedules()
        self._before: _Before | None = None
        self._closure: Callable[[], Any] | None = None
        self._tracked: tuple[Any, list[Tensor]] = None, []

    def begin_batch(self, *, first_of_accumulation: bool) -> None:
        """Find out whether the batch is skipped, and note what it is about to change."""
        if first_of_accumulation:
            # Of batches whose gradients are added up, all or none.
            self.skips_batch = self.batches_to_skip > 0
            if self.can_undo:
                self._before = self._noted()
        if self.skips_batch:
            self.batches_to_skip = max(0, self.batches_to_skip - 1)

    def zero_loss(self) -> Tensor:
        """The loss of a batch that is skipped."""
        return torch.zeros((), device=self._run.root_device)

    def begin_update(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure that the optimizer is to call in place of Lightning's."""
        self._schedules.release()
        if self.skips_batch:
            self._run.precision.skip_step()
        elif self.accept_step is not None:
            return self._asking(closure)
        return closure

    def end_update(self) -> bool:
        """Whether the step was taken; where it was not, learning rate schedules stand still."""
        run = self._run
        if run.precision.skipped:
            self._schedules.hold(run.lr_scheduler_configs, run.trainer)
            return False
        if self.rollback is not None:
            self.rollback.updates += 1
        return True

    def keep_states(self, every: int | None) -> None:
        """Keep copies of the state from now on, one of which is ``every`` updates old; or none."""
        self.rollback = None if every is None else Rollback(self._run, every)

    def run_again(self) -> None:
        """Run the batch again of which `accept_step` is asked, as if it were new; collective."""
        assert self._closure is not None
        self.undo_batch()
        self._closure()

    def undo_batch(self) -> None:
        """Undo what the present batch has changed, but for its gradients."""
        assert self._before is not None
        self._return_to(self._before)

    def note(self) -> Callable[[], None]:
        """Note what a batch may change besides gradients; the function returned puts it back."""
        return partial(self._return_to, self._noted())

    def _noted(self) -> "_Before":
        moment, results = self._run.random_state.now(), self._results()
        counted = self._run.steps.router_bias.counted()
        return _Before(moment, self._statistics(), results, counted)

    def _return_to(self, before: "_Before") -> None:
        self._run.random_state.return_to(before.moment)
        with torch.no_grad():
            for held, value in zip(self._statistics_now(), before.statistics, strict=True):
                held.copy_(value)
        for key, sums in self._results().items():
            metric = self._collection()[key]
            for name, value in sums.items():
                begun = torch.full_like(value, float(initial_states(metric)[name]))
                setattr(metric, name, before.results.get(key, {}).get(name, begun))
        self._run.precision.forget_batch()
        self._run.steps.router_bias.return_to(before.counted)

    def _collection(self) -> Any:
        """Sums of what is logged in training, as Lightning keeps them."""
        return training_sums(self._run.trainer)

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
                    self._run.precision.skip_step()
            finally:
                self._closure = None
            return result

        return asking

    def _statistics(self) -> list[Tensor]:
        return [value.detach().clone() for value in self._statistics_now()]

    @own_weights
    def _statistics_now(self) -> list[Tensor]:
        """Buffers that batch norms and the like update in every forward."""
        if self._tracked[0] is not self._run.parallel:
            found = [
                value
                for child in self._run.module.modules()
                if getattr(child, "track_running_stats", False)
                for value in child.buffers(recurse=False)
            ]
            self._tracked = self._run.parallel, found
        return self._tracked[1]


class _Before:
    """State before a batch.

    Args:
        moment: of the generators.
        statistics: of batch norms.
        results: sums of what is logged.
        counted: what routers have counted.
    """

    def __init__(
        self,
        moment: RngSnapshot,
        statistics: list[Tensor],
        results: dict[str, dict[str, Tensor]],
        counted: list[tuple[Tensor | None, RouterStatistics]],
    ) -> None:
        self.counted = counted
        self.moment = moment
        self.statistics = statistics
        self.results = results


class HeldSchedules:
    """Learning rate schedules that stay where they are when an optimizer step was skipped.

    Lightning advances the schedules after every batch that was to end in an optimizer step, and
    does not ask whether there was one. Warmup and decay would then run ahead of the training by as
    many steps as the loss scale takes to settle, a dozen at the start of every float16 run.
    """

    def __init__(self) -> None:
        self._held: list[Any] = []

    def hold(self, configs: Sequence[LRSchedulerConfig], trainer: Trainer) -> None:
        """Hold what Lightning is about to advance: schedules by step that are due now.

        Those that follow a metric are no count of steps, and go on.
        """
        if not trainer.lightning_module.automatic_optimization:
            return  # the user steps the schedulers
        batches = trainer.fit_loop.epoch_loop.batch_idx + 1
        for config in configs:
            if counts_steps(config) and batches % config.frequency == 0:
                self._hold(config.scheduler)

    def release(self) -> None:
        """Let go of what has not been advanced (a module may override ``lr_scheduler_step``)."""
        for scheduler in self._held:
            scheduler.__dict__.pop("step", None)
        self._held.clear()

    def _hold(self, scheduler: Any) -> None:
        # On the instance, for this one call: before the next checkpoint it is as it was.
        def step(*args: Any, **kwargs: Any) -> None:
            del scheduler.__dict__["step"]

        scheduler.__dict__["step"] = step
        self._held.append(scheduler)


@dataclass
class _Copy:
    """The state after an update."""

    updates: int
    batches: int
    of: Any
    """Identity of the layout; a copy is of use only for the same one."""
    moment: RngSnapshot
    precision: dict[str, Any]
    schedules: list[dict[str, Any] | None]
    options: list[list[dict[str, Any]]]
    """Options of the parameter groups of each optimizer."""
    others: list[dict[Tensor, dict[str, Any]]]
    """Values in each state that are no tensors, by parameter."""
    tensors: dict[Any, Tensor] = field(default_factory=dict)


@parts_of_weights
class Rollback:
    """Copies of the state of a run, and the way back to them.

    Args:
        run: whose state is kept.
        every: updates between two copies, and least age of the one to go back to.

    Attributes:
        updates: made by the weights as they are now, since this was created.
    """

    def __init__(self, run: Run, every: int) -> None:
        self._run = run
        self._every = every
        self._copies: list[_Copy] = []
        self._spare: dict[Any, Tensor] = {}
        self.updates = 0

    def note(self, batches: int) -> None:
        """Copy the state, if it is time to.

        Args:
            batches: read so far; none of them half used.
        """
        of = self._identity()
        self._copies = [copy for copy in self._copies if copy.of == of]
        if self._copies and self.updates - self._copies[-1].updates < self._every:
            return
        if len(self._copies) == 2:
            self._spare = self._copies.pop(0).tensors
        self._copies.append(self._take(batches, of))

    def go_back(self) -> tuple[int, int] | None:
        """Return to the newest copy that is old enough, else to the oldest.

        Returns:
            Updates and batches as they were; None where there is no copy to return to.
        """
        of = self._identity()
        fitting = [copy for copy in self._copies if copy.of == of]
        if not fitting:
            return None
        old = [copy for copy in fitting if self.updates - copy.updates >= self._every]
        chosen = old[-1] if old else fitting[0]
        self._copies = fitting[: fitting.index(chosen) + 1]
        self._restore(chosen)
        self.updates = chosen.updates
        return chosen.updates, chosen.batches

    def _take(self, batches: int, of: Any) -> _Copy:
        run = self._run
        run.parallel.data.come_to_rest()
        copy = _Copy(
            updates=self.updates,
            batches=batches,
            of=of,
            moment=run.random_state.now(),
            precision=deepcopy(run.precision.state_dict()),
            schedules=[
                deepcopy(config.scheduler.state_dict()) if counts_steps(config) else None
                for config in run.lr_scheduler_configs
            ],
            options=[
                [
                    deepcopy({key: v for key, v in group.items() if key != "params"})
                    for group in optimizer.param_groups
                ]
                for optimizer in run.optimizers
            ],
            others=[
                {
                    p: {k: deepcopy(v) for k, v in values.items() if not isinstance(v, Tensor)}
                    for p, values in state.items()
                }
                for state in self._states()
            ],
        )
        spare, self._spare = self._spare, {}
        for key, tensor in self._tensors():
            buffer = spare.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=pins(tensor.device)
                )
            copy.tensors[key] = buffer.copy_(tensor, non_blocking=True)
        return copy

    def _restore(self, copy: _Copy) -> None:
        run = self._run
        run.parallel.data.come_to_rest()
        for state, others in zip(self._states(), copy.others, strict=True):
            for parameter in list(state):
                if parameter in others:
                    state[parameter].update(deepcopy(others[parameter]))
                else:  # it had not been stepped on yet
                    del state[parameter]
        with torch.no_grad():
            for key, tensor in self._tensors():
                tensor.copy_(copy.tensors[key])
        self._restore_schedules(copy)
        precision = run.precision
        precision.forget_weights()
        run.parallel.data.gather_all()
        counts = {k: v for k, v in precision.state_dict().items() if k in _COUNTS}
        precision.load_state_dict({**copy.precision, **counts})
        precision.forget_batch()
        run.random_state.return_to(copy.moment)

    def _restore_schedules(self, copy: _Copy) -> None:
        """Restore schedules that count steps, with what they have set in the optimizers."""
        configs = self._run.lr_scheduler_configs
        moved = []
        for config, state in zip(configs, copy.schedules, strict=True):
            if state is not None:
                config.scheduler.load_state_dict(deepcopy(state))
                moved.append(getattr(config.scheduler, "optimizer", None))
        for optimizer, options in zip(self._run.optimizers, copy.options, strict=True):
            if any(optimizer is other for other in moved):
                for group, values in zip(optimizer.param_groups, options, strict=True):
                    group.update(deepcopy(values))

    def _identity(self) -> Any:
        trained = [id(p) for p in self._run.module.parameters() if p.requires_grad]
        return id(self._run.parallel), trained

    def _states(self) -> list[Any]:
        """State of each optimizer and of those inside it."""
        found = (states_in(optimizer).values() for optimizer in self._run.optimizers)
        return [state for of_one in found for state in of_one]

    def _tensors(self) -> Iterator[tuple[Any, Tensor]]:
        """All that is copied, by keys that stay: what this rank holds of it."""
        module = self._run.module
        for role in self._run.parallel.gradients.roles:
            if role.parameter.requires_grad:
                yield role.name, role.values
        yield from ((name, local_tensor(buffer)) for name, buffer in module.named_buffers())
        for index, state in enumerate(self._states()):
            for parameter, values in state.items():
                for key, value in _tensors_of(values):
                    yield (index, parameter, key), local_tensor(value)


_COUNTS = ("left_out", "skipped_steps")
"""Entries of the precision plugins' state that count what has happened, and never go back."""


def _tensors_of(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((key, value) for key, value in values.items() if isinstance(value, Tensor))


def counts_steps(config: LRSchedulerConfig) -> bool:
    """Whether a schedule follows the number of optimizer steps."""
    return config.interval == "step" and not config.reduce_on_plateau
