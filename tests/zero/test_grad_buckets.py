"""Averaging of gradients in buckets, whole or to their owners."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.grad_buckets import GradientBuckets, ReductionGroups
from lightning_megatron.zero.owned_rows import OwnedRows

WIDTH, LAYERS = 5, 5


def world() -> dist.ProcessGroup:
    """All processes of the job."""
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    return group


def backward_job(
    skip: dict[int, int], dtype: str = "float64", rows: bool = False, each: bool = False
) -> list[list[float] | None]:
    """Gradients after two accumulated backwards of which the second reduces.

    Args:
        skip: for each rank the layer that it does not use.
        dtype: of the parameters.
        rows: whether gradients go to their owners; what these have is put together again.
        each: whether both backwards reduce.
    """
    group = world()
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
    layers.to(getattr(torch, dtype))
    layers[1].requires_grad_(False)
    layers[4].weight = layers[0].weight  # shared
    parameters = list(layers.parameters())
    size = WIDTH * WIDTH * 8
    owned = {p: OwnedRows(p, 2, rank) for p in parameters}
    groups = ReductionGroups(everyone=group, shard=group if rows else None)
    reducer = GradientBuckets(
        parameters, dict.fromkeys(parameters, groups), rows=owned, bucket_bytes=size
    )
    for index in range(2):
        if index == 1 or each:
            reducer.arm()
        x: Tensor = torch.full((2, WIDTH), 1.0 + rank, dtype=parameters[0].dtype)
        for number, layer in enumerate(layers):
            if number != skip.get(rank):
                x = torch.tanh(layer(x))
        x.sum().backward()
        if index == 1 or each:
            reducer.finish()
    reducer.settle()
    if rows:
        assert all(p.grad is None for p in parameters)
        return [put_together(owned[p]) for p in parameters]
    return [None if p.grad is None else p.grad.double().flatten().tolist() for p in parameters]


def put_together(rows: OwnedRows) -> list[float] | None:
    mine = None if rows.gradient is None else rows.gradient.double()
    parts: list[Any] = [None, None]
    dist.all_gather_object(parts, mine)
    if parts[0] is None:
        assert parts[1] is None
        return None
    whole = torch.cat(parts)
    assert whole.shape == rows.parameter.shape
    return whole.flatten().tolist()


def mean_of_alone(skip: dict[int, int], dtype: str) -> list[Any]:
    """The same, computed in one process."""
    total: list[Any] = []
    for rank in range(2):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        layers.to(getattr(torch, dtype))
        layers[1].requires_grad_(False)
        layers[4].weight = layers[0].weight
        for _ in range(2):
            x = torch.full((2, WIDTH), 1.0 + rank, dtype=layers[0].weight.dtype)
            for number, layer in enumerate(layers):
                if number != skip.get(rank):
                    x = torch.tanh(layer(x))
            x.sum().backward()
        found = [None if p.grad is None else p.grad.double().flatten() for p in layers.parameters()]
        total.append(found)
    means = []
    for first, second in zip(*total, strict=True):
        if first is None and second is None:
            means.append(None)
            continue
        zeros = torch.zeros_like(second if first is None else first)
        a, b = (zeros if g is None else g for g in (first, second))
        means.append(((a + b) / 2).tolist())
    return means


@pytest.mark.parametrize(
    "skip",
    [{}, {0: 2}, {0: 3, 1: 2}, {0: 2, 1: 2}],
    ids=["all used", "one unused on a rank", "others unused on each", "one used by nobody"],
)
@pytest.mark.parametrize(
    "how", [{}, {"rows": True}, {"rows": True, "each": True}], ids=["whole", "rows", "each time"]
)
def test_every_gradient_is_the_mean(
    pool: WorkerPool, skip: dict[int, int], how: dict[str, bool]
) -> None:
    expected = mean_of_alone(skip, "float64")
    for found in pool.run(2, backward_job, skip, **how):
        assert [g is None for g in found] == [g is None for g in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == (None if theirs is None else pytest.approx(theirs, rel=1e-12))


def test_narrow_gradients_are_summed_in_float32(pool: WorkerPool) -> None:
    expected = mean_of_alone({}, "bfloat16")
    for found in pool.run(2, backward_job, {}, "bfloat16"):
        for ours, theirs in zip(found, expected, strict=True):
            if theirs is not None:
                rounded = torch.tensor(theirs).to(torch.bfloat16).double().tolist()
                assert ours == rounded


def order_job() -> list[int]:
    """How many buckets were started when the backward ended."""
    group = world()
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    reducer = GradientBuckets(
        list(layers.parameters()),
        dict.fromkeys(layers.parameters(), ReductionGroups(everyone=group)),
        bucket_bytes=1,
    )
    reducer.arm()
    started = []
    for layer in layers:
        layer.register_full_backward_hook(lambda *_: started.append(reducer._started))
    layers(torch.ones(2, WIDTH)).sum().backward()
    reducer.finish()
    return started


def test_reduction_starts_while_backward_runs(pool: WorkerPool) -> None:
    for started in pool.run(2, order_job):
        assert started == sorted(started)
        assert 0 < started[1] < 2 * LAYERS


def reentrant_job() -> None:
    group = world()
    layer = nn.Linear(WIDTH, WIDTH)
    names = dict(zip(layer.parameters(), ("layer.weight", "layer.bias"), strict=True))
    groups = dict.fromkeys(names, ReductionGroups(everyone=group))
    reducer = GradientBuckets(list(names), groups, names=names)
    reducer.arm()
    x = torch.ones(2, WIDTH, requires_grad=True)
    checkpoint(layer, layer(x), use_reentrant=True).sum().backward()


def test_a_gradient_that_comes_in_two_parts_is_an_error(pool: WorkerPool) -> None:
    """It would be averaged before it is complete."""
    with pytest.raises(Exception, match=r"layer\.(weight|bias): one backward gave it two.*reentr"):
        pool.run(2, reentrant_job)
