"""Size of the global batch as a function of the samples that the run has consumed.

A step reads the next ``B`` samples of the order that `data.reading.sampler` describes, and that
order does not depend on ``B``: batches may have any size at any step, and the position stays one
number. So a schedule of batch sizes is a function of that number too, and not of steps or epochs:
it means the same under every layout, and a run that is resumed under another one goes on with the
sizes that it would have had. A size holds for the first batch that begins at or after its position.

Three kinds of schedules:

* a list of ``(consumed samples, size)``;
* `Rampup`, equal increments over a number of samples, as Megatron-LM's ``--rampup-batch-size``;
* `NoiseScale`, whose list is written while the run goes on. A decision that is made after a batch
  holds from ``delay`` batches later on, as loaders read ahead, how far depends on their workers,
  and a decision has to meet the same batch whatever that is.

Learning rates. Where gradients of samples are independent, ``k`` times the batch divides the
covariance of its gradient by ``k``. SGD keeps its noise per sample with ``k`` times the learning
rate (Goyal et al., arXiv 1706.02677: "linear"), and Adam, which divides by the gradient's root mean
square, with ``sqrt(k)`` times (Malladi et al., arXiv 2205.10287: "sqrt"). The factor is relative to
the first size, and multiplies whatever the schedulers of the run have set.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from lightning_megatron.errors import ConfigError, raise_if_any, whole_numbers

LearningRateRule = Literal["sqrt", "linear", "none"]
_POWERS = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}


@dataclass(frozen=True, kw_only=True)
class Rampup:
    """Batch sizes that grow by equal increments, each over equally many samples.

    Example:
        >>> Rampup(start=32, end=128, increment=32, samples=3000).steps()
        [(0, 32), (1000, 64), (2000, 96), (3000, 128)]
    """

    start: int
    """First size."""
    end: int
    """Last size."""
    increment: int
    """Difference from one size to the next."""
    samples: int
    """Samples that are consumed before the last size holds."""

    def problems(self) -> list[str]:
        """Everything that is wrong with the numbers."""
        problems = whole_numbers(
            1, start=self.start, end=self.end, increment=self.increment, samples=self.samples
        )
        if problems:
            return [f"Rampup: {problem}" for problem in problems]
        if self.end < self.start:
            return [
                f"Rampup(start={self.start}, end={self.end}): sizes grow; nearest valid: "
                f"end={self.start}"
            ]
        left = (self.end - self.start) % self.increment
        if left:
            return [
                f"Rampup(start={self.start}, end={self.end}, increment={self.increment}): no "
                f"number of increments leads from one to the other; nearest valid: "
                f"end={self.end - left} or end={self.end - left + self.increment}"
            ]
        return []

    def steps(self) -> list[tuple[int, int]]:
        """Consumed samples from which each size holds."""
        count = (self.end - self.start) // self.increment
        return [
            (self.samples * i // max(count, 1), self.start + i * self.increment)
            for i in range(count + 1)
        ]


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """Batch sizes that follow the gradient noise scale: doubled when that has grown past it.

    Every ``every`` steps, the estimate of `GradientNoiseScale` is compared with twice the size. If
    it is as large, the critical batch is no smaller than that, and batches of twice the size cost
    few samples in all. Sizes never shrink.
    """

    max: int
    """Largest size."""
    start: int | None = None
    """First size; None for the strategy's ``global_batch_size``."""
    every: int = 100
    """Optimizer steps from one decision to the next."""
    delay: int = 16
    """Steps from a decision to the first batch of the new size; more than loaders read ahead."""

    def problems(self) -> list[str]:
        """Everything that is wrong with the numbers."""
        given = {} if self.start is None else {"start": self.start}
        problems = whole_numbers(1, max=self.max, every=self.every, delay=self.delay, **given)
        if problems:
            return [f"NoiseScale: {problem}" for problem in problems]
        if self.every <= self.delay:
            problems.append(
                f"NoiseScale(every={self.every}, delay={self.delay}): a decision has to hold "
                f"before the next one is made; nearest valid: every={self.delay + 1}"
            )
        if self.start is not None and self.start > self.max:
            problems.append(
                f"NoiseScale(start={self.start}, max={self.max}): sizes grow; nearest valid: "
                f"max={self.start}"
            )
        return problems


Sizes = Sequence[tuple[int, int]] | Rampup | NoiseScale


