"""What Lightning does with a module, it does under the strategy: hooks, loops, values and files."""

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from lightning_megatron.testing import WorkerPool
from tests.lightning import callbacks, checkpoints, logs, loops, optimizers
from tests.lightning.record import LAYOUTS, Case, Record, comparable, difference, run_case

GROUPS: dict[str, dict[str, Case]] = {
    "loops": loops.CASES,
    "logs": logs.CASES,
    "optimizers": optimizers.CASES,
    "callbacks": callbacks.CASES,
    "checkpoints": checkpoints.CASES,
}
CASES = {
    f"{group}: {name}": case for group, cases in GROUPS.items() for name, case in cases.items()
}


def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def directory_of(root: Path, name: str) -> Path:
    return root / re.sub(r"\W+", "_", name)


Plain = Callable[[str], Record]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """What plain Lightning does."""
    root = tmp_path_factory.mktemp("plain")
    return cache(lambda name: run_case(CASES[name], None, directory_of(root, name)))


@pytest.fixture(scope="module", autouse=True)
def quiet_module() -> Iterator[None]:
    """Other tests of this process look at what is logged."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    with warnings.catch_warnings():
        quiet()
        yield
    logger.setLevel(level)


def run_named(name: str, layout: str, directory: Path) -> Record:
    quiet()
    return run_case(CASES[name], layout, directory)


def places(case: Case) -> list[tuple[str, bool]]:
    """Layouts of a case, and whether `make test` leaves it out there.

    Where each rank has all samples, tp and pp hold everything that one process does.
    """
    less = {x for x, parts in case.unlike.items() if parts != case.unlike.get("one")}
    held = {"tp", "pp"} & set(case.layouts) - case.refused.keys() - less
    left_out = {*case.others, *(["one"] if held else [])}
    return [(x, x in left_out) for x in dict.fromkeys(("one", *case.layouts, *case.others))]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[pytest.mark.thorough] * left_out)
        for name, case in CASES.items()
        for layout, left_out in places(case)
    ],
)
def test_it_is_as_plain_lightning(
    pool: WorkerPool, plain: Plain, name: str, layout: str, tmp_path: Path
) -> None:
    case, theirs = CASES[name], plain(name)
    assert theirs.events or theirs.error
    if layout == "one":
        records = [run_case(case, layout, tmp_path)]
    else:
        records = pool.run(LAYOUTS[layout][0], run_named, name, layout, tmp_path)
    for rank, record in enumerate(records):
        if layout in case.refused:
            assert re.search(case.refused[layout], record.error), rank
        else:
            ours, expected = (comparable(r, case, layout, rank) for r in (record, theirs))
            rounding = 0.0 if layout == "one" else case.rounding
            assert not difference(ours, expected, rounding), rank
