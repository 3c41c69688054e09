"""Partitions: as good as brute force, even where costs leave a choice, faults explained."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.partition import (
    explicit_partition,
    partition_by_cost,
    partition_problems,
    stage_costs,
)
from lightning_megatron.schedules.schedule import make_schedule
from lightning_megatron.schedules.simulate import simulate

integer_costs = st.lists(st.integers(0, 20), min_size=1, max_size=9)
float_costs = st.lists(st.floats(0.0, 1e6), min_size=1, max_size=9)


def every_partition(num_items: int, num_stages: int) -> list[list[range]]:
    found = []
    for inner in itertools.combinations(range(1, num_items), num_stages - 1):
        cuts = [0, *inner, num_items]
        found.append([range(a, b) for a, b in itertools.pairwise(cuts)])
    return found


def lengths(stages: list[range]) -> list[int]:
    return [len(stage) for stage in stages]


@given(st.data(), integer_costs)
def test_equals_brute_force(data: st.DataObject, costs: list[int]) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    def order(stages: list[range]) -> tuple[Any, ...]:
        sums = stage_costs(costs, stages)
        squares = sum(s * s for s in sums)
        return max(sums), squares, sum(n * n for n in lengths(stages)), lengths(stages)

    best = min(every_partition(len(costs), num_stages), key=order)
    assert partition_by_cost(costs, num_stages) == best


@given(st.data(), float_costs)
def test_float_costs_reach_the_least_maximum(data: st.DataObject, costs: list[float]) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    stages = partition_by_cost(costs, num_stages)
    assert [item for stage in stages for item in stage] == list(range(len(costs)))
    assert len(stages) == num_stages
    assert all(stages)

    def slowest(candidate: list[range]) -> float:
        return max(math.fsum(costs[item] for item in stage) for stage in candidate)

    best = min(map(slowest, every_partition(len(costs), num_stages)))
    assert slowest(stages) == pytest.approx(best)


@given(st.integers(1, 60), st.integers(1, 12))
def test_equal_costs_make_equal_stages(num_items: int, num_stages: int) -> None:
    num_stages = min(num_items, num_stages)
    for cost in (0.0, 0.1, 3):
        sizes = lengths(partition_by_cost([cost] * num_items, num_stages))
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes)  # early stages hold more activations, so fewer items


@settings(max_examples=40)
@given(st.data(), st.integers(2, 4))
def test_the_step_takes_at_most_five_percent_longer_than_the_best(
    data: st.DataObject, num_stages: int
) -> None:
    """Layers differ by up to 4 times in cost; 4 microbatches per rank, as by default."""
    layer = st.one_of(st.sampled_from([1.0, 4.0]), st.floats(1.0, 4.0))
    costs = data.draw(st.lists(layer, min_size=num_stages, max_size=9))
    schedule = make_schedule("1f1b", num_stages, 4 * num_stages)

    def step_time(stages: list[range]) -> float:
        forward = stage_costs(costs, stages)
        return simulate(schedule, forward=forward, backward=[2 * f for f in forward]).step_time

    best = min(map(step_time, every_partition(len(costs), num_stages)))
    assert step_time(partition_by_cost(costs, num_stages)) <= 1.05 * best


def test_large_head_does_not_upset_the_other_stages() -> None:
    # The head alone sets the maximum; the rest must be even all the same.
    stages = partition_by_cost([1] * 9 + [100], 4)
    assert lengths(stages) == [3, 3, 3, 1]


def test_embedding_and_head_count() -> None:
    embedding, layer, head = 5.0, 1.0, 5.0
    stages = partition_by_cost([embedding, *[layer] * 10, head], 4)
    assert stage_costs([embedding, *[layer] * 10, head], stages) == [5, 5, 5, 5]


def test_costs_in_seconds_do_not_break_ties_at_random() -> None:
    # 0.1 + 0.2 != 0.3 in binary: neither the least maximum nor a tie may depend on it.
    assert lengths(partition_by_cost([0.1] * 6, 3)) == [2, 2, 2]
    assert lengths(partition_by_cost([1e-300] * 4 + [1e300], 3)) == [2, 2, 1]


def test_explicit() -> None:
    assert explicit_partition([2, 1, 3], 6, 3) == [range(2), range(2, 3), range(3, 6)]


@pytest.mark.parametrize(
    ("num_items", "num_stages", "counts", "nearest"),
    [
        (6, 3, [2, 2], "partition=[2, 2, 2]"),
        (7, 3, [2, 2, 2, 1], "partition=[2, 2, 3]"),
        (6, 3, [], "partition=[2, 2, 2]"),
        (6, 3, [3, 0, 3], "partition=[2, 1, 3]"),
        (6, 3, [4, -1, 3], "partition=[2, 1, 3]"),
        (6, 3, [2, 2, 3], "partition=[2, 2, 2]"),
        (6, 3, [1, 1, 1], "partition=[2, 2, 2]"),
        (6, 3, [2, "2", 2], "partition=[2, 2, 2]"),
        (6, 3, [2.0, 2, 2], "partition=[2, 2, 2]"),
        (6, 3, [True, 3, 2], "partition=[1, 3, 2]"),
        (6, 3, [float("nan"), 3, float("inf")], "partition=[1, 3, 2]"),
        (6, 3, [10**6, 1, 1], "partition=[4, 1, 1]"),
        (3, 4, [1, 1, 1, 0], "pp*stages_per_rank=3, or 4 items"),
    ],
)
def test_wrong_lists(num_items: int, num_stages: int, counts: list[Any], nearest: str) -> None:
    (problem,) = partition_problems(num_items, num_stages, counts=counts)
    assert problem.endswith(f"; nearest valid: {nearest}")
    with pytest.raises(ConfigError):
        explicit_partition(counts, num_items, num_stages)


@given(st.integers(1, 12), st.integers(1, 6), st.lists(st.integers(-3, 9), max_size=6))
def test_nearest_list_is_legal(num_items: int, num_stages: int, counts: list[int]) -> None:
    problems = partition_problems(num_items, num_stages, counts=counts)
    legal = len(counts) == num_stages and min(counts, default=0) >= 1 and sum(counts) == num_items
    assert bool(problems) != legal
    if problems and num_items >= num_stages:
        nearest = problems[0].rpartition("partition=[")[2].rstrip("]")
        again = [int(count) for count in nearest.split(",")]
        assert partition_problems(num_items, num_stages, counts=again) == []


@pytest.mark.parametrize(
    ("num_items", "num_stages", "costs", "says"),
    [
        (0, 2, [], "pp*stages_per_rank=2, items=0"),
        (1, 2, [1.0], "nearest valid: pp*stages_per_rank=1, or 2 items"),
        (2, 0, [1.0, 1.0], "nearest valid: pp*stages_per_rank=1"),
        (2, 2, [1.0], "1 costs are listed, the network has 2 items"),
        (2, 2, [1.0, -1.0], "costs[1]=-1.0"),
        (2, 2, [math.nan, 1.0], "costs[0]=nan"),
        (2, 2, [1.0, math.inf], "costs[1]=inf"),
    ],
)
def test_wrong_requests(num_items: int, num_stages: int, costs: list[float], says: str) -> None:
    (problem,) = partition_problems(num_items, num_stages, costs=costs)
    assert says in problem
    assert "nearest valid: " in problem


def test_wrong_costs_raise() -> None:
    with pytest.raises(ConfigError, match="2 items"):
        partition_by_cost([1.0], 2)
    with pytest.raises(ConfigError, match="finite"):
        partition_by_cost([1.0, math.nan], 2)


def test_many_items_and_stages() -> None:
    costs = [1.0 + (i % 7) * 0.1 for i in range(256)]
    stages = partition_by_cost(costs, 64)
    assert max(stage_costs(costs, stages)) <= sum(costs) / 64 + max(costs)
