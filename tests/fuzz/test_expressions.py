"""Drawn expressions of torch give on tensors in parts what they give in one process."""

import os

import pytest

from lightning_megatron.testing import WorkerPool
from tests.fuzz import finds, running
from tests.fuzz.running import Trial
from tests.fuzz.subjects import SUBJECTS

COUNTS = {"tp": 200, "cp": 100}
"""Programs of a subject in `make test`; FUZZ_PROGRAMS in the environment is another number."""
SEEDS = range(1, 11)
"""Seeds of `make test-all`, each of which draws `MANY` programs of every subject."""
MANY = 4000


def _hold(pool: WorkerPool, name: str, count: int, seed: int) -> None:
    count = int(os.environ.get("FUZZ_PROGRAMS", count))
    found = running.search(pool, name, running.draw(name, count, seed))
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("name", SUBJECTS)
def test_drawn_programs_hold(pool: WorkerPool, name: str) -> None:
    _hold(pool, name, COUNTS[name], 0)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_many_drawn_programs_hold(pool: WorkerPool, name: str, seed: int) -> None:
    _hold(pool, name, MANY, seed)


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("kind", ["RIGHT", "REFUSED"])
def test_what_was_found_holds(pool: WorkerPool, name: str, kind: str) -> None:
    trials = [Trial(*case) for case in getattr(finds, kind)[name]]
    expected = {running.RIGHT if kind == "RIGHT" else running.REFUSED}
    said = zip(trials, running.try_all(pool, name, trials), strict=True)
    wrong = [
        str(running.Find(trial, words))
        for trial, words in said
        if {text.split(":")[0] for text in words} != expected
    ]
    assert not wrong, "\n".join(wrong)
