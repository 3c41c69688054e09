"""Options of the ranks are compared by texts that do not depend on the process."""

import os
import subprocess
import sys

from lightning_megatron.strategy.rank_options import _text

WRITE = """
from functools import partial
from lightning_megatron.strategy.rank_options import _text

class Plain:
    def __init__(self):
        self.names = {"C", "D", "E", "F"}
        self._cache = object()
        self.itself = self

def function():
    pass

kept = [bytearray(SIZE) for _ in range(SIZE)]
print(_text({"A", "B", "C", "D"}))
print(_text([frozenset("abcd"), {"key": {"x", "y", "z"}}]))
print(_text((function, Plain, Plain(), partial(function), Plain().__init__)))
"""


def texts(seed: int) -> list[str]:
    """Texts that a new process writes, with a seed of its hashes, and objects in other places."""
    found = subprocess.run(
        [sys.executable, "-c", WRITE.replace("SIZE", str(seed * 1000))],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return found.stdout.splitlines()


def test_equal_options_have_the_same_text_in_every_process() -> None:
    one = texts(1)
    assert one == texts(2)
    assert one[0] == "{'A', 'B', 'C', 'D'}"
    assert one[2].startswith("(__main__.function, __main__.Plain, __main__.Plain(names={'C', 'D',")
    assert "0x" not in one[2]


def test_other_options_have_another_text() -> None:
    values = (1, 1.0, "1", None, [1], (1,), (1, 2), {"1"}, {"1": 1}, {"1": 2}, int, len)
    assert len({_text(value) for value in values}) == len(values)
    assert _text([1, (2,), {"a": None}]) == repr([1, (2,), {"a": None}])
