"""Faults at random times: a timetable drawn from a seed.

The time between two faults is exponential, as it is where each of many parts may fail at any
moment, so what is given is its mean. Everything is drawn when the timetable is made, so that it can
be printed, kept, and used again.
"""

import random
from dataclasses import replace

from lightning_megatron.errors import raise_if_any
from lightning_megatron.testing.chaos.faults import KINDS, Fault, Section, parse_faults

_STRUCK_IN: tuple[Section, ...] = ("data", "forward", "backward", "optimizer")
"""Sections that every step has."""


def random_faults(
    kinds: str, *, mean_s: float, duration_s: float, seed: int, first_s: float = 0.0
) -> list[Fault]:
    """Draw a timetable.

    Args:
        kinds: faults to choose from, as text, each with equal odds; their options are kept, and
            what they leave open (rank, section) is drawn.
        mean_s: mean seconds between two faults.
        duration_s: seconds from the start of the run after which none is injected.
        seed: of everything that is drawn.
        first_s: seconds before the first, at least.

    Raises:
        ConfigError: nothing to choose from, or times that make no sense.

    Example:
        >>> faults = random_faults("kill slow", mean_s=30, duration_s=120, seed=1)
        >>> all(0 <= fault.at_s <= 120 for fault in faults)
        True
    """
    problems = []
    templates = parse_faults(kinds)
    if not templates:
        problems.append("kinds='': no fault to choose from; nearest valid: kinds='kill'")
    if not mean_s > 0:
        problems.append(f"mean_s={mean_s}: must be positive; nearest valid: 60")
    if not duration_s > 0:
        problems.append(f"duration_s={duration_s}: must be positive; nearest valid: 600")
    raise_if_any(problems)
    chance, now, faults = random.Random(seed), first_s, []
    while (now := now + chance.expovariate(1 / mean_s)) < duration_s:
        template = chance.choice(templates)
        section = chance.choice(_STRUCK_IN)
        kind = KINDS[template.kind]
        open_section = not kind.fixed and template.section == kind.section
        faults.append(
            replace(
                template,
                at_s=round(now, 1),
                seed=chance.getrandbits(31),
                section=section if open_section else template.section,
            )
        )
    return faults
