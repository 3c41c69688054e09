"""Sentences about numbers and names that are not valid, to be raised as one `ConfigError`."""

from collections.abc import Callable
from typing import Any


def at_least(low: float, **values: Any) -> list[str]:
    """Problems of ``values`` below ``low``, and of those that are no numbers.

    >>> at_least(0.0, lr=-1.0)
    ['lr=-1.0: must be at least 0.0; nearest valid: lr=0.0']
    """
    return [
        f"{name}={value!r}: must be at least {low}; nearest valid: {name}={low}"
        for name, value in values.items()
        if not holds(lambda value: value >= low, value)
    ]


def below_one(**values: Any) -> list[str]:
    """Problems of ``values`` outside of [0, 1).

    >>> below_one(momentum=1.0)
    ['momentum=1.0: must lie in [0, 1); nearest valid: momentum=0.99']
    """
    return [
        f"{name}={value!r}: must lie in [0, 1); nearest valid: {name}="
        f"{'0.0' if holds(lambda value: value < 0, value) else '0.99'}"
        for name, value in values.items()
        if not holds(lambda value: 0.0 <= value < 1.0, value)
    ]


def whole_numbers(low: int, **values: Any) -> list[str]:
    """Problems of ``values`` that are no whole numbers from ``low`` on.

    >>> whole_numbers(1, window=1.5)
    ['window=1.5: must be a whole number of at least 1; nearest valid: window=1']
    """
    return [
        f"{name}={value!r}: must be a whole number of at least {low}; nearest valid: {name}="
        f"{max(low, int(value)) if isinstance(value, float) and value - value == 0 else low}"
        for name, value in values.items()
        if not isinstance(value, int) or isinstance(value, bool) or value < low
    ]


def lists_of_names(**values: Any) -> list[str]:
    """Problems of ``values`` that are one string, whose characters would each be a pattern.

    >>> lists_of_names(exclude="*.head")
    ["exclude='*.head': must be a list; nearest valid: exclude=['*.head']"]
    """
    return [
        f"{name}={value!r}: must be a list; nearest valid: {name}=[{value!r}]"
        for name, value in values.items()
        if isinstance(value, str)
    ]


def holds(rule: Callable[[Any], bool], value: Any) -> bool:
    """Whether a rule about numbers holds of what may be none."""
    try:
        return bool(rule(value))
    except TypeError:
        return False
