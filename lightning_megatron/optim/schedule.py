"""Learning-rate schedules as small objects, whose state is a handful of numbers.

``LambdaLR`` saves a function object of its own as nothing and a callable object as its
``__dict__``; the latter can be written as JSON and read under any layout.
"""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_megatron.errors import raise_if_any


class WarmupCosine:
    """Factor of the peak learning rate: a linear rise, then half a cosine (arXiv 1608.03983).

    Step 0 already learns (``1 / warmup_steps`` of the peak); the peak is reached at step
    ``warmup_steps`` and ``min_lr_ratio`` at ``total_steps``, where it stays.

    Args:
        warmup_steps: steps of the rise; 0 starts at the peak.
        total_steps: steps of rise and fall together.
        min_lr_ratio: the end of the fall, as a part of the peak.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> [round(WarmupCosine(2, 6)(step), 2) for step in (0, 1, 2, 4, 6, 9)]
        [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    def __init__(self, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0) -> None:
        raise_if_any(_problems(warmup_steps, total_steps, min_lr_ratio))
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.min_lr_ratio = min_lr_ratio

    def __call__(self, step: int) -> float:
        """Factor at ``step``, the number of optimizer steps taken."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        falling = max(self.total_steps - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / falling, 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine


def warmup_cosine(
    optimizer: Optimizer, *, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.0
) -> LambdaLR:
    """Scheduler that multiplies the learning rate of every group by `WarmupCosine`.

    Args:
        optimizer: its groups' learning rates are the peaks.
        warmup_steps: steps of linear rise.
        total_steps: steps of rise and fall together.
        min_lr_ratio: the end of the fall, as a part of the peak.

    Raises:
        ConfigError: a number is out of range.
    """
    return LambdaLR(optimizer, WarmupCosine(warmup_steps, total_steps, min_lr_ratio))


def _problems(warmup_steps: int, total_steps: int, min_lr_ratio: float) -> list[str]:
    problems = []
    if warmup_steps < 0:
        problems.append(
            f"warmup_steps={warmup_steps}: must not be negative; nearest valid: warmup_steps=0"
        )
    if total_steps < 1:
        problems.append(f"total_steps={total_steps}: must be at least 1; nearest: total_steps=1")
    if not 0.0 <= min_lr_ratio <= 1.0:
        nearest = min(max(min_lr_ratio, 0.0), 1.0)
        problems.append(
            f"min_lr_ratio={min_lr_ratio}: must lie in [0, 1]; nearest valid: {nearest}"
        )
    return problems
