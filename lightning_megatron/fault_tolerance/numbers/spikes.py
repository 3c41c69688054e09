"""Spikes of the loss, by median and MAD of the last losses.

A loss is a *spike* if it is many widths above the middle of the last losses. A single spike moves
mean and standard deviation so far that the next one goes unnoticed. So the middle is the median
``m``, and the width is the median distance from it (MAD), times 1.4826 to be the standard deviation
of normal noise:

    limit = m + deviations * max(1.4826 * MAD, floor * |m|)

The limit holds until half of the history is spikes (Hampel, 1974). The floor is for curves that
hardly scatter. While the loss falls, the median lags behind it and the MAD is wide, so that the
limit is loose early in a run.

Spikes and NaN do not enter the history. ``patience`` spikes in a row mean that the curve has
changed, and the history begins anew.
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
    """Definition of a spike."""

    deviations: float = 10.0
    """Widths above the median up to which a loss is no spike."""
    floor: float = 0.02
    """Least width, as a fraction of the median."""
    history: int = 128
    """Number of last losses that are kept."""
    warmup: int = 32
    """Losses that must be known before a loss can be a spike."""
    patience: int = 16
    """Spikes in a row after which the history begins anew."""

    def problems(self) -> list[str]:
        """Problems of the values."""
        lowest = {"deviations": 1.0, "floor": 0.0, "history": 4, "warmup": 2, "patience": 1}
        found = [
            f"spikes.{name}={getattr(self, name)}: must be at least {least}; nearest valid: "
            f"{name}={least}"
            for name, least in lowest.items()
            if not getattr(self, name) >= least
        ]
        if self.warmup > self.history:
            found.append(
                f"spikes.warmup={self.warmup}, history={self.history}: must be at most history; "
                f"nearest valid: warmup={self.history}"
            )
        return found


def spread(values: Collection[float]) -> tuple[float, float]:
    """Median and width: the standard deviation of normal noise with the same MAD.

    >>> spread([1.0, 2.0, 3.0, 4.0, 100.0])
    (3.0, 1.4826)
    """
    middle = median(values)
    return middle, NORMAL * median(abs(value - middle) for value in values)


def spike_limit(values: Collection[float], config: SpikeConfig) -> float:
    """Largest loss after ``values`` (finite) that is no spike; infinite before the warmup."""
    if len(values) < config.warmup:
        return math.inf
    middle, width = spread(values)
    return middle + config.deviations * max(width, config.floor * abs(middle))


class SpikeHistory:
    """Last losses of a run, by which the next one is a spike or not.

    Args:
        config: definition of a spike.

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
        """Return the limit if ``loss`` (finite) is a spike; else None, and keep the loss."""
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
        """State for a checkpoint."""
        return {"losses": list(self._losses), "in_a_row": self._in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._losses.clear()
        self._losses.extend(state["losses"])
        self._in_a_row = int(state["in_a_row"])
