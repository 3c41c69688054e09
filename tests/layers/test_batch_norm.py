"""Batch norm over several ranks is batch norm over the whole batch."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_megatron.layers.batch_norm import SyncBatchNorm, synchronize_batch_norm
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.axis import Axis


def _deviations(momentum: float | None) -> list[float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    axis = Axis("batch", rank, (0, 1), dist.group.WORLD)
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 3, 4, 4, dtype=torch.float64)
    whole = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum)).double()
    split = synchronize_batch_norm(copy.deepcopy(whole), axis, torch.device("cpu"))
    assert isinstance(split[0], SyncBatchNorm)
    rows = slice(0, 2) if rank == 0 else slice(2, 5)
    x_whole, x_split = x.clone().requires_grad_(), x[rows].clone().requires_grad_()
    (whole(x_whole) * weight).sum().backward()
    (split(x_split) * weight[rows]).sum().backward()
    gradient = split[0].weight.grad.clone()
    dist.all_reduce(gradient)
    pairs = [
        (x_split.grad, x_whole.grad[rows]),
        (gradient, whole[0].weight.grad),
        (split[0].running_mean, whole[0].running_mean),
        (split[0].running_var, whole[0].running_var),
        (split.eval()(x), whole.eval()(x)),
    ]
    assert list(split.state_dict()) == list(whole.state_dict())
    assert isinstance(copy.deepcopy(split)[0], SyncBatchNorm)
    assert type(pickle.loads(pickle.dumps(split))[0]) is nn.BatchNorm2d  # no group to go with it
    return [float((a - b).abs().max()) for a, b in pairs]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_and_gradients_are_those_of_the_global_batch(
    pool: WorkerPool, momentum: float | None
) -> None:
    for deviations in pool.run(2, _deviations, momentum):
        assert max(deviations) < 1e-12
