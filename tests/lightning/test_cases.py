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


@pytest.mark.parametrize("name", CASES)
def test_one_process_is_as_plain_lightning(name: str, plain: Plain, tmp_path: Path) -> None:
    case, theirs = CASES[name], plain(name)
    ours = run_case(case, "one", tmp_path / "ours")
    assert theirs.events or theirs.error
    if "one" in case.refused:
        assert re.search(case.refused["one"], ours.error)
    else:
        assert not difference(comparable(ours, case), comparable(theirs, case))


def layout_job(layout: str, root: Path) -> dict[str, Record]:
    """Records of all cases of a layout."""
    quiet()
    chosen = {name: case for name, case in CASES.items() if layout in case.layouts}
    return {name: run_case(case, layout, directory_of(root, name)) for name, case in chosen.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_as_plain_lightning(
    pool: WorkerPool, plain: Plain, layout: str, tmp_path: Path
) -> None:
    wrong = []
    for rank, records in enumerate(pool.run(LAYOUTS[layout][0], layout_job, layout, tmp_path)):
        for name, record in records.items():
            case = CASES[name]
            if layout in case.refused:
                if not re.search(case.refused[layout], record.error):
                    wrong.append(f"rank {rank}, {name}: {record.error!r}")
                continue
            ours, theirs = (comparable(r, case, layout, rank) for r in (record, plain(name)))
            found = difference(ours, theirs, case.rounding)
            if found:
                wrong.append(f"rank {rank}, {name}: {found}")
    assert not wrong, "\n".join(wrong)
