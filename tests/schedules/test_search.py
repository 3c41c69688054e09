"""schedule="auto": the fastest that fits, by simulation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.schedule import SCHEDULES
from lightning_megatron.schedules.search import StageCosts, choose_schedule

EVEN = StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0)
SENT = StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0, send=0.01)
BOTH = {1: SENT, 2: SENT.split(2)}


def chosen(*args: object, **options: object) -> str:
    return choose_schedule(*args, **options).schedule.name  # type: ignore[arg-type]


def test_smallest_bubble_without_limit() -> None:
    choice = choose_schedule(4, 12, BOTH)
    assert choice.schedule.name == "dualpipev"  # before zbv, as its pairs leave slack for transfers
    assert choice.schedule.num_microbatches == 12
    assert {candidate.name for candidate in choice.candidates} == set(SCHEDULES)
    assert all(candidate.fits for candidate in choice.candidates)
    times = [candidate.step_time for candidate in choice.candidates]
    assert times == sorted(times)


def test_memory_decides() -> None:
    assert chosen(4, 12, BOTH, memory_limit=4.0) == "zbv"
    assert chosen(4, 12, BOTH, memory_limit=3.9) == "v-half"
    assert chosen(4, 12, BOTH, memory_limit=2.0) == "v-min"
    assert chosen(4, 12, BOTH, memory_limit=[4.0, 3.0, 2.0, 1.0]) == "1f1b"


def test_stages_per_rank_decide() -> None:
    choice = choose_schedule(4, 12, {1: EVEN})
    assert choice.schedule.name == "zb-h1"  # as fast as zb-h2, in less memory
    assert {candidate.stages_per_rank for candidate in choice.candidates} == {1}
    assert "interleaved" not in {candidate.name for candidate in choice.candidates}


def test_costs_decide() -> None:
    # Weight halves that take no time fill no bubble, and splitting is not free.
    times = {"forward": 1.0, "backward_input": 2.0, "backward_weight": 0.5}
    assert chosen(4, 12, {1: StageCosts(**times, backward=2.0)}) == "1f1b"
    assert chosen(4, 12, {1: StageCosts(**times)}, memory_limit=4.0) == "zb-h1"
    # Slow transfers: two stages on a rank mean twice as many, and waiting for each costs most.
    slow = StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0, send=3.0)
    assert chosen(2, 4, {1: slow, 2: slow.split(2)}, names=("1f1b", "gpipe", "zbv")) == "gpipe"


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError) as error:
        choose_schedule(4, 12, BOTH, memory_limit=1.5)
    message = str(error.value)
    assert message.startswith("schedule='auto', memory_limit=1.5: no schedule keeps")
    assert "memory_limit=2.0 for schedule='v-min' with stages_per_rank=2" in message
    assert chosen(4, 12, BOTH, memory_limit=2.0) == "v-min"


def test_no_schedule_for_these_stages() -> None:
    with pytest.raises(ConfigError, match=r"stages_per_rank=\[3\]: none of 1f1b, zbv runs"):
        choose_schedule(4, 12, {3: EVEN}, names=("1f1b", "zbv"))


def test_table() -> None:
    choice = choose_schedule(2, 4, {1: EVEN}, memory_limit=2.0, names=("gpipe", "1f1b"))
    assert choice.table().splitlines() == [
        "schedule  stages/rank  step time  bubble  peak activation",
        "1f1b                1         15   20.0%                2",
        "gpipe               1         15   20.0%       4 too much",
    ]


def test_activations_are_weighed() -> None:
    heavy_end = StageCosts(
        forward=1.0, backward_input=1.0, backward_weight=1.0, activation=[1.0, 1.0, 1.0, 50.0]
    )
    (candidate,) = choose_schedule(4, 8, {1: heavy_end}, names=("1f1b",)).candidates
    assert candidate.peak_activation == (4.0, 3.0, 2.0, 50.0)


def test_split() -> None:
    costs = StageCosts(
        forward=[2.0, 4.0],
        backward_input=2.0,
        backward_weight=1.0,
        backward=3.0,
        send=[0.5],
        activation=[10.0, 20.0],
    ).split(2)
    assert costs == StageCosts(
        forward=[1.0, 1.0, 2.0, 2.0],
        backward_input=1.0,
        backward_weight=0.5,
        backward=1.5,
        send=0.5,
        activation=[5.0, 5.0, 10.0, 10.0],
    )


def test_wrong_number_of_costs() -> None:
    costs = StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0, activation=[1.0])
    with pytest.raises(ValueError, match="activation holds 1 numbers; 4 are needed"):
        choose_schedule(4, 8, {1: costs})
    with pytest.raises(ValueError, match="memory_limit holds 1 numbers; 4 are needed"):
        choose_schedule(4, 8, {1: EVEN}, memory_limit=[1.0])


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 10), st.lists(st.floats(0.1, 5.0), min_size=4, max_size=4))
def test_nothing_that_fits_is_faster(p: int, m: int, times: list[float]) -> None:
    forward, backward_input, backward_weight, limit = times
    costs = StageCosts(
        forward=forward, backward_input=backward_input, backward_weight=backward_weight, send=0.1
    )
    options = {1: costs, 2: costs.split(2), 3: costs.split(3)}
    try:
        choice = choose_schedule(p, m, options, memory_limit=limit)
    except ConfigError:
        assert limit < max(1, (p + 4) // 3)
        return
    best = choice.candidates[0]
    assert (best.name, best.stages_per_rank) == (
        choice.schedule.name,
        choice.schedule.stages_per_rank,
    )
    assert max(best.peak_activation) <= limit
    for other in choice.candidates:
        assert not other.fits or other.step_time >= best.step_time * (1 - 1e-8)


def test_the_longest_transfer_counts_when_stages_are_cut() -> None:
    costs = StageCosts(forward=1.0, backward_input=1.0, backward_weight=1.0, send=[0.5, 2.0, 1.0])
    assert costs.split(2).send == 2.0


def test_limits_by_rank_are_met_rank_by_rank() -> None:
    with pytest.raises(ConfigError) as error:
        choose_schedule(
            4, 12, {1: EVEN}, memory_limit=[9.0, 9.0, 9.0, 0.5], names=("gpipe", "1f1b")
        )
    assert "memory_limit=[4.0, 3.0, 2.0, 1.0] for schedule='1f1b'" in str(error.value)
