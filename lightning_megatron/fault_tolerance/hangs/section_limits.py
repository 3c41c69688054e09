"""Limits of the time in a section, after which a rank counts as hanging.

A limit that is too short stops healthy runs, so limits are learned: eight times the longest time
seen so far, and at least a floor. Sections that were not seen yet have a floor of many minutes, as
the first step compiles and allocates, and the first save and validation do more than later ones.
The start of a run may take half an hour.

A limit in seconds holds from the third batch on. It does not apply to the start, which is not part
of a step.
"""

from collections.abc import Mapping

from lightning_megatron.errors import ConfigError
from lightning_megatron.run_log import sections as names
from lightning_megatron.run_log.sections import SECTIONS, SectionClock

START_S = 1800.0
UNSEEN_S = 600.0
"""Limit of sections that were not left yet, and of all sections in the first batches."""

_STEP_S, _SLOW_S = 60.0, 300.0
_FLOORS = {
    **dict.fromkeys(SECTIONS, _SLOW_S),
    **dict.fromkeys((names.DATA, names.FORWARD, names.BACKWARD, names.OPTIMIZER), _STEP_S),
    names.START: START_S,
}
_TIMES = 8.0
_WARM_UP = 3
"""Batches before the limits hold."""

Limit = float | str | Mapping[str, float]


class Limits:
    """Present limits of all sections.

    Args:
        limit: ``"auto"``, seconds, or seconds by section, which leaves the others to ``"auto"``.

    Raises:
        ConfigError: ``limit`` is none of these.
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
