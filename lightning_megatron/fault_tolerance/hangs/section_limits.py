"""How long a rank may stay in a section before it counts as hanging.

A limit that is too short stops healthy runs, so limits are learned: several times the longest stay
seen so far, and never below a floor. What has not been seen yet has a floor of many minutes: the
first step compiles and allocates, the first save and the first validation do things for the first
time. A run starts as slowly as it likes for half an hour.

A limit given in seconds is taken at its word once the first batches are through. The start keeps
its own, as nobody means it by "a step takes at most five seconds".
"""

from collections.abc import Mapping

from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring import sections as names
from lightning_megatron.monitoring.sections import SECTIONS, SectionClock

START_S = 1800.0
UNSEEN_S = 600.0
"""For a section that has not been left yet, and for all sections in the first batches."""

_STEP_S, _SLOW_S = 60.0, 300.0
_FLOORS = {
    **dict.fromkeys(SECTIONS, _SLOW_S),
    **dict.fromkeys((names.DATA, names.FORWARD, names.BACKWARD, names.OPTIMIZER), _STEP_S),
    names.START: START_S,
}
_TIMES = 8.0
_WARM_UP = 3
"""Batches before limits are taken seriously."""

Limit = float | str | Mapping[str, float]


class Limits:
    """Limits of all sections at any moment of a run.

    Args:
        limit: ``"auto"``, seconds, or seconds by section, which leaves the others to ``"auto"``.

    Raises:
        ConfigError: ``limit`` is nothing of this.
    """

    def __init__(self, limit: Limit = "auto") -> None:
        given: Mapping[str, float]
        if isinstance(limit, str):
            if limit != "auto":
                raise ConfigError(
                    f"limit={limit!r}: must be 'auto', seconds, or seconds by section; nearest "
                    "valid: 'auto'"
                )
            given = {}
        elif isinstance(limit, Mapping):
            given = limit
        else:
            given = {name: limit for name in SECTIONS if name != names.START}
        for name, seconds in given.items():
            if name not in SECTIONS:
                raise ConfigError(
                    f"limit={limit!r}: there is no section {name!r}; nearest valid: one of "
                    f"{', '.join(SECTIONS)}"
                )
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
                raise ConfigError(
                    f"limit={limit!r}: seconds must be positive; nearest valid: limit='auto'"
                )
        self._given = {name: float(seconds) for name, seconds in given.items()}

    def of(self, clock: SectionClock) -> dict[str, float]:
        """Seconds by section, by what the rank has seen so far."""
        warm = clock.visits[names.DATA] >= _WARM_UP
        found = {}
        for name in SECTIONS:
            learned = max(_FLOORS[name], _TIMES * clock.longest[name])
            if not warm or not clock.visits[name]:
                learned = max(learned, UNSEEN_S)
            given = self._given.get(name)
            if given is not None:
                learned = given if warm or name == names.START else max(given, learned)
            found[name] = learned
        return found
