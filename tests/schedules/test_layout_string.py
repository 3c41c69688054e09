"""Megatron-LM's layout string: what it means, and that every fault is explained."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.layout_string import (
    TrunkParts,
    is_layout,
    layout_counts,
    layout_problems,
    syntax_problems,
)

SMALL = TrunkParts(before=1, layers=4, after=2)


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["embedding", "layers.0", "layers.1", "norm", "head"], (1, 2, 2)),
        (["layers.0", "layers.1"], (0, 2, 0)),
        (["tokens", "place", "a.0", "bridge", "b.0", "head"], (2, 3, 1)),
        (["0", "1", "2"], (0, 3, 0)),
    ],
)
def test_parts_of_a_trunk(names: list[str], parts: tuple[int, int, int]) -> None:
    assert TrunkParts.of(names) == parts


@pytest.mark.parametrize(
    ("text", "parts", "counts"),
    [
        ("Et*3|(tt|)*29,m|L", (1, 62, 1), [4, *[2] * 29, 1, 1]),
        ("Et*3|(tt|)*29,m|L", (1, 62, 2), [4, *[2] * 29, 1, 2]),
        ("Ett|(tt|)*6L", (1, 14, 2), [3, *[2] * 6, 2]),
        ("E,t*4|t*4|t*4,L", (1, 12, 1), [5, 4, 5]),
        ("(E t | t , t)|t*1 L", (2, 4, 1), [3, 2, 2]),
        ("E|(t|)*3L", (1, 3, 1), [1, 1, 1, 1, 1]),
        ("E(t(t|)*2)*2L", (1, 6, 1), [3, 1, 2, 1, 1]),
        ("tt|tt", (0, 4, 0), [2, 2]),
        ("Ett|ttL", (0, 4, 0), [2, 2]),
        ("t|tt*2", (0, 4, 0), [1, 3]),
    ],
)
def test_meaning(text: str, parts: tuple[int, int, int], counts: list[int]) -> None:
    assert layout_counts(text, TrunkParts(*parts), len(counts)) == counts


@pytest.mark.parametrize(
    ("text", "position", "nearest"),
    [
        ("Ett|tXL", 6, "Ett|txL"),
        ("Ett|t?L", 6, "Ett|tL"),
        ("Et*|tL", 3, "Et*1|tL"),
        ("Et*0|tL", 4, "Et*1|tL"),
        ("*3|tL", 1, "|tL"),
        ("E3t|tL", 2, "Et|tL"),
        ("Et*2*3|tL", 5, "Et*2|tL"),
        ("E(tt|*2L", 2, "E(tt|*2L)"),
        ("Ett|)*2L", 5, "Ett|*2L"),
        ("Et*999999999999|L", 4, "Et*1|L"),
        ("((t|)*1000)*1000L", 13, "((t|)*1000)*1L"),
    ],
)
def test_what_cannot_be_read(text: str, position: int, nearest: str) -> None:
    (problem,) = syntax_problems(text)
    assert problem.startswith(f"partition={text!r}: character {position}: ")
    assert problem.endswith(f"; nearest valid: partition={nearest!r}")
    assert syntax_problems(nearest) == []
    assert layout_problems(text, SMALL, 2) == [problem]


@pytest.mark.parametrize(
    ("text", "says", "nearest"),
    [
        ("Ett|tL", "it names 3 layers (t*3), the network has 4", "'Ett|ttL'"),
        ("Ett|tttmL", "it names 6 layers (t*5, m*1), the network has 4", "'Ett|ttL'"),
        ("Et|tt|tL", "it makes 3 stages, pp*stages_per_rank is 2", "'Ett|ttL'"),
        ("tt|ttL", "it has no E, the network has an item before its layers", "'Ett|ttL'"),
        ("Et|ttt", "it has no L, the network has 2 items behind its layers", "'Et|tttL'"),
        ("tE|tttL", "character 2: E stands once, at the very beginning", "'Et|tttL'"),
        ("Ett|tLt", "character 6: L stands once, at the very end", "'Ett|ttL'"),
        ("Ett|ttLL", "character 7: L stands once, at the very end", "'Ett|ttL'"),
        ("(Et|)*2L", "character 2: E stands once", "'Ett|ttL'"),
    ],
)
def test_what_does_not_fit(text: str, says: str, nearest: str) -> None:
    (problem,) = layout_problems(text, SMALL, 2)
    assert says in problem
    assert problem.endswith(f"; nearest valid: partition={nearest}")
    with pytest.raises(ConfigError, match=re.escape(says)):
        layout_counts(text, SMALL, 2)


@pytest.mark.parametrize(
    ("text", "parts", "says", "nearest"),
    [
        ("Ett||ttL", (1, 4, 2), "character 5: stage 1, before this |, is empty", "'Et|t|ttL'"),
        ("|tt|tt", (0, 4, 0), "character 1: stage 0, before this |, is empty", "'t|t|tt'"),
        ("tt|tt|", (0, 4, 0), "character 6: stage 2, behind this |, is empty", "'t|tt|t'"),
        ("E|tt|tt", (0, 4, 0), "character 1: E stands alone on stage 0", "'t|t|tt'"),
        ("t|ttt|L", (0, 4, 0), "character 7: L stands alone on stage 2", "'t|tt|t'"),
    ],
)
def test_no_stage_is_empty(text: str, parts: tuple[int, int, int], says: str, nearest: str) -> None:
    (problem,) = layout_problems(text, TrunkParts(*parts), 3)
    assert says in problem
    assert problem.endswith(f"; nearest valid: partition={nearest}")


def test_more_stages_than_a_string_can_make() -> None:
    (problem,) = layout_problems("E|t|L", TrunkParts(1, 1, 3), 4)
    assert problem.endswith("nearest valid: partition=[1, 1, 1, 2]")


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.tuples(st.integers(0, 2), st.integers(0, 3)),
)
def test_a_string_that_is_written_out_is_read(layers: list[int], ends: tuple[int, int]) -> None:
    parts = TrunkParts(ends[0], sum(layers), ends[1])
    counts = list(layers)
    counts[0] += parts.before
    counts[-1] += parts.after
    assume(sum(parts) >= len(counts))
    text = "|".join(f"t*{n}" if n > 2 else "t" * n for n in layers)
    text = "E" * bool(parts.before) + text + "L" * bool(parts.after)
    problems = layout_problems(text, parts, len(layers))
    assert bool(problems) == (0 in counts)
    if not problems:
        assert layout_counts(text, parts, len(layers)) == counts


@given(st.text("EL|t*()m,12 x?", max_size=12), st.integers(1, 4))
def test_the_nearest_layout_is_legal(text: str, num_stages: int) -> None:
    problems = syntax_problems(text)
    if problems:
        nearest = problems[0].rpartition("nearest valid: partition=")[2]
        assert syntax_problems(nearest[1:-1]) == []
        return
    for problem in layout_problems(text, SMALL, num_stages):
        nearest = problem.rpartition("nearest valid: partition=")[2][1:-1]
        assert layout_problems(nearest, SMALL, num_stages) == []
        assert len(layout_counts(nearest, SMALL, num_stages)) == num_stages


def test_long_layouts_are_folded() -> None:
    (problem,) = layout_problems("E|L", TrunkParts(1, 64, 2), 32)
    nearest = problem.rpartition("nearest valid: partition=")[2]
    assert len(nearest) < 40
    assert sum(layout_counts(nearest[1:-1], TrunkParts(1, 64, 2), 32)) == 67


def test_names_are_no_layouts() -> None:
    assert not any(is_layout(name) for name in ("flops", "parameters", "flop", "Et", ""))
    assert all(is_layout(text) for text in ("t|t", "t*2", "(t", "t)"))
