"""Partitions from measured times: never worse, nearly the best, the same on every rank."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.partition import partition_by_cost, stage_costs
from lightning_megatron.schedules.repartition import Repartition, repartition, spread_over_items
from lightning_megatron.schedules.schedule import make_schedule
from lightning_megatron.schedules.simulate import Timeline, simulate

LAYER = st.one_of(st.sampled_from([1.0, 4.0]), st.floats(1.0, 4.0))
"""Layers that differ by up to 4 times in cost."""


def every_partition(num_items: int, num_stages: int) -> list[tuple[range, ...]]:
    cuts = itertools.combinations(range(1, num_items), num_stages - 1)
    return [tuple(itertools.starmap(range, itertools.pairwise([0, *c, num_items]))) for c in cuts]


@settings(max_examples=40)
@given(
    st.data(),
    st.sampled_from([("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("zbv", 2)]),
    st.integers(2, 3),
    st.sampled_from([1, 2, 4]),
)
def test_nearly_the_best_whatever_the_schedule(
    data: st.DataObject, family: tuple[str, int], num_ranks: int, per_rank: int
) -> None:
    name, stages_per_rank = family
    schedule = make_schedule(name, num_ranks, per_rank * num_ranks, stages_per_rank)
    num_stages = schedule.num_stages
    costs = data.draw(st.lists(LAYER, min_size=num_stages, max_size=num_stages + 3))
    candidates = every_partition(len(costs), num_stages)
    current = data.draw(st.sampled_from(candidates))

    def step_time(stages: tuple[range, ...]) -> float:
        forward = stage_costs(costs, stages)
        return simulate(schedule, forward=forward, backward=[2 * f for f in forward]).step_time

    plan = repartition(schedule, current, costs, [2 * cost for cost in costs])
    assert plan.stages in candidates
    assert plan.step_time_before == pytest.approx(step_time(current))
    assert plan.step_time_after == pytest.approx(step_time(plan.stages))
    assert plan.step_time_after <= plan.step_time_before
    assert plan.step_time_after <= 1.05 * min(map(step_time, candidates))
    again = repartition(schedule, plan.stages, costs, [2 * cost for cost in costs])
    assert again.step_time_after <= plan.step_time_after


def test_few_microbatches_want_the_slowest_stage_early() -> None:
    schedule = make_schedule("1f1b", 2, 2)
    costs = [2.0, 1.0, 2.0]
    late = partition_by_cost(costs, 2)
    plan = repartition(schedule, late, costs, [2 * cost for cost in costs])
    assert stage_costs(costs, late) == [2, 3]
    assert stage_costs(costs, plan.stages) == [3, 2]
    assert plan.gain > 0.1


def test_nothing_changes_without_a_gain() -> None:
    stages = (range(0, 2), range(2, 4))
    plan = repartition(make_schedule("1f1b", 2, 8), stages, [0.1] * 4, [0.2] * 4)
    assert plan == Repartition(
        stages=stages, step_time_before=plan.step_time_after, step_time_after=plan.step_time_after
    )
    assert plan.gain == 0.0


def test_time_of_the_loss_moves_layers_away_from_it() -> None:
    # 8 equal layers and a head that takes as long as 3 of them.
    forward, backward = [*[1.0] * 8, 3.0], [*[2.0] * 8, 6.0]
    even = [range(0, 4), range(4, 9)]
    plan = repartition(make_schedule("1f1b", 2, 8), even, forward, backward)
    assert plan.step_time_before == 33 + 7 * 21
    assert plan.step_time_after < 33 + 7 * 18.1
    assert plan.gain == 1 - plan.step_time_after / plan.step_time_before


def test_ranks_of_a_v_share_the_work() -> None:
    # The slow item stands on rank 1 with stage 2, so the items behind it are better on stage 3.
    schedule = make_schedule("zbv", 2, 16)
    costs = [1.0, 4.0, 1.0, 1.0, 1.0, 1.0]
    even = partition_by_cost(costs, 4)
    assert stage_costs(costs, even) == [1, 4, 2, 2]
    plan = repartition(schedule, even, costs, [2 * cost for cost in costs])
    assert stage_costs(costs, plan.stages) == [1, 4, 1, 3]
    assert plan.gain > 0.1


def test_what_a_split_backward_puts_off_counts() -> None:
    schedule = make_schedule("zb-h1", 3, 6)
    stages = [range(0, 1), range(1, 2), range(2, 3)]
    times = [
        repartition(schedule, stages, [1.0] * 3, [2.0] * 3, weight_share=share).step_time_before
        for share in (0.0, 0.5)
    ]
    assert times[1] < times[0]


def test_transfers_count() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    stages = [range(0, 1), range(1, 2)]
    plan = repartition(schedule, stages, [1.0] * 2, [2.0] * 2, send=10.0)
    assert plan.step_time_before > 20


def test_no_time_at_all() -> None:
    plan = repartition(make_schedule("1f1b", 2, 2), [range(1), range(1, 2)], [0.0] * 2, [0.0] * 2)
    assert plan.gain == 0.0


def test_the_search_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Timeline:
        calls.append(args)
        return simulate(*args, **kwargs)

    module = "lightning_megatron.schedules.repartition"
    monkeypatch.setattr(f"{module}.simulate", counted)
    monkeypatch.setattr(f"{module}._MOST_ACTIONS", 10_000)
    schedule = make_schedule("interleaved", 8, 16, 2)  # 512 actions
    stages = [range(2 * i, 2 * i + 2) for i in range(16)]
    costs = [*[1.0] * 31, 8.0]
    plan = repartition(schedule, stages, costs, [2 * cost for cost in costs])
    assert plan.gain > 0
    assert 10 < len(calls) <= 10_000 // 512 + 3


@pytest.mark.parametrize(
    ("stages", "forward", "says"),
    [
        ([range(3)], [1.0] * 3, "1 stages are given; the schedule has 2"),
        ([range(2), range(2, 3)], [1.0] * 4, "4 forward and 3 backward times are given for 3"),
    ],
)
def test_numbers_that_do_not_fit(stages: list[range], forward: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        repartition(make_schedule("1f1b", 2, 4), stages, forward, [1.0] * 3)


def test_times_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="finite"):
        repartition(make_schedule("1f1b", 2, 4), [range(1), range(1, 2)], [math.nan, 1], [1, 1])


def test_spreading_keeps_the_time_of_stages() -> None:
    stages = [range(0, 2), range(2, 5)]
    items = spread_over_items([3.0, 8.0], stages, [1, 2, 0, 3, 1])
    assert items == [1.0, 2.0, 0.0, 6.0, 2.0]
    assert stage_costs(items, stages) == [3.0, 8.0]
    with pytest.raises(ValueError, match="zip"):
        spread_over_items([3.0], stages, [1] * 5)
