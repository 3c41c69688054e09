"""Rules of gradient clipping whose threshold is not a constant.

A constant threshold that is right late in training is wrong early on, when gradients are larger.
Two rules depend on the history of the global norm, one number a step that is equal on all ranks, so
that all ranks decide alike:

* `PercentileClip` (AutoClip: Seetharaman et al., arXiv 2007.14469) clips to a percentile of the
  norms so far;
* `ZScoreClip` (ZClip: Kumar et al., arXiv 2504.02507) leaves norms near a running mean alone and
  brings outliers down towards the mean.

`UnitClip` (adaptive gradient clipping: Brock et al., arXiv 2102.06171) treats each output unit by
itself: the norm of a row's gradient may be at most a share of the row's own norm. Norms run over
whole rows, however they are sharded.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from lightning_megatron.errors import (
    at_least,
    below_one,
    holds,
    lists_of_names,
    raise_if_any,
    whole_numbers,
)


class PercentileClip:
    """Rule that clips to a percentile of the latest norms.

    Args:
        percentile: share of the norms, in percent, that would not have been clipped.
        window: number of norms that are remembered.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> rule = PercentileClip(50, window=4)
        >>> [rule.limit(norm) for norm in (1.0, 3.0, 2.0)]
        [1.0, 2.0, 2.0]
    """

    def __init__(self, percentile: float = 10.0, window: int = 1000) -> None:
        problems = whole_numbers(1, window=window)
        if not holds(lambda percentile: 0.0 <= percentile <= 100.0, percentile):
            above = holds(lambda percentile: percentile > 100.0, percentile)
            problems.append(
                f"percentile={percentile!r}: must lie in [0, 100]; "
                f"nearest valid: percentile={100.0 if above else 0.0}"
            )
        raise_if_any(problems)
        self._percentile = percentile
        self._norms: deque[float] = deque(maxlen=window)

    def limit(self, norm: float) -> float:
        """Largest norm that is not clipped, given the latest ``norm`` (finite)."""
        self._norms.append(norm)
        ordered = sorted(self._norms)
        place = (len(ordered) - 1) * self._percentile / 100
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    def state_dict(self) -> dict[str, Any]:
        """Norms that are remembered."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._norms.clear()
        self._norms.extend(state["norms"])


class ZScoreClip:
    """Rule that clips norms which lie far above their running mean.

    A norm with the score ``z > limit`` is clipped to ``mean + deviation * limit**2 / z``: the
    higher its score, the closer to the mean. The clipped norm enters the statistics.

    Args:
        z: highest score of a norm that is not clipped.
        beta: decay rate of the running mean and variance.
        warmup: number of first steps that only feed the statistics.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(self, z: float = 2.5, beta: float = 0.97, warmup: int = 25) -> None:
        raise_if_any(at_least(0.0, z=z) + below_one(beta=beta) + whole_numbers(1, warmup=warmup))
        self._z = z
        self._beta = beta
        self._warmup = warmup
        self._count = 0
        self._mean = 0.0
        self._variance = 0.0

    def limit(self, norm: float) -> float:
        """Largest norm that is not clipped, given the latest ``norm`` (finite)."""
        if self._count < self._warmup:  # the plain mean and variance
            self._count += 1
            step = norm - self._mean
            self._mean += step / self._count
            self._variance += (step * (norm - self._mean) - self._variance) / self._count
            return math.inf
        deviation = math.sqrt(self._variance)
        excess = norm - self._mean
        clipped = norm
        if deviation and excess > self._z * deviation:
            clipped = self._mean + self._z**2 * deviation**2 / excess
        elif excess > 0 and not deviation:
            clipped = self._mean
        self._variance = (
            self._beta * self._variance + (1 - self._beta) * (clipped - self._mean) ** 2
        )
        self._mean = self._beta * self._mean + (1 - self._beta) * clipped
        return clipped if clipped < norm else math.inf

    def state_dict(self) -> dict[str, Any]:
        """Mean, variance and count."""
        return {"count": self._count, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._count = int(state["count"])
        self._mean = float(state["mean"])
        self._variance = float(state["variance"])


@dataclass(frozen=True, kw_only=True)
class UnitClip:
    """Rule that clips the gradient of every output unit to a share of the unit's own norm."""

    ratio: float = 0.01
    """Largest norm of a gradient, as a share of the norm of the weights."""
    eps: float = 1e-3
    """Lower bound of the norm of the weights, so that units which start at zero can learn."""
    exclude: tuple[str, ...] = ("*head*",)
    """Patterns of names of parameters that are not clipped; in the paper the last layer."""

    def __post_init__(self) -> None:
        """Check the values."""
        problems = [
            f"{name}={value!r}: must be a number above 0; nearest valid: {name}={nearest}"
            for name, value, nearest in (("ratio", self.ratio, 0.01), ("eps", self.eps, 1e-3))
            if not holds(lambda value: value > 0, value)
        ]
        raise_if_any(problems + lists_of_names(exclude=self.exclude))
