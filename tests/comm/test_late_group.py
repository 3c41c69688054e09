"""Layouts train on branches of devices, where work is late and NCCL's rules hold, as over gloo.

And each rule finds a planted fault of its kind.
"""

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_megatron import ConnectionConfig
from lightning_megatron._torch.collectives import start_all_gather
from lightning_megatron.testing import WorkerPool
from lightning_megatron.testing.failures import WorkerError
from lightning_megatron.topology.meter import Meter
from lightning_megatron.zero import fsdp_comm
from tests._torch.device_branches import device_branches
from tests.comm.late_group import late_groups
from tests.parity import expert_layouts, layouts
from tests.parity.expert_layouts import ExpertLayout
from tests.parity.jobs import train_job
from tests.parity.layouts import Layout
from tests.parity.reference import Data, reference_curve
from tests.parity.test_matrix import check

LATE = ConnectionConfig(backend="late")


def late_job(job: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    with late_groups(), device_branches():
        return job({**options, "connection": LATE}, *args, **kwargs)


LAYOUTS = (
    Layout(dp=2, zero=0),
    Layout(tp=2, zero=0, sequence_parallel=True),
    Layout(tp=2, dp=2, zero=1),
    Layout(dp=2, zero=2, num_microbatches=2),
    Layout(dp=2, zero=3, architecture="gpt"),
    Layout(pp=2, num_microbatches=4, architecture="gpt"),
    Layout(pp=2, tp=2, schedule="zb-h1", num_microbatches=2),
    Layout(cp=2, dp=2, zero=2),
    ExpertLayout(dp=2, ep=2, zero=1, num_microbatches=2),
)


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        *(
            pytest.param(one, marks=pytest.mark.thorough)
            for one in (*layouts.LAYOUTS, *expert_layouts.EXPERT_LAYOUTS)
            if one.world_size <= 4
        ),
    ],
    ids=str,
)
def test_trains_as_a_plain_loop_does(pool: WorkerPool, layout: Layout) -> None:
    data = Data(steps=2) if layout.cp == 1 else Data(steps=2, lengths=(8, 7))
    outcomes = pool.run(
        layout.world_size,
        *(late_job, train_job, layout.strategy_options(), layout.architecture, data),
    )
    check(outcomes, reference_curve(layout.architecture, data))


# Planted faults -----------------------------------------------------------------------------------


def _whole() -> tuple[torch.Tensor, torch.Tensor, Any]:
    """A gather that is under way, what it sends and where it writes."""
    part, whole = torch.ones(2), torch.zeros(4)
    return part, whole, dist.all_gather_into_tensor(whole, part, async_op=True)


def reads_too_early(rank: int) -> None:
    _, whole, work = _whole()
    found = whole.sum()
    work.wait()
    assert found == 4


def writes_an_input(rank: int) -> None:
    part, _, work = _whole()
    part.zero_()
    work.wait()


def writes_a_destination(rank: int) -> None:
    _, whole, work = _whole()
    whole[0] = 3
    work.wait()


def nobody_waits(rank: int) -> None:
    _whole()


def order_of_one_rank(rank: int) -> None:
    calls: list[Any] = [dist.all_reduce, lambda x: dist.broadcast(x, 0)]
    for call in calls[:: 1 - 2 * rank]:
        call(torch.ones(2))


def operator_of_one_rank(rank: int) -> None:
    dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)


def size_of_one_rank(rank: int) -> None:
    dist.all_reduce(torch.ones(2 + rank))


def parts_of_other_sizes(rank: int) -> None:
    dist.all_gather([torch.empty(2), torch.empty(3)], torch.ones(2 + rank))


def type_that_nccl_has_not(rank: int) -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.int16))


def not_contiguous(rank: int) -> None:
    dist.broadcast(torch.ones(4, 2).t(), 0)


def message_of_another_size(rank: int) -> None:
    """Gloo accepts one that is shorter."""
    dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.empty(3), 0)


def messages_that_cross(rank: int) -> None:
    """Both send first; gloo has room for what nobody has asked for."""
    sent = dist.isend(torch.ones(2), 1 - rank)
    dist.recv(torch.empty(2), 1 - rank)
    sent.wait()


def messages_by_their_tags(rank: int) -> None:
    if rank == 0:
        works = [dist.isend(torch.ones(2 + tag), 1, tag=tag) for tag in (0, 1)]
    else:
        works = [dist.irecv(torch.empty(2 + tag), 0, tag=tag) for tag in (1, 0)]
    for work in works:
        work.wait()


def from_any_rank(rank: int) -> None:
    dist.recv(torch.empty(2)) if rank else dist.send(torch.ones(2), 1)


FAULTS = {
    reads_too_early: "AssertionError",
    writes_an_input: "an input was written",
    writes_a_destination: "a destination was written",
    nobody_waits: "nobody waited",
    order_of_one_rank: "different operations",
    operator_of_one_rank: "different operations",
    size_of_one_rank: "different operations",
    parts_of_other_sizes: "not of equal sizes",
    type_that_nccl_has_not: "NCCL has no torch.int16",
    not_contiguous: "not contiguous",
    message_of_another_size: "message 1 of 3 numbers",
    messages_that_cross: "message 2 of 2 numbers",
    messages_by_their_tags: "message 1 of 3 numbers",
    from_any_rank: "from any rank",
}


def faulty(fault: Callable[[int], None]) -> None:
    with late_groups():
        dist.init_process_group("late")
        fault(dist.get_rank())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_finds(pool: WorkerPool, fault: Callable[[int], None]) -> None:
    with pytest.raises(WorkerError, match=FAULTS[fault]):
        pool.run(2, faulty, fault, grace=2)


def without_waits(module: str, *args: Any) -> Any:
    """Train where a module of the package does not wait for what it has begun."""
    if module == "zero.fsdp_comm":
        with mock.patch.object(fsdp_comm, "gather_now", start_all_gather):
            return late_job(train_job, *args)
    wait = Meter.wait

    def waits(self: Meter, work: Any) -> None:
        if sys._getframe(1).f_globals["__name__"] != f"lightning_megatron.{module}":
            wait(self, work)

    with mock.patch.object(Meter, "wait", waits):
        return late_job(train_job, *args)


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        ("zero.grad_buckets", Layout(dp=2, zero=0)),
        ("zero.row_gather", Layout(dp=2, zero=1)),
        ("zero.fsdp_comm", Layout(dp=2, zero=3)),
        ("comm.collectives", Layout(tp=2)),
        ("comm.point_to_point", Layout(pp=2)),
        ("layers.context_attention.ring", Layout(cp=2)),
        ("layers.context_attention.ulysses", Layout(cp=2, kind="ulysses")),
    ],
    ids=str,
)
def test_finds_a_wait_that_is_missing(pool: WorkerPool, module: str, layout: Layout) -> None:
    data, architecture = Data(steps=2), layout.architecture
    with pytest.raises((AssertionError, WorkerError)):
        check(
            pool.run(2, without_waits, module, layout.strategy_options(), architecture, data),
            reference_curve(architecture, data),
        )
