"""Held against the schedules of the same names in torch: never slower, never more memory."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_megatron.schedules.actions import Action, Kind, Schedule, looped, v_shaped
from lightning_megatron.schedules.custom import dump_schedule, parse_schedule
from lightning_megatron.schedules.schedule import make_schedule
from lightning_megatron.schedules.simulate import simulate

TIMES: tuple[dict[str, Any], ...] = (
    {},
    {"send": 0.1},
    {"backward_input": 1.1, "backward_weight": 0.8},
    {"backward_input": 2.0, "backward_weight": 0.9, "send": 0.05},  # recomputed activations
)


def assert_not_worse(ours: Schedule, reference: Schedule) -> None:
    for times in TIMES:
        mine, theirs = simulate(ours, **times), simulate(reference, **times)
        assert mine.step_time <= theirs.step_time + 1e-9, times
        assert mine.bubble_fraction <= theirs.bubble_fraction + 1e-9, times
    assert max(mine.peak_live) <= max(theirs.peak_live)


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

    # torch from 2.15 on
    release_fwd_send_outputs = no_operations


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


ONE_STAGE = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}


@pytest.mark.parametrize("name", ONE_STAGE)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_one_stage(name: str, p: int, extra: int) -> None:
    m = p + extra  # torch refuses fewer microbatches than stages
    reference = order_that_torch_executes(ONE_STAGE[name], p, m)
    assert sum(map(len, reference.actions)) == 2 * p * m
    ours = make_schedule(name, p, m)
    assert_not_worse(ours, reference)
    uneven = [1.0 + 0.3 * (stage % 3) for stage in range(p)]
    times = {"forward": uneven, "backward": [2 * t for t in uneven]}
    assert simulate(ours, **times).step_time <= simulate(reference, **times).step_time + 1e-9


def stages_of_first_rank(placement: tuple[int, ...]) -> list[Any]:
    """Stand-ins from which torch makes its tables."""
    return [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(placement),
            group_size=1 + max(placement),
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == len(placement) - 1,
            submod=torch.nn.Identity(),
            has_backward=True,
        )
        for stage, rank in enumerate(placement)
        if rank == 0
    ]


def table_of_torch(schedule_class: Any, p: int, m: int, placement: tuple[int, ...]) -> Schedule:
    """Read the table that torch makes for stages placed like this."""
    stages = stages_of_first_rank(placement)
    order = schedule_class(stages, m, loss_fn=lambda output, target: output).pipeline_order
    entries = [["" if entry is None else str(entry) for entry in order[rank]] for rank in range(p)]
    return parse_schedule(entries)


SEVERAL_STAGES: dict[str, tuple[type, tuple[int, ...]]] = {
    "interleaved": (pipelining.ScheduleInterleaved1F1B, (2, 3)),
    "breadth-first": (pipelining.ScheduleLoopedBFS, (1, 2, 3)),
    "zb-h1": (pipelining.ScheduleInterleavedZeroBubble, (1, 2, 3)),
    "zbv": (pipelining.ScheduleZBVZeroBubble, (2,)),
    "dualpipev": (pipelining.ScheduleDualPipeV, (2,)),
}


@pytest.mark.parametrize("p", [1, 2, 3, 4, pytest.param(6, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_several_stages(name: str, p: int) -> None:
    schedule_class, numbers = SEVERAL_STAGES[name]
    compared = 0
    for v in numbers:
        placement = v_shaped(p) if name in ("zbv", "dualpipev") else looped(p, v)
        for m in sorted({1, 2, p, p + 1, 2 * p, 2 * p + 3, 4 * p}):
            ours = make_schedule(name, p, m, v)  # any number of microbatches
            assert ours.stage_ranks == placement
            try:
                reference = table_of_torch(schedule_class, p, m, placement)
            except ValueError:
                continue  # torch refuses this number of microbatches
            assert_not_worse(ours, reference)
            compared += 1
    assert compared >= 2 * len(numbers)


def test_torch_reads_our_tables(tmp_path: Any) -> None:
    ours = make_schedule("v-min", 4, 6)
    dump_schedule(ours, tmp_path / "v_min.csv")
    stages = stages_of_first_rank(ours.stage_ranks)
    runtime_class: Any = torch_schedules._PipelineScheduleRuntime
    runtime = runtime_class(stages, 6, loss_fn=lambda output, target: output)
    runtime._load_csv(str(tmp_path / "v_min.csv"))
    order = runtime.pipeline_order
    read = parse_schedule([[str(entry) for entry in order[rank]] for rank in range(4)])
    assert read.actions == ours.actions
    assert read.stage_ranks == ours.stage_ranks
