"""Sentences about numbers and names that are not valid, to be raised as one `ConfigError`."""

from collections.abc import Callable
from typing import Any


def at_least(low: float, **values: Any) -> list[str]:
    """Problems of ``values`` below ``low``, and of those that are no numbers.

    >>> at_least(0.0, lr=-1.0)
    ['lr=-1.0: must be a number of at least 0.0; nearest valid: lr=0.0']
    >>> at_least(0.0, lr="1e-3")
    ["lr='1e-3': must be a number of at least 0.0; nearest valid: lr=0.001"]
    """
    return [
        f"{name}={value!r}: must be a number of at least {low}; nearest valid: {name}="
        f"{_nearest(low, value, float)}"
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
    >>> whole_numbers(1, window="20")
    ["window='20': must be a whole number of at least 1; nearest valid: window=20"]
    """
    return [
        f"{name}={value!r}: must be a whole number of at least {low}; nearest valid: {name}="
        f"{_nearest(low, value, int)}"
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


def switches(**values: Any) -> list[str]:
    """Problems of ``values`` that are neither True nor False: the text ``"no"`` would switch on.

    >>> switches(plain_linear="no")
    ["plain_linear='no': must be True or False; nearest valid: plain_linear=False"]
    """
    return [
        f"{name}={value!r}: must be True or False; nearest valid: {name}="
        f"{str(value).lower() in ('true', 'yes', 'on', '1')}"
        for name, value in values.items()
        if not isinstance(value, bool)
    ]


def instances(**values: tuple[Any, type]) -> list[str]:
    """Problems of values that are of another type than the one beside them.

    >>> instances(given=({"real": 1.0}, complex))
    ["given={'real': 1.0}: must be a complex; nearest valid: given=complex(real=1.0)"]
    """
    problems = []
    for name, (value, kind) in values.items():
        if isinstance(value, kind):
            continue
        options = value.items() if isinstance(value, dict) else ()
        call = f"{kind.__name__}({', '.join(f'{key}={v!r}' for key, v in options)})"
        problems.append(
            f"{name}={value!r}: must be a {kind.__name__}; nearest valid: {name}={call}"
        )
    return problems


def numbers_or_instances(**values: tuple[Any, type]) -> list[str]:
    """Problems of values that are no plain ones, nor of the type beside them.

    >>> numbers_or_instances(given=({"real": 1.0}, complex))
    ["given={'real': 1.0}: must be a number or a complex; nearest valid: given=complex(real=1.0)"]
    """
    plain = (int, float, str, type(None))  # of texts others tell, who know the numbers
    return [
        problem.replace("must be a ", "must be a number or a ")
        for name, (value, kind) in values.items()
        if not isinstance(value, plain)
        for problem in instances(**{name: (value, kind)})
    ]


def _nearest(low: Any, value: Any, kind: type[int] | type[float]) -> Any:
    """What was meant by a number that is too small, of another kind, or a text."""
    try:
        return max(low, kind(float(value)))
    except (TypeError, ValueError, OverflowError):
        return low


def holds(rule: Callable[[Any], bool], value: Any) -> bool:
    """Whether a rule about numbers holds of what may be none."""
    try:
        return bool(rule(value))
    except TypeError:
        return False
