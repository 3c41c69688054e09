"""Axes of a topology, and the groups that several of them share."""

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.axis import axis_of
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology


def shared_job(degrees: Degrees) -> dict[str, str]:
    """Name of the axis that compiled graphs find by the key of each axis of a group."""
    dist.init_process_group("gloo")
    topology = Topology(degrees, torch.device("cpu"))
    axes = (topology.tp, topology.loss, topology.ep, topology.efsdp, topology.expert_loss)
    found = {axis.name: axis_of(axis.key).name for axis in axes if axis.group is not None}
    topology.close()
    return found


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        # What tp sends stays on the meter of tp, though ranks of efsdp are the same.
        (Degrees(tp=2), {"tp": "tp", "efsdp": "tp", "expert_loss": "tp"}),
        (Degrees(dp_shard=2, ep=2), {"loss": "dp_shard", "ep": "ep"}),
        (Degrees(tp=2, ep=2), {"tp": "tp", "ep": "ep"}),
    ],
    ids=str,
)
def test_axes_with_the_same_ranks(
    pool: WorkerPool, degrees: Degrees, expected: dict[str, str]
) -> None:
    assert pool.run(2, shared_job, degrees) == [expected, expected]
