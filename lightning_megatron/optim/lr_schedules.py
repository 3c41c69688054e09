"""Rules for ``torch.optim.lr_scheduler.LambdaLR``, whose numbers are those of the present run.

A checkpoint keeps how far a schedule is and the peak. A run that goes on with another
``total_steps`` (``--trainer.max_steps``) therefore follows the rule that it was given, from the
step at which the other one stopped. `SequentialLR` of `LinearLR` and `CosineAnnealingLR` would
follow the old end: their state holds it, and loading puts it in place of the new one.
"""

import math
from abc import ABC, abstractmethod

from typing_extensions import override

from lightning_megatron.errors import at_least, raise_if_any


class _Rule(ABC):
    """Base of the rules: a linear rise, then what a subclass says.

    The rules keep their numbers in slots. ``LambdaLR`` saves the ``__dict__`` of a callable object,
    and puts it into that of a resumed run: the learning rate would follow the end of the earlier
    run.
    """

    warmup_steps: int

    def __call__(self, step: int) -> float:
        """Factor at ``step``, the number of optimizer steps taken."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self._after_warmup(step)

    @abstractmethod
    def _after_warmup(self, step: int) -> float:
        """Factor at a step from ``warmup_steps`` on."""


class WarmupCosine(_Rule):
    """Factor of the peak learning rate: a linear rise, then half a cosine (arXiv 1608.03983).

    Step 0 already learns (``1 / warmup_steps`` of the peak); the peak is reached at step
    ``warmup_steps`` and ``min_lr_ratio`` at ``total_steps``, where it stays.

    Args:
        warmup_steps: number of steps of the rise; 0 starts at the peak.
        total_steps: number of steps of rise and fall together.
        min_lr_ratio: learning rate at the end of the fall, as a share of the peak.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> [round(WarmupCosine(2, 6)(step), 2) for step in (0, 1, 2, 4, 6, 9)]
        [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    __slots__ = ("min_lr_ratio", "total_steps", "warmup_steps")

    def __init__(self, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0) -> None:
        raise_if_any(_problems(warmup_steps, total_steps, min_lr_ratio))
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.min_lr_ratio = min_lr_ratio

    @override
    def _after_warmup(self, step: int) -> float:
        falling = max(self.total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / falling, 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine


class WarmupStableDecay(_Rule):
    """Factor of the peak: a linear rise, a plateau, a fall (arXiv 2404.06395, 2405.18392).

    A run can resume from the plateau with another ``total_steps``. A fall over the last tenth or
    fifth of the steps reaches the loss that a cosine reaches over the whole run.

    Args:
        warmup_steps: number of steps of the rise; 0 starts at the peak.
        decay_steps: number of steps of the fall.
        total_steps: number of all steps.
        min_lr_ratio: learning rate at the end of the fall, as a share of the peak.
        shape: shape of the fall: ``"linear"``, or ``"sqrt"`` for ``1 - sqrt(progress)``, which
            falls faster at first.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> rule = WarmupStableDecay(2, 2, 8)
        >>> [rule(step) for step in (0, 1, 2, 6, 7, 8, 9)]
        [0.5, 1.0, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    __slots__ = ("decay_steps", "min_lr_ratio", "shape", "total_steps", "warmup_steps")

    def __init__(
        self,
        warmup_steps: int,
        decay_steps: int,
        total_steps: int,
        min_lr_ratio: float = 0.0,
        shape: str = "linear",
    ) -> None:
        problems = _problems(warmup_steps, total_steps, min_lr_ratio)
        if not 0 <= decay_steps <= max(total_steps - warmup_steps, 0):
            problems.append(
                f"warmup_steps={warmup_steps}, decay_steps={decay_steps}, total_steps="
                f"{total_steps}: warmup and decay must fit into it; nearest valid: decay_steps="
                f"{max(min(decay_steps, total_steps - warmup_steps), 0)}"
            )
        if shape not in ("linear", "sqrt"):
            problems.append(f"shape={shape!r}: must be 'linear' or 'sqrt'; nearest valid: 'linear'")
        raise_if_any(problems)
        self.warmup_steps = warmup_steps
        self.decay_steps = decay_steps
        self.total_steps = total_steps
        self.min_lr_ratio = min_lr_ratio
        self.shape = shape

    @override
    def _after_warmup(self, step: int) -> float:
        left = self.total_steps - step
        if left >= self.decay_steps and left > 0:
            return 1.0
        progress = min(1.0 - left / self.decay_steps, 1.0) if self.decay_steps else 1.0
        fallen = math.sqrt(progress) if self.shape == "sqrt" else progress
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 - fallen)


class WarmupInverseSqrt(_Rule):
    """Factor of the peak: a linear rise, then ``sqrt(warmup_steps / step)`` (arXiv 1706.03762).

    The schedule has no end: it is for runs whose length is not known.

    Args:
        warmup_steps: number of steps of the rise, and scale of the fall; at least 1.

    Raises:
        ConfigError: ``warmup_steps`` is below 1.

    Example:
        >>> [WarmupInverseSqrt(4)(step) for step in (0, 3, 4, 16)]
        [0.25, 1.0, 1.0, 0.5]
    """

    __slots__ = ("warmup_steps",)

    def __init__(self, warmup_steps: int) -> None:
        raise_if_any(at_least(1, warmup_steps=warmup_steps))
        self.warmup_steps = warmup_steps

    @override
    def _after_warmup(self, step: int) -> float:
        return math.sqrt(self.warmup_steps / step)


def _problems(warmup_steps: int, total_steps: int, min_lr_ratio: float) -> list[str]:
    problems = []
    if warmup_steps < 0:
        problems.append(
            f"warmup_steps={warmup_steps}: must not be negative; nearest valid: warmup_steps=0"
        )
    if total_steps < 1:
        problems.append(
            f"total_steps={total_steps}: must be at least 1; nearest valid: total_steps=1"
        )
    if not 0.0 <= min_lr_ratio <= 1.0:
        nearest = min(max(min_lr_ratio, 0.0), 1.0)
        problems.append(
            f"min_lr_ratio={min_lr_ratio}: must lie in [0, 1]; nearest valid: "
            f"min_lr_ratio={nearest}"
        )
    return problems
