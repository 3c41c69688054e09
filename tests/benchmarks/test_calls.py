"""What small steps cost: calls of Python functions, which no load of the machine changes."""

import pytest

from benchmarks import calls
from lightning_megatron.testing import WorkerPool

MOST = {"one process": 390, "zero 0": 460, "zero 1": 1040, "zero 3": 0}
"""Calls in a step beyond those of the peer; zero 2 makes those of zero 1."""


@pytest.mark.parametrize("run", MOST)
def test_a_step_makes_few_calls_more_than_that_of_its_peer(pool: WorkerPool, run: str) -> None:
    row, more = calls.compare(pool, run, 2)
    most = sorted(more, key=lambda function: more[function])[-8:]
    assert row["calls"] - row["calls of the peer"] <= MOST[run], most
