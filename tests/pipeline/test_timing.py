"""Measured steps against the simulation of the same times."""

import time

import pytest
import torch

from lightning_megatron.pipeline.timing import ActionClock, StepTimes, bubble
from lightning_megatron.schedules.schedule import Kind, make_schedule
from lightning_megatron.schedules.simulate import simulate

COSTS = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zbv"])
def test_a_perfect_run_has_the_ideal_bubble(name: str) -> None:
    schedule = make_schedule(name, 4, 6)
    plan = simulate(schedule, forward=1.0, backward_input=1.0, backward_weight=1.0)
    times = [
        StepTimes(tuple(COSTS[action.kind] for action in row), plan.step_time)
        for row in schedule.actions
    ]
    found = bubble(schedule, times)
    assert found.fraction == pytest.approx(plan.bubble_fraction)
    assert found.ideal == pytest.approx(plan.bubble_fraction)
    assert found.forward == (1.0,) * schedule.num_stages
    assert found.backward == (2.0,) * schedule.num_stages
    assert found.imbalance == pytest.approx(1.0)


def test_waiting_and_imbalance_show() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    slow = [
        StepTimes(tuple(COSTS[a.kind] * (1 + rank) for a in row), 60.0)
        for rank, row in enumerate(schedule.actions)
    ]
    found = bubble(schedule, slow)
    assert found.imbalance == pytest.approx(24 / 18)
    assert found.fraction == pytest.approx(1 - 18 / 60)
    assert found.ideal < found.fraction


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_no_step_beats_the_paper(name: str) -> None:
    """Ranks that share cores are slower while all of them compute than beside a bubble."""
    schedule = make_schedule(name, 4, 8)
    even = simulate(schedule)
    measured = {}
    for spans in even.spans:
        for start, end, action in spans:
            together = all(
                any(s.start < end and start < s.end for s in other) for other in even.spans
            )
            measured[action] = (end - start) * (3.0 if together else 1.0)
    run = simulate(schedule, measured=measured)
    times = [
        # A rank's own clock begins when it does, not with the first rank's.
        StepTimes(tuple(measured[a] for a in row), run.step_time - run.spans[rank][0].start)
        for rank, row in enumerate(schedule.actions)
    ]
    found = bubble(schedule, times)
    assert found.fraction == pytest.approx(run.bubble_fraction)
    assert found.ideal == pytest.approx(run.bubble_fraction)
    halves = {"backward_input": found.backward_input, "backward_weight": found.backward_weight}
    means = simulate(schedule, forward=found.forward, backward=found.backward, **halves)
    assert means.bubble_fraction > found.fraction + 0.01  # by the mean times of the stages


def test_a_last_action_on_a_rank_that_began_late() -> None:
    schedule = make_schedule("gpipe", 2, 1)
    times = [StepTimes((4.0, 1.0), 8.0), StepTimes((1.0, 2.0), 3.0)]
    assert bubble(schedule, times).fraction == pytest.approx(0.5)
    short = [StepTimes((4.0, 1.0), 5.0), StepTimes((1.0, 2.0), 3.0)]
    found = bubble(schedule, short)
    assert found.fraction == found.ideal == pytest.approx(0.5)


def test_the_slowest_rank_ends_the_step_and_actions_have_their_mean() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    ranks = [
        StepTimes(tuple(float(i * i) for i, _ in enumerate(row)), 300.0 - 100 * rank)
        for rank, row in enumerate(schedule.actions)
    ]
    found = bubble(schedule, ranks)
    assert found.fraction == pytest.approx(1 - sum(i * i for i in range(8)) / 300)
    row, busy = schedule.actions[0], ranks[0].busy
    first = [t for a, t in zip(row, busy, strict=True) if a.kind is Kind.FORWARD]
    assert found.forward[0] == pytest.approx(sum(first) / 4)


def test_the_clock_leaves_waiting_out() -> None:
    clock = ActionClock(torch.device("cpu"))
    clock.begin()
    for _ in range(3):
        time.sleep(0.02)
        clock.start()
        time.sleep(0.01)
        clock.stop()
    clock.end()
    times = clock.read()
    assert len(times.busy) == 3
    assert all(seconds > 0.009 for seconds in times.busy)
    assert times.step - sum(times.busy) > 0.059


def test_a_backward_in_one_piece_has_two_equal_halves() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    times = [StepTimes(tuple(COSTS[a.kind] for a in row), 15.0) for row in schedule.actions]
    found = bubble(schedule, times)
    assert found.backward_input == found.backward_weight == (1.0, 1.0)
