"""When a loss is out of the ordinary.

The losses of the last steps have a middle and a width, and a loss is a *spike* if it lies many
widths above the middle. Mean and standard deviation would do for a curve without spikes; a single
one moves both so far that the next goes unnoticed. So the middle is the median ``m``, and the width
is the median distance from it (MAD), times 1.4826 to be the standard deviation of normal noise:

    limit = m + deviations * max(1.4826 * MAD, floor * |m|)

Up to half of the history may be spikes before that breaks down (Hampel, 1974). The floor is for
curves that hardly scatter, where ten widths are nothing. Losses that fall pull the median up behind
them, and widen the MAD, which makes the rule patient while a run is young.

A spike does not enter the history, nor does what is no number. Where ``patience`` of them come one
after the other it is the curve that has changed, not the steps: the history begins anew.
"""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from statistics import median
from typing import Any

NORMAL = 1.4826
"""Standard deviation of normal noise over its MAD."""


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """Which losses are spikes."""

    deviations: float = 10.0
    """How many widths above the median a loss may lie."""
    floor: float = 0.02
    """Smallest width, as a part of the median."""
    history: int = 128
    """Losses that are remembered."""
    warmup: int = 32
    """Losses that must be known before one is called a spike."""
    patience: int = 16
    """Spikes in a row that mean another level of the loss."""

    def problems(self) -> list[str]:
        """Faults of the numbers."""
        lowest = {"deviations": 1.0, "floor": 0.0, "history": 4, "warmup": 2, "patience": 1}
        found = [
            f"spikes.{name}={getattr(self, name)}: must be at least {least}; nearest valid: "
            f"{name}={least}"
            for name, least in lowest.items()
            if not getattr(self, name) >= least
        ]
        if self.warmup > self.history:
            found.append(
                f"spikes.warmup={self.warmup}, history={self.history}: a history never holds more; "
                f"nearest valid: warmup={self.history}"
            )
        return found


def spread(values: Collection[float]) -> tuple[float, float]:
    """Median, and the standard deviation that normal noise with the same MAD would have.

    >>> spread([1.0, 2.0, 3.0, 4.0, 100.0])
    (3.0, 1.4826)
    """
    middle = median(values)
    return middle, NORMAL * median(abs(value - middle) for value in values)


def spike_limit(values: Collection[float], config: SpikeConfig) -> float:
    """The largest loss after ``values`` (finite) that is no spike; infinite before the warmup."""
    if len(values) < config.warmup:
        return math.inf
    middle, width = spread(values)
    return middle + config.deviations * max(width, config.floor * abs(middle))


class SpikeHistory:
    """The losses of a run, and what they say about the next.

    Args:
        config: which losses are spikes.

    Example:
        >>> history = SpikeHistory(SpikeConfig(warmup=3))
        >>> [history.exceeds(loss) is not None for loss in (2.0, 2.1, 1.9, 2.0, 9.0, 2.0)]
        [False, False, False, False, True, False]
    """

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.history)
        self._in_a_row = 0

    def exceeds(self, loss: float) -> float | None:
        """The limit, if ``loss`` (finite) is a spike; else it becomes part of the history."""
        limit = spike_limit(self._losses, self._config)
        if loss > limit:
            self._in_a_row += 1
            if self._in_a_row < self._config.patience:
                return limit
            self._losses.clear()
        self._in_a_row = 0
        self._losses.append(loss)
        return None

    def state_dict(self) -> dict[str, Any]:
        """The losses."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._losses.clear()
        self._losses.extend(state["losses"])
        self._in_a_row = int(state["in_a_row"])
