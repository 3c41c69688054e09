"""Drawn modules (hooks, optimizers, loops) train under drawn layouts as in one process."""

import os
import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.fuzz.habits import Run, draw_run, entry_of
from tests.parity.comparison import Found, check_found
from tests.parity.prove import train

LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"zero {stage}": {"zero": stage} for stage in range(4)},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "num_microbatches": 1},
    "1f1b": {"pp": 2, "num_microbatches": 4},
    "in parts": {"zero": 2, "num_microbatches": 2},
}
"""Layouts of two ranks."""
COUNT = 2
"""Runs of a layout in `make test`; FUZZ_RUNS in the environment is another number."""
MANY = 150
"""Runs of a layout and a seed in `make test-all`."""
IN_A_JOB = 10
PATIENCE_S = 120.0


def try_runs(
    runs: Sequence[Run], options: Mapping[str, Any] | str, directory: str
) -> list[Found | str]:
    """What each run left behind, or the error of ours in which it ended."""
    found: list[Found | str] = []
    for number, run in enumerate(runs):
        print(run, flush=True)  # the last line of a rank that is stuck
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found.append(train(entry_of(run), options, f"{directory}/{number}"))
            except ConfigError as error:
                found.append(f"refused: {error}")
    return found


def _hold(pool: WorkerPool, directory: Any, layout: str, count: int, seed: int) -> None:
    chance = random.Random(f"{layout} {seed}")
    runs = [draw_run(chance) for _ in range(int(os.environ.get("FUZZ_RUNS", count)))]
    problems = []
    for first in range(0, len(runs), IN_A_JOB):
        problems += _differences(pool, f"{directory}/{first}", layout, runs[first:][:IN_A_JOB])
    assert not problems, "\n".join(problems)


def _differences(pool: WorkerPool, directory: str, layout: str, runs: Sequence[Run]) -> list[str]:
    """What does not hold, as lines of a table and the reason."""
    [alone] = pool.run(1, try_runs, runs, "auto", f"{directory}/alone", timeout=600)
    job = (try_runs, runs, LAYOUTS[layout], f"{directory}/ranks")
    try:
        ranks = pool.run(2, *job, timeout=PATIENCE_S + 20 * len(runs))
    except WorkerError as error:
        return [f"one of {[str(run) for run in runs]} under {layout}: {error}"]
    problems = []
    for place, run in enumerate(runs):
        for rank, found in enumerate(ranks):
            words = _compared(f"{run} on rank {rank} of {layout}", found[place], alone[place])
            problems += [words] if words else []
    return problems


def _compared(name: str, found: Found | str, alone: Found | str) -> str:
    assert not isinstance(alone, str), alone
    if isinstance(found, str):
        return ""  # of ours
    try:
        check_found(name, found, alone, 1e-9)
    except AssertionError as error:
        return f"{name}: {str(error)[:300]}"
    return ""


FOUND = {
    "zero 1": [Run("nothing", "nothing", "nothing", "Adagrad", "none", "some batches", False)],
    "zero 3": [Run("clip values", "note norms", "last row", "Adagrad", "step", "stops", False)],
}
"""What was found, by layout."""


@pytest.mark.thorough
@pytest.mark.parametrize("layout", FOUND)
def test_what_was_found_holds(pool: WorkerPool, tmp_path: Any, layout: str) -> None:
    assert not _differences(pool, str(tmp_path), layout, FOUND[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawn_runs_are_those_of_one_process(pool: WorkerPool, tmp_path: Any, layout: str) -> None:
    _hold(pool, tmp_path, layout, COUNT, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_drawn_runs_are_those_of_one_process(
    pool: WorkerPool, tmp_path: Any, layout: str, seed: int
) -> None:
    _hold(pool, tmp_path, layout, MANY, seed)
