"""Global gradient norm and clipping over every axis of a layout.

Gradients are local tensors: tp shards, ZeRO shards, whole copies. Each rank adds up the squares of
those that it *counts* (one holder counts a replicated gradient), one all-reduce makes the sum
global, and every rank scales its own gradients by the same coefficient. Nothing goes through
DTensor dispatch, and parameters on different meshes mix freely. Ranks check copies that they do not
count, too: a copy that is not finite, which only a fault of its rank can cause, makes the norm NaN
on all ranks. This check costs no time, as the other ranks are computing meanwhile.

*Rules whose threshold is not a constant.* A constant threshold that is right late in training is
wrong early on, when gradients are larger. Two rules depend on the history of the global norm, one
number a step that is equal on all ranks, so that all ranks decide alike:

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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch.devices import on_host
from lightning_megatron._torch.kernels import foreach_clamp_, foreach_mul_, foreach_norm
from lightning_megatron.errors import (
    at_least,
    below_one,
    holds,
    lists_of_names,
    raise_if_any,
    whole_numbers,
)

EPSILON = 1e-6
"""Number added to the norm before dividing, as ``torch.nn.utils.clip_grad_norm_`` does."""


def global_squares(
    parts: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Squares of the Euclidean norms of parts of the model's gradients, by one all-reduce.

    Args:
        parts: for each part, the local gradients that this rank counts, any of which may be empty,
            and those that another rank counts.
        device: device of the sums; gradients may be on others.
        group: ranks that hold parts of the model; None when this rank holds all of it.

    Returns:
        A vector in float64, whatever gradients this rank has: a norm rounded on some ranks only
        would scale copies of a gradient differently.
    """
    total = torch.zeros(len(parts), dtype=torch.float64, device=device)
    for index, (counted, copies) in enumerate(parts):
        for gradients, weight in ((counted, 1.0), (copies, 0.0)):
            full = [g for g in gradients if g.numel()]
            wide = all(g.dtype == torch.float64 for g in full)
            norms = foreach_norm(full, torch.float64 if wide else torch.float32)
            for same in _by_device(norms):
                squares = torch.stack(same).to(torch.float64).square()
                total[index] += weight * squares.sum().to(device)
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def finiteness(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Number that is finite only if all ``gradients`` are; costs less than half of a norm.

    The number may be infinite for gradients that are finite and huge.

    Args:
        gradients: gradients of this rank; any may be empty.
        device: device of the result; gradients may be on others.

    Returns:
        A scalar in float64.
    """
    full = [g for g in gradients if g.numel()]
    # A host adds faster than it squares; elsewhere the norms of many take one kernel.
    host = [g for g in full if on_host(g.device)]
    parts = [g.sum(dtype=torch.promote_types(g.dtype, torch.float32)) for g in host]
    parts += foreach_norm([g for g in full if not on_host(g.device)], torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for dtype in (torch.float32, torch.float64):
        for same in _by_device([part for part in parts if part.dtype == dtype]):
            total += torch.stack(same).sum().to(device)
    return total


def _by_device(scalars: Sequence[Tensor]) -> list[list[Tensor]]:
    """Scalars of each device: a sum of those of the host is sent to the device, not each."""
    found: dict[torch.device, list[Tensor]] = {}
    for scalar in scalars:
        found.setdefault(scalar.device, []).append(scalar)
    return list(found.values())


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that brings ``norm`` down to ``max_norm``; 1 when it is below."""
    return (max_norm / (norm + EPSILON)).clamp(max=1.0)


def scale_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all ``gradients`` in place by a scalar tensor."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), group in alike.items():
        foreach_mul_(group, factor.to(device, dtype))


def clip_value_(gradients: Sequence[Tensor], value: float) -> None:
    """Clamp all ``gradients`` in place to ``[-value, value]``."""
    foreach_clamp_(gradients, -value, value)


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
