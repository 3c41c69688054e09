"""Collectives with a gradient, against the same arithmetic on stacked tensors in one process."""

import pytest
import torch
import torch.distributed as dist

from lightning_megatron.comm import collectives
from lightning_megatron.comm import functional as C
from lightning_megatron.errors import ConfigError
from tests.comm import lockstep
from tests.layers.parity import close, make_topology

SHAPE = (4, 8, 12)


def _sum(parts, dim):
    return [sum(parts)] * len(parts)


def _join(parts, dim):
    return [torch.cat(parts, dim)] * len(parts)


def _split(parts, dim):
    return [p.chunk(len(parts), dim)[rank] for rank, p in enumerate(parts)]


def _scattered_sum(parts, dim):
    return list(sum(parts).chunk(len(parts), dim))


def _same(parts, dim):
    return parts


# What every rank gets from what all ranks gave, forward and backward.
CASES = {
    "copy_to": (_same, _sum),
    "reduce_from": (_sum, _same),
    "gather_from": (_join, _split),
    "split_to": (_split, _join),
    "all_gather": (_join, _scattered_sum),
    "reduce_scatter": (_scattered_sum, _join),
}


def _check(tp, shape=SHAPE, dims=(0, 1, -1)):
    topology = make_topology(tp)
    axis, rank = topology.tp, topology.tp.rank
    generator = torch.Generator().manual_seed(0)
    for name, (forward, backward) in CASES.items():
        whole = name in ("copy_to", "reduce_from")
        for dim in (0,) if whole else dims:
            inputs = [torch.randn(shape, generator=generator).double() for _ in range(tp)]
            outputs = forward(inputs, dim)
            grads = [torch.randn(o.shape, generator=generator).double() for o in outputs]
            x = inputs[rank].clone().requires_grad_()
            y = getattr(C, name)(x, axis, *(() if whole else (dim,)))
            y.backward(grads[rank])
            close(f"{name} along {dim}", y, outputs[rank])
            close(f"gradient of {name} along {dim}", x.grad, backward(grads, dim)[rank])
            assert torch.equal(x, inputs[rank])


@pytest.mark.parametrize("tp", [2, 4])
def test_forward_and_backward(pool, tp):
    pool.run(tp, _check, tp)


@pytest.mark.parametrize("tp", [16, pytest.param(64, marks=pytest.mark.thorough)])
def test_forward_and_backward_on_many_ranks(tp):
    lockstep.run(tp, _check, tp, (tp, 2), (0,))


def _sums_agree(tp):
    """The same bits on every rank, also in bfloat16: replicas must not drift apart."""
    axis = make_topology(tp).tp
    x = torch.randn(1000, generator=torch.Generator().manual_seed(axis.rank))
    for dtype in (torch.bfloat16, torch.float32):
        total = collectives.start_sum(x.to(dtype), axis).wait()
        of_all = [torch.empty_like(total) for _ in range(tp)]
        dist.all_gather(of_all, total, group=axis.group)
        assert all(torch.equal(total, other) for other in of_all)


def test_sums_are_equal_on_all_ranks(pool):
    pool.run(4, _sums_agree, 4)


def _indivisible(tp):
    axis = make_topology(tp).tp
    for function in (C.reduce_scatter, C.split_to):
        with pytest.raises(ConfigError, match="sequence length=5, tp=2"):
            function(torch.zeros(2, 5), axis, 1)


def test_indivisible_dims_are_refused(pool):
    pool.run(2, _indivisible, 2)


def _alone():
    axis = make_topology(1).tp
    x = torch.ones(2, 3)
    results = [C.copy_to(x, axis), C.reduce_from(x, axis), C.gather_from(x, axis, 0)]
    results += [C.split_to(x, axis, 0), C.all_gather(x, axis, 1), C.reduce_scatter(x, axis, 1)]
    return all(result is x for result in results)


def test_an_axis_of_one_communicates_nothing(pool):
    assert pool.run(1, _alone) == [True]
