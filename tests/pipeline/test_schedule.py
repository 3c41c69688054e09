"""Schedules: every action once and in a legal order, and never worse than torch's own."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_megatron.errors import ConfigError
from lightning_megatron.pipeline import schedule as schedule_module
from lightning_megatron.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    forward_only,
    make_schedule,
    schedule_problems,
)
from lightning_megatron.pipeline.simulate import render, simulate

names = st.sampled_from(SCHEDULES)
ranks = st.integers(1, 9)
microbatches = st.integers(1, 20)


def test_names() -> None:
    assert {"gpipe", "1f1b"} <= set(SCHEDULES)


@given(names, ranks, microbatches)
def test_every_action_once_on_its_rank(name: str, p: int, m: int) -> None:
    schedule = make_schedule(name, p, m)
    expected = {Action(kind, s, b) for kind in Kind for s in range(p) for b in range(m)}
    found = Counter(action for actions in schedule.actions for action in actions)
    assert found == Counter(expected)
    for rank, actions in enumerate(schedule.actions):
        assert {schedule.rank_of_stage(action.stage) for action in actions} == {rank}


@given(names, ranks, microbatches)
def test_dependencies_hold(name: str, p: int, m: int) -> None:
    schedule = make_schedule(name, p, m)
    spans = {span.action: span for rank in simulate(schedule).spans for span in rank}
    for action, span in spans.items():
        assert all(spans[needed].end <= span.start for needed in schedule.needs(action))


@given(names, ranks, microbatches)
def test_gradients_accumulate_in_the_same_order_everywhere(name: str, p: int, m: int) -> None:
    # Floating-point sums depend on the order, and parameters shared by stages compare them.
    for actions in make_schedule(name, p, m).actions:
        for kind in Kind:
            assert [a.microbatch for a in actions if a.kind is kind] == list(range(m))


def test_needs() -> None:
    schedule = make_schedule("gpipe", 3, 2)

    def needs(kind: Kind, stage: int) -> list[str]:
        return [str(action) for action in schedule.needs(Action(kind, stage, 1))]

    assert needs(Kind.FORWARD, 0) == []
    assert needs(Kind.FORWARD, 2) == ["F1.1"]
    assert needs(Kind.BACKWARD, 2) == ["F2.1"]
    assert needs(Kind.BACKWARD, 0) == ["F0.1", "B1.1"]


def test_orders_of_a_small_case() -> None:
    def order(name: str, rank: int) -> str:
        actions = make_schedule(name, 3, 4).actions[rank]
        return " ".join(f"{a.kind.value}{a.microbatch}" for a in actions)

    assert order("gpipe", 1) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert order("1f1b", 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert order("1f1b", 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert order("1f1b", 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_fewer_microbatches_than_ranks() -> None:
    schedule = make_schedule("1f1b", 4, 1)
    assert [str(a) for actions in schedule.actions for a in actions] == [
        *("F0.0", "B0.0", "F1.0", "B1.0", "F2.0", "B2.0", "F3.0", "B3.0")
    ]


@given(ranks, microbatches)
def test_forward_only(p: int, m: int) -> None:
    schedule = forward_only(p, m)
    found = Counter(action for actions in schedule.actions for action in actions)
    assert found == Counter(Action(Kind.FORWARD, s, b) for s in range(p) for b in range(m))
    timeline = simulate(schedule)
    assert timeline.step_time == m + p - 1
    assert timeline.peak_live == (1,) * p


@given(st.lists(st.integers(0, 3), min_size=4, max_size=12), microbatches)
def test_forward_only_runs_under_any_placement(placement: list[int], m: int) -> None:
    schedule = forward_only(4, m, placement)
    simulate(schedule)  # raises on a deadlock
    assert schedule.num_stages == len(placement)
    assert sum(map(len, schedule.actions)) == m * len(placement)


def test_placement_of_several_stages_on_a_rank() -> None:
    v_shaped = Schedule("v", 1, (0, 1, 1, 0), ((), ()))
    assert v_shaped.num_ranks == 2
    assert v_shaped.num_stages == 4
    assert v_shaped.stages_per_rank == 2
    assert v_shaped.last_stage_rank == 0
    assert v_shaped.stages_of_rank(0) == (0, 3)
    assert v_shaped.stages_of_rank(1) == (1, 2)


def test_lecture_shows_the_real_timelines() -> None:
    lecture = {line.strip() for line in (schedule_module.__doc__ or "").splitlines()}
    for name in SCHEDULES:
        drawing = render(simulate(make_schedule(name, 4, 6)))
        assert set(drawing.splitlines()) <= lecture


@pytest.mark.parametrize(
    ("arguments", "option", "nearest"),
    [
        (("1F1B", 2, 2, 1), "schedule='1F1B'", "schedule='1f1b'"),
        (("g-pipe", 2, 2, 1), "schedule='g-pipe'", "schedule='gpipe'"),
        (("xyz", 2, 2, 1), "schedule='xyz'", "schedule='1f1b'"),
        (("1f1b", 0, 2, 1), "pp=0", "pp=1"),
        (("1f1b", 2, 0, 1), "num_microbatches=0", "num_microbatches=1"),
        (("1f1b", 2, 1.5, 1), "num_microbatches=1.5", "num_microbatches=1"),
        (("1f1b", 2, 2, 0), "stages_per_rank=0", "stages_per_rank=1"),
        (("1f1b", 2, 2, 2), "stages_per_rank=2", "stages_per_rank=1"),
    ],
)
def test_problems(arguments: tuple[Any, ...], option: str, nearest: str) -> None:
    (problem,) = schedule_problems(*arguments)
    given_part, _, remedy = problem.partition("; nearest valid: ")
    assert option in given_part
    assert remedy == nearest
    with pytest.raises(ConfigError) as error:
        make_schedule(*arguments)
    assert error.value.problems == (problem,)


def test_problems_come_together() -> None:
    assert len(schedule_problems("nothing", 0, 0, 0)) == 4
    assert schedule_problems("gpipe", 8, 1) == []


class RecordingStage:
    """Stands in for torch's pipeline stage and writes down what a schedule asks of it."""

    has_backward = True

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage, num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.group_size, self.group_rank = num_stages, stage
        self.submod = torch.nn.Identity()
        self.actions: list[Action] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.actions.append(Action(Kind.FORWARD, self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.actions.append(Action(Kind.BACKWARD, self.stage_index, microbatch))

    def perform_reduce_grad(self, *_: Any) -> None:
        """Nothing to reduce."""

    def no_operations(self, _: int) -> list[Any]:
        """Nothing to send or receive."""
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_operations


def order_that_torch_executes(schedule_class: type, p: int, m: int) -> Schedule:
    """Run torch's own step on recording stages.

    The tables of these two classes (`_get_pipeline_order`) are only for drawing, and that of 1F1B
    leaves out microbatch 0 on the last rank, so they are no reference.
    """
    actions = []
    for rank in range(p):
        stage = RecordingStage(rank, p)
        schedule = schedule_class(stage, m)
        with (
            mock.patch.object(schedule, "_initialize_stage"),
            mock.patch.object(torch_schedules, "_batch_p2p", return_value=[]),
            mock.patch.object(torch_schedules, "_sorted_batch_p2p", return_value={}),
        ):
            schedule._step_microbatches([()] * m, [{}] * m)
        actions.append(tuple(stage.actions))
    return Schedule(f"torch {schedule_class.__name__}", m, tuple(range(p)), tuple(actions))


TORCH_SCHEDULES = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


@pytest.mark.parametrize("name", TORCH_SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_not_worse_than_torch(name: str, p: int, extra: int) -> None:
    m = p + extra  # torch refuses fewer microbatches than stages
    reference = order_that_torch_executes(TORCH_SCHEDULES[name], p, m)
    assert sum(map(len, reference.actions)) == 2 * p * m
    ours = make_schedule(name, p, m)
    uneven = [1.0 + 0.3 * (stage % 3) for stage in range(p)]
    for times in (
        {},
        {"forward": uneven, "backward": [2 * t for t in uneven]},
        {"forward": 1.0, "backward": 2.0, "send": 0.25},
    ):
        mine, theirs = simulate(ours, **times), simulate(reference, **times)
        assert mine.step_time <= theirs.step_time + 1e-9
        assert mine.bubble_fraction <= theirs.bubble_fraction + 1e-9
        assert all(a <= b for a, b in zip(mine.peak_live, theirs.peak_live, strict=True))
