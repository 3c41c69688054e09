"""Quick starts of other projects, unchanged but for the Trainer's strategy, train as without it.

docs/projects.md says what that means for their users. Each project has one run of its quick start
(`tests.projects.run`), to which all its cases look.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.launched.jobs import command
from tests.projects.projects import PROJECTS
from tests.projects.quickstarts.quickstart import DDP, PARTS, PLAIN

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(3600)]

STAGES = tuple(f"zero={stage}" for stage in range(4))
Found = Callable[[str], dict[str, Any]]

FAILS: dict[tuple[str, str, str], str] = {}
"""Cases that are known to fail, and what is missing. A part or stage of ``*`` means all."""


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What a project's quick start found under each strategy; it runs when it is first asked for."""

    @cache
    def run(name: str) -> dict[str, Any]:
        project = PROJECTS[name]
        folder = tmp_path_factory.mktemp(name)
        strategies = (PLAIN if project.plain else DDP, *STAGES)
        module = ["-m", "tests.projects.run", name, *strategies]
        done = command([str(project.interpreter()), *module], folder, 3000.0)
        assert done.code == 0, done.text[-5000:]
        return {each: torch.load(folder / f"{each}.pt", weights_only=False) for each in strategies}

    return run


def cases() -> list[Any]:
    listed = []
    for project in PROJECTS:
        for part in PARTS:
            for stage in STAGES:
                keys = [(project, p, s) for p in (part, "*") for s in (stage, "*")]
                reasons = [FAILS[key] for key in keys if key in FAILS]
                marks = [pytest.mark.xfail(reason=reason, strict=True) for reason in reasons]
                name = f"{project}-{part}-{stage}"
                listed.append(pytest.param(project, part, stage, marks=marks, id=name))
    return listed


@pytest.mark.parametrize(("project", "part", "stage"), cases())
def test_a_quick_start_trains_as_without_the_strategy(
    found: Found, project: str, part: str, stage: str
) -> None:
    runs = found(project)
    assert not isinstance(runs[stage], str), runs[stage]
    reference = runs[PLAIN if PROJECTS[project].plain else DDP][0]
    expected = numbers(reference, part)
    for rank, answer in enumerate(runs[stage]):
        actual = numbers(answer, part)
        assert actual.keys() == expected.keys()
        for name, value in actual.items():
            same(value, expected[name], rank, PROJECTS[project].tolerance, name)


def numbers(answer: tuple[dict[str, Any], dict[str, str]], part: str) -> dict[str, Any]:
    """Of a part, whose error fails the test."""
    by_part, errors = answer
    assert part not in errors, errors[part]
    found: dict[str, Any] = by_part[part]
    return found


def same(actual: Any, expected: Any, rank: int, tolerance: float, name: str) -> None:
    """Compare numbers. A rank of two has every second row of what one process predicts."""
    one, other = (torch.as_tensor(value).detach().double() for value in (actual, expected))
    if other.dim() and len(other) == 2 * len(one):
        other = other[rank::2]
    assert one.shape == other.shape, f"{name}: {tuple(one.shape)} for {tuple(other.shape)}"
    bound = tolerance * max(float(other.abs().max()), 1e-6) if other.numel() else 0.0
    torch.testing.assert_close(one, other, rtol=0, atol=bound, msg=lambda m: f"{name}: {m}")
