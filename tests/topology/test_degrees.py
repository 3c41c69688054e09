"""Degrees: every legal layout is accepted, every other one explained with a remedy that works."""

import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.topology.degrees import (
    AXES,
    Degrees,
    degree_problems,
    divisibility_problem,
    divisors,
    infer_degrees,
    nearest_divisors,
    nearest_multiples,
)

positive = st.integers(1, 200)
sizes = st.integers(1, 4)


@given(sizes, sizes, sizes, sizes, sizes, st.integers(0, 3))
def test_legal_layouts_are_completed(
    tp: int, pp: int, cp: int, replicate: int, shard: int, zero: int
) -> None:
    dp = replicate * shard
    world = tp * pp * cp * dp
    given_replicate = 1 if zero == 0 else replicate
    chosen = {"tp": tp, "pp": pp, "cp": cp, "dp_replicate": given_replicate, "zero": zero}
    assert degree_problems(world, **chosen) == []
    degrees = infer_degrees(world, **chosen)
    assert (degrees.tp, degrees.pp, degrees.cp, degrees.dp) == (tp, pp, cp, dp)
    assert degrees.world_size == world
    expected = (dp, 1) if zero == 0 else (replicate, shard)
    assert (degrees.dp_replicate, degrees.dp_shard) == expected


@given(
    st.integers(1, 64), st.integers(-1, 9), st.integers(-1, 9), st.integers(1, 3),
    st.integers(-1, 5), st.integers(-1, 4),
)  # fmt: skip
def test_problems_exactly_when_illegal(
    world: int, tp: int, pp: int, cp: int, replicate: int, zero: int
) -> None:
    problems = degree_problems(world, tp=tp, pp=pp, cp=cp, dp_replicate=replicate, zero=zero)
    model = tp * pp * cp
    legal = min(tp, pp, cp, replicate) >= 1 and 0 <= zero <= 3 and world % model == 0
    if legal:
        dp = world // model
        legal = replicate in (1, dp) if zero == 0 else dp % replicate == 0
    assert (not problems) == legal
    assert all("nearest valid: " in problem for problem in problems)


def test_zero_1_shards_over_all_of_dp() -> None:
    assert infer_degrees(8, tp=2) == Degrees(dp_shard=4, tp=2)
    assert infer_degrees(8, tp=2, zero=0) == Degrees(dp_replicate=4, tp=2)
    assert infer_degrees(8, dp_replicate=2, zero=3) == Degrees(dp_replicate=2, dp_shard=4)


def test_sizes_follow_the_axes() -> None:
    degrees = Degrees(pp=2, dp_replicate=3, dp_shard=5, cp=7, tp=11)
    assert dict(zip(AXES, degrees.sizes(), strict=True)) == {
        "pp": 2, "dp_replicate": 3, "dp_shard": 5, "cp": 7, "tp": 11,
    }  # fmt: skip
    assert degrees.dp == 15
    assert degrees.world_size == 2 * 3 * 5 * 7 * 11


LEGAL: dict[str, Any] = {"tp": 1, "pp": 1, "cp": 1, "dp_replicate": 1, "zero": 1}


@pytest.mark.parametrize("option", ["tp", "pp", "cp", "dp_replicate"])
@pytest.mark.parametrize(
    ("value", "nearest"), [(0, 1), (-2, 1), (1.5, 1), ("2", 2), (None, 1), (True, 1)]
)
def test_not_a_degree(option: str, value: Any, nearest: int) -> None:
    (problem,) = degree_problems(4, **{**LEGAL, option: value})
    name = "zero.dp_replicate" if option == "dp_replicate" else option
    assert problem.startswith(f"{name}={value!r}:")
    assert problem.endswith(f"nearest valid: {name}={nearest}")


@pytest.mark.parametrize(("zero", "nearest"), [(4, 3), (-1, 0), ("3", 3), (None, 1)])
def test_not_a_zero_stage(zero: Any, nearest: int) -> None:
    (problem,) = degree_problems(4, **{**LEGAL, "zero": zero})
    assert problem.endswith(f"nearest valid: zero={nearest}")


def test_every_wrong_degree_is_reported_at_once() -> None:
    assert len(degree_problems(4, tp=0, pp=-1, cp=0, dp_replicate=0, zero=9)) == 5


@given(st.integers(1, 64), sizes, sizes, st.integers(1, 2))
def test_offered_layouts_fit_the_world(world: int, tp: int, pp: int, cp: int) -> None:
    problems = degree_problems(world, tp=tp, pp=pp, cp=cp, dp_replicate=1, zero=1)
    for problem in problems:
        rest = problem.partition("nearest valid: ")[2]
        sizes_part, _, _ = rest.partition(" processes")
        for size in re.findall(r"\d+", sizes_part):
            assert degree_problems(int(size), tp=tp, pp=pp, cp=cp, dp_replicate=1, zero=1) == []
        for t, p in re.findall(r"tp=(\d+) pp=(\d+)", rest):
            fixed = degree_problems(world, tp=int(t), pp=int(p), cp=cp, dp_replicate=1, zero=1)
            assert fixed == []
        for c in re.findall(r"cp=(\d+)", rest):
            assert degree_problems(world, tp=tp, pp=pp, cp=int(c), dp_replicate=1, zero=1) == []


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 3))
def test_offered_replicas_fit(dp: int, replicate: int, zero: int) -> None:
    for problem in degree_problems(dp, tp=1, pp=1, cp=1, dp_replicate=replicate, zero=zero):
        offered = [int(n) for n in re.findall(r"\d+", problem.partition("dp_replicate=")[2])]
        valid = [int(n) for n in re.findall(r"\d+", problem.partition("nearest valid: ")[2])]
        assert offered
        assert valid
        for number in valid:
            layout = {**LEGAL, "dp_replicate": number, "zero": zero}
            assert degree_problems(dp, **layout) == []


@given(positive)
def test_divisors(n: int) -> None:
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert divisors(0) == []


@given(positive, positive)
def test_nearest_divisors_enclose_the_value(n: int, value: int) -> None:
    near = nearest_divisors(n, value)
    assert near
    assert all(n % d == 0 for d in near)
    assert not [d for d in divisors(n) if near[0] < d < near[-1]]
    assert near[0] <= value


@given(positive, positive)
def test_nearest_multiples_enclose_the_value(n: int, factor: int) -> None:
    near = nearest_multiples(n, factor)
    assert near
    assert all(m % factor == 0 and 0 < abs(m - n) <= factor for m in near)


@given(positive, st.integers(1, 16))
def test_divisibility_sentence(value: int, degree: int) -> None:
    problem = divisibility_problem("num_heads", value, "tp", degree)
    assert (problem is None) == (value % degree == 0)
    if problem is not None:
        rest = problem.partition("nearest valid: ")[2]
        degrees, _, values = rest.partition(", or ")
        assert all(value % int(d) == 0 for d in re.findall(r"\d+", degrees))
        assert all(int(v) % degree == 0 for v in re.findall(r"\d+", values))


def test_divisibility_by_nothing() -> None:
    problem = divisibility_problem("num_heads", 4, "tp", 0)
    assert problem is not None
    assert problem.startswith("num_heads=4, tp=0:")


def test_small_worlds_exhaustively() -> None:
    for world, tp, pp in itertools.product(range(1, 9), repeat=3):
        problems = degree_problems(world, tp=tp, pp=pp, cp=1, dp_replicate=1, zero=1)
        assert bool(problems) == bool(world % (tp * pp))
