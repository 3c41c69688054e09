"""Copies of the training state in host memory, and the way back to them.

Two copies of this rank's share of the trainable weights, the buffers and the optimizer state are
kept, the older of which is overwritten every ``every`` updates: one is then always at least so old,
unless the run is younger itself, and at most twice as old. A copy costs the reading of what is
copied, and is made on the device's own queue: what follows waits there, not on the host.

With them go, as they were after the update, the learning rate schedules that count steps with the
values that they set in the optimizer, the loss scale, and the random streams. So a run that goes
back and reads on draws what a run would have drawn that had gone from there to these batches. What
callbacks and schedules by epoch keep is left alone, and so is the Trainer's count of steps, which
counts steps left out as well.

Where layers move between stages (``partition="measured"``), or parameters begin or cease to be
trained, older copies are useless, and are dropped.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor

from lightning_megatron.checkpoint.chunks import local_tensor
from lightning_megatron.strategy.rng_state import RngSnapshot
from lightning_megatron.strategy.run import Run
from lightning_megatron.whole.memory import parts_of_weights


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
    """Values in the state of each optimizer that are no tensors, by parameter."""
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
                    for p, values in optimizer.state.items()
                }
                for optimizer in run.optimizers
            ],
        )
        spare, self._spare = self._spare, {}
        for key, tensor in self._tensors():
            buffer = spare.get(key)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copy.tensors[key] = buffer.copy_(tensor, non_blocking=True)
        return copy

    def _restore(self, copy: _Copy) -> None:
        run = self._run
        run.parallel.data.come_to_rest()
        for optimizer, others in zip(run.optimizers, copy.others, strict=True):
            for parameter in list(optimizer.state):
                if parameter in others:
                    optimizer.state[parameter].update(deepcopy(others[parameter]))
                else:  # it had not been stepped on yet
                    del optimizer.state[parameter]
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

    def _tensors(self) -> Iterator[tuple[Any, Tensor]]:
        """All that is copied, by keys that stay: what this rank holds of it."""
        module = self._run.module
        for role in self._run.parallel.gradients.roles:
            if role.parameter.requires_grad:
                yield role.name, role.values
        yield from ((name, local_tensor(buffer)) for name, buffer in module.named_buffers())
        for index, optimizer in enumerate(self._run.optimizers):
            for parameter, values in optimizer.state.items():
                for key, value in _tensors_of(values):
                    yield (index, parameter, key), local_tensor(value)


_COUNTS = ("left_out", "skipped_steps")
"""Entries of the precision plugins' state that count what has happened, and never go back."""


def _tensors_of(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((key, value) for key, value in values.items() if isinstance(value, Tensor))


def counts_steps(config: LRSchedulerConfig) -> bool:
    """Whether a schedule follows the number of optimizer steps."""
    return config.interval == "step" and not config.reduce_on_plateau
