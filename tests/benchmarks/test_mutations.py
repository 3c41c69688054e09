"""Mutations are drawn by a seed, applied where lines moved, and killed by tests that look."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.mutations.choice import Suite
from benchmarks.mutations.draw import FOLDERS, KINDS, Mutation, apply, draw
from benchmarks.mutations.series import GONE, lost

SOURCE = '''"""A module of {folder}."""

import logging

log = logging.getLogger(__name__)


def share(values, size, handle=None):
    """The part that a rank takes."""
    if size < 1 or not values:
        raise ValueError(f"size={{size}} must be at least {{1 + 0}}")
    found = []
    for start in range(0, len(values), size):
        found.append(values[start : start + size])
        log.debug("took %d", 3)
    if handle is not None:
        handle.wait()
    return found, len(values) % size
'''
TEST = """
from lightning_megatron.{folder}.share import share

def test_share():
    assert share([1, 2, 3], 2) == ([[1, 2], [3]], 1)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkout."""
    made = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        for name, text in ((f"lightning_megatron/{folder}/share.py", SOURCE),) + (
            ((f"tests/{folder}/test_share.py", TEST),) if folder == "data" else ()
        ):
            file = made / name
            file.parent.mkdir(parents=True, exist_ok=True)
            (file.parent / "__init__.py").touch()
            (file.parents[1] / "__init__.py").touch()
            file.write_text(text.format(folder=folder))
    return made


def test_a_seed_draws_every_kind_in_every_folder_and_nothing_that_only_speaks(root: Path) -> None:
    drawn = draw(root, 42, 1)
    assert drawn == draw(root, 42, 1) != draw(root, 42, 2)
    assert {one.kind for one in drawn} == set(KINDS)
    assert {one.path.split("/")[1] for one in drawn} == set(FOLDERS)
    assert max(Counter(drawn).values()) == 1
    every = Counter((one.kind, one.before, one.after) for one in draw(root, 84, 1))
    assert set(every.values()) == {len(FOLDERS)}
    assert all("debug" not in before for _, before, _ in every)
    assert ("negated", "if size < 1 or not values:", "if not (size < 1 or not values):") in every
    assert ("wait", "handle.wait()", "pass") in every
    with pytest.raises(ValueError, match="no more than 84"):
        draw(root, 85, 1)
    for one in drawn:
        changed = apply((root / one.path).read_text(), one)
        assert changed is not None
        assert changed.count("\n") == SOURCE.count("\n")


def test_a_mutation_is_found_again_where_lines_moved() -> None:
    before = "if a:\n    pass\nelif a < 1:  # low\n    b = 1\n    b = 1\n"
    flip = Mutation("x.py", "", "comparison", "if a < 1:", "if a > 1:", 0, 3)
    second = Mutation("x.py", "", "removed", "b = 1", "pass", 1, 5)
    moved = f"import os\n{before}"
    assert apply(moved, flip) == moved.replace("a < 1:  # low", "a > 1:")
    assert apply(moved, second) == moved[: moved.rindex("b = 1")] + "pass\n"
    assert apply("a = 1\n", flip) is None
    assert apply(f"def f():\n  {before.splitlines()[-1]}", second) is None


def test_tests_are_chosen_by_name_import_and_folder(root: Path) -> None:
    suite = Suite(root)
    assert suite.steps("lightning_megatron/data/share.py")[0].files == ("tests/data/test_share.py",)
    where = suite.killer("tests/elsewhere/test_gone.py::test_share[2]")
    assert [(step.files, step.only) for step in where] == [
        (("tests/data/test_share.py",), "test_share")
    ]
    assert suite.killer("tests/elsewhere/test_gone.py::test_other") == []


def test_what_was_killed_and_survives_is_lost() -> None:
    outcomes = [("killed", "survived"), ("killed (hung)", "killed"), ("survived", "survived")]
    rows = [{"earlier": {"outcome": a}, "result": {"outcome": b}} for a, b in outcomes]
    assert lost([*rows, {"earlier": {"outcome": "killed"}, "result": {"outcome": GONE}}]) == [0]


def outcomes(
    root: Path, record: Path, changes: dict[tuple[str, str], str], hang: float
) -> list[list[str]]:
    """What becomes of a package some of whose statements read otherwise, and by which test."""
    fixed = {"function": "share", "kind": "", "occurrence": 0, "line": 1}
    rows = [
        fixed | {"path": f"lightning_megatron/data/{name}", "before": before, "after": after}
        for (name, before), after in changes.items()
    ]
    data = {"commit": "no-commit", "budget": 60, "hang": hang, "controls": {}, "mutations": rows}
    record.write_text(json.dumps(data))
    call = [sys.executable, "-m", "benchmarks.mutations", "--root", str(root)]
    subprocess.run(
        [*call, "--resume", str(record)],
        check=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    results = [row["result"] for row in json.loads(record.read_text())["mutations"]]
    assert all(result.get("ran", {PATH: "1 of 1"}).keys() == {PATH} for result in results)
    return [[result["outcome"], result.get("by", "")] for result in results]


PATH = "tests/data/test_share.py"
BY = f"{PATH}::test_share"


def test_a_defect_is_killed_and_a_harmless_change_survives(root: Path, tmp_path: Path) -> None:
    changes = {
        ("share.py", "found = []"): "found = [0]",
        ("share.py", "return (found, len(values) % size)"): "import os; os.abort()",
        ("share.py", "handle.wait()"): "pass",  # nobody waits here
        ("share.py", "nowhere()"): "pass",
        ("gone.py", "found = []"): "found = [0]",
    }
    assert outcomes(root, tmp_path / "record.json", changes, 600) == [
        ["killed", BY],
        ["killed (crashed)", BY],
        ["survived", ""],
        [GONE, ""],
        [GONE, ""],
    ]


@pytest.mark.thorough
def test_a_test_without_an_end_is_killed(root: Path, tmp_path: Path) -> None:
    changes = {("share.py", "found = []"): "while True: pass"}
    assert outcomes(root, tmp_path / "record.json", changes, 15) == [["killed (hung)", BY]]
