"""Options of the ranks are compared by texts that do not depend on the process."""

from functools import partial
from typing import Any

from lightning_megatron.strategy.rank_options import _text


class Plain:
    """Holds a set that it filled in its own order, itself, and what nobody has to know of."""

    def __init__(self, *names: int) -> None:
        self.names = set(names)
        self._cache = object()
        self.itself = self


def function() -> None:
    """Is at some address."""


def options(*order: int) -> list[Any]:
    """Options of one process; ``order`` is that of the items of its sets."""
    numbers = set(order)
    assert tuple(numbers) == order, "hashes that collide: the first one comes first"
    made = Plain(*order)
    return [
        numbers,
        [frozenset(numbers), {"key": numbers}],
        (function, Plain, made, partial(function), made.__init__),  # type: ignore[misc]
    ]


def test_equal_options_have_the_same_text_in_every_process() -> None:
    """Processes differ in the order of their sets, and in where their objects are."""
    one, other = options(0, 8), options(8, 0)
    texts = [_text(option) for option in one]
    assert texts == [_text(option) for option in other]
    assert texts[0] == "{0, 8}"
    module = __name__
    assert texts[2].startswith(f"({module}.function, {module}.Plain, {module}.Plain(names={{0, 8}}")
    assert "0x" not in texts[2]


def test_other_options_have_another_text() -> None:
    values = (1, 1.0, "1", None, [1], (1,), (1, 2), {"1"}, {"1": 1}, {"1": 2}, int, len)
    assert len({_text(value) for value in values}) == len(values)
    assert _text([1, (2,), {"a": None}]) == repr([1, (2,), {"a": None}])