class BatchSizes:
    """Size of the global batch at every position of a run.

    Args:
        sizes: the schedule.
        lr: how learning rates follow sizes.

    Attributes:
        steps: consumed samples and the size that holds from there on, in order.

    Raises:
        ConfigError: the schedule is not one.

    Example:
        >>> sizes = BatchSizes([(0, 128), (2000, 256)], lr="sqrt")
        >>> sizes.at(1999), sizes.at(2000), sizes.factor(512)
        (128, 256, 2.0)
    """

    def __init__(self, sizes: Sizes, lr: LearningRateRule = "none") -> None:
        problems = []
        if lr not in _POWERS:
            problems.append(
                f"BatchSchedule(lr={lr!r}): must be one of {', '.join(map(repr, _POWERS))}; "
                "nearest valid: lr='none'"
            )
        self.noise = sizes if isinstance(sizes, NoiseScale) else None
        self.steps: list[tuple[int, int]] = []
        if isinstance(sizes, Rampup | NoiseScale):
            problems += sizes.problems()
        else:
            problems += _step_problems(sizes)
        raise_if_any(problems)
        if isinstance(sizes, Rampup):
            self.steps = sizes.steps()
        elif isinstance(sizes, NoiseScale):
            self.begin()
        else:
            self.steps = [(int(start), int(size)) for start, size in sizes]
        self._power = _POWERS[lr]

    def begin(self, size: int | None = None) -> None:
        """Begin a run; ``size`` is the first one where the schedule does not tell."""
        if self.noise is not None:
            first = self.noise.start or size
            self.steps = [] if first is None else [(0, first)]

    @property
    def first(self) -> int:
        """Size of the first batch."""
        return self.steps[0][1]

    def at(self, consumed: int) -> int:
        """Size of the batch that begins after so many consumed samples."""
        return self.steps[bisect_right(self.steps, (consumed, float("inf"))) - 1][1]

    def all(self, first: int | None = None) -> list[int]:
        """All sizes that the schedule can come to; ``first`` where it does not tell."""
        if self.noise is None:
            return sorted({size for _, size in self.steps})
        start = self.noise.start or first
        if start is None:
            return []
        sizes = [start]
        while sizes[-1] * 2 <= self.noise.max:
            sizes.append(sizes[-1] * 2)
        return sizes

    def decide(self, noise_scale: float | None, consumed: int) -> int:
        """Size for the batches to come, by the noise scale; the present one where that is small."""
        assert self.noise is not None
        size = self.at(consumed)
        if noise_scale is None or size * 2 > min(self.noise.max, noise_scale):
            return size
        return size * 2

    def follow(self, size: int, consumed: int) -> None:
        """Have batches of ``size`` from ``delay`` batches of the present size later on."""
        assert self.noise is not None
        present = self.at(consumed)
        if size != present:
            self.steps.append((consumed + self.noise.delay * present, size))

    def factor(self, size: int) -> float:
        """Factor of the learning rates of a step of this size."""
        return float((size / self.first) ** self._power)

    @contextmanager
    def scaled(self, groups: Sequence[dict[str, Any]], size: int) -> Iterator[None]:
        """Within the block, learning rates are those of a step of this size.

        Schedulers see what they have set, before and after.

        Raises:
            ConfigError: somebody has set a rate within the block, which would lack the factor.
        """
        if not self._power:
            yield
            return
        factor = self.factor(size)
        kept = [group["lr"] for group in groups]
        scaled = [rate * factor for rate in kept]
        for group, rate in zip(groups, scaled, strict=True):
            group["lr"] = rate
        try:
            yield
            changed = [g["lr"] for g, rate in zip(groups, scaled, strict=True) if g["lr"] != rate]
        finally:
            for group, rate in zip(groups, kept, strict=True):
                group["lr"] = rate
        if changed:
            raise ConfigError(
                f"BatchSchedule(lr=...): a learning rate was set to {float(changed[0])} amid an "
                "optimizer step, and would not follow the size of the batch; nearest valid: a "
                "learning rate scheduler, or set it in on_train_batch_start"
            )

    def state_dict(self) -> dict[str, Any]:
        """What was decided so far."""
        return {"steps": [list(step) for step in self.steps] if self.noise is not None else []}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was decided; nothing where the schedule is known from the start."""
        if self.noise is not None and state["steps"]:
            self.steps = [(int(start), int(size)) for start, size in state["steps"]]


def _step_problems(sizes: Any) -> list[str]:
    example = "nearest valid: [(0, 128), (2000, 256)]"
    try:
        steps = [(start, size) for start, size in sizes]
    except (TypeError, ValueError):
        return [
            f"BatchSchedule({sizes!r}): must be a list of (consumed samples, batch size), a Rampup "
            f"or a NoiseScale; {example}"
        ]
    problems = [
        f"BatchSchedule({sizes!r}): {problem}"
        for start, size in steps
        for problem in (*whole_numbers(0, start=start), *whole_numbers(1, size=size))
    ]
    if problems:
        return problems
    starts = [start for start, _ in steps]
    if not steps or starts[0] != 0 or starts != sorted(set(starts)):
        return [f"BatchSchedule({sizes!r}): positions begin with 0 and increase; {example}"]
    return []
