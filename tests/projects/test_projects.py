"""Quick starts of other projects, unchanged but for the Trainer's strategy, train as without it.

docs/projects.md says what that means for their users. Each project has one run of its quick start
(`tests.projects.run`), to which all its cases look.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launched.jobs import command
from tests.projects.projects import PROJECTS
from tests.projects.quickstarts.quickstart import DDP, PLAIN

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.timeout(3600)]

STAGES = tuple(f"zero={stage}" for stage in range(4))
Found = Callable[[str], dict[str, Any]]

FAILS: dict[tuple[str, str, str], str] = {}
"""Cases that are known to fail, and what is missing. A part or stage of ``*`` means all."""


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What a project's quick start found under each strategy; run when first asked for."""

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
    for project, kind in PROJECTS.items():
        for part in kind.parts:
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
    kind = PROJECTS[project]
    expected = numbers(runs[PLAIN if kind.plain else DDP], part)
    actual = numbers(runs[stage], part)
    assert actual.keys() == expected.keys()
    for name in actual:
        same(actual[name], expected[name], kind.tolerance, name)


def numbers(answers: Any, part: str) -> dict[str, list[Tensor]]:
    """Of a part, by rank. Errors fail the test."""
    assert not isinstance(answers, str), answers
    for _, errors in answers:
        assert part not in errors, errors[part]
    by_rank = [of_rank[part] for of_rank, _ in answers]
    return {
        name: [torch.as_tensor(each[name]).detach().double() for each in by_rank]
        for name in by_rank[0]
    }


def same(actual: list[Tensor], expected: list[Tensor], tolerance: float, name: str) -> None:
    """Compare what the ranks have. Two ranks read every second sample of one process.

    A single number is a mean over the samples that a rank has read, as an ordinary `self.log`.
    """
    if actual[0].dim() == 0:
        actual, expected = ([torch.stack(each).mean()] for each in (actual, expected))
    for rank, value in enumerate(actual):
        other = expected[0]
        if other.dim() and len(other) == 2 * len(value):
            other = other[rank::2]
        assert value.shape == other.shape, f"{name}: {tuple(value.shape)}, not {tuple(other.shape)}"
        bound = tolerance * max(1.0, float(other.abs().max())) if other.numel() else 0.0
        apart = float((value - other).abs().max()) if other.numel() else 0.0
        assert apart <= bound, f"{name} of rank {rank}: {apart:g} apart, at most {bound:g}"
