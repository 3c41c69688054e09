"""Loss scaling for float16, agreed over the whole layout.

float16 has no values below 6e-8, and gradients that small are common. So the loss is multiplied by
a *scale* before backward and the gradients are divided by it before anybody looks at them
(Micikevicius et al., arXiv 1710.03740). The scale adapts: a step in which any gradient overflowed
is *skipped* and halves the scale, 2000 good steps in a row double it. Gradients that are not finite
for another reason (a NaN in the data, weights that diverged) stay so at any scale; halving it for
ever would be a run that continues and never learns again. Below a smallest scale the run ends with
an error.

All ranks must agree whether a gradient overflowed. ``torch.amp.GradScaler`` looks at the gradients
of this process, and agrees over the mesh of each DTensor at most: ranks of other tp shards and
pipeline stages would step where one rank skips, and their weights and scales would differ from then
on. Here one maximum over all processes decides.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch.kernels import unscale_
from lightning_megatron.errors import holds, raise_if_any, whole_numbers

SMALLEST = 2.0**-16
"""Default of the smallest scale, at which overflows have another cause than the scale."""


class LossScale:
    """Loss scale that adapts to the gradients; defaults are those of ``GradScaler``.

    Args:
        initial: scale of the first step.
        growth_factor: factor of the scale after ``growth_interval`` good steps.
        backoff_factor: factor of the scale after a skipped step.
        growth_interval: number of good steps in a row before the scale grows.
        smallest: lowest scale, at which overflows have another cause than the scale.

    Attributes:
        value: current scale.
        skipped: number of skipped steps so far.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        initial: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval: int,
        smallest: float = SMALLEST,
    ) -> None:
        problems = [
            f"{name}={given!r}: must be a finite number {rule}; nearest valid: {name}={nearest}"
            for name, given, low, high, rule, nearest in (
                ("initial_scale", initial, 0, math.inf, "above 0", 65536.0),
                ("growth_factor", growth_factor, 1, math.inf, "above 1", 2.0),
                ("backoff_factor", backoff_factor, 0, 1, "in (0, 1)", 0.5),
                ("min_scale", smallest, 0, math.inf, "above 0", SMALLEST),
            )
            if not holds(lambda given, low=low, high=high: low < given < high, given)  # type: ignore[misc]
        ]
        problems += whole_numbers(1, growth_interval=growth_interval)
        if not problems and smallest > initial:
            problems.append(
                f"min_scale={smallest!r}, initial_scale={initial!r}: the scale begins below its "
                f"lowest value; nearest valid: min_scale={initial!r}"
            )
        raise_if_any(problems)
        self.value = float(initial)
        self._smallest = float(smallest)
        self.skipped = 0
        self._growth = growth_factor
        self._backoff = backoff_factor
        self._interval = growth_interval
        self._good = 0

    def unscale(self, gradients: Sequence[Tensor], device: torch.device) -> bool:
        """Divide local gradients by the scale, in place; collective over all processes.

        Args:
            gradients: gradients of this rank, none of them twice.
            device: device of this process.

        Returns:
            Whether the gradients of all ranks are finite: the same on every rank.
        """
        found = torch.zeros((), dtype=torch.float32, device=device)
        inverse = torch.full((), 1.0 / self.value, dtype=torch.float32, device=device)
        unscale_(gradients, found, inverse)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return not found.item()

    def update(self, *, finite: bool) -> None:
        """Adapt the scale to the outcome of a step.

        Raises:
            FloatingPointError: the gradients are not finite at the smallest scale.
        """
        if not finite:
            self.skipped += 1
            self._good = 0
            if self.value * self._backoff < self._smallest:
                raise FloatingPointError(
                    f"the gradients are not finite even at a loss scale of {self.value:g}, after "
                    f"{self.skipped} skipped steps in all, so it is not the scale that makes them "
                    "overflow: the loss, the weights or the data hold NaN or infinity. NumberGuard "
                    "tells which parameter or batch, and can leave it out; a lower learning rate "
                    f"or clipping helps a run that diverges (min_scale={self._smallest:g})"
                )
            self.value *= self._backoff
            return
        self._good += 1
        if self._good == self._interval:
            self.value *= self._growth
            self._good = 0

    def state_dict(self) -> dict[str, Any]:
        """Scale and counts of steps, for a checkpoint."""
        return {"scale": self.value, "good_steps": self._good, "skipped_steps": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.value = float(state["scale"])
        self._good = int(state["good_steps"])
        self.skipped = int(state["skipped_steps"])
