"""Collectives that autograd understands.

Tensor parallelism (Megatron-LM, arXiv 1909.08053 and, for the sequence, 2205.05198) alternates
between activations that every rank of the axis holds whole and equal (*replicated*), activations of
which each rank holds a slice along some dim (*sharded*), and *partial* ones, whose sum over the
ranks is the true value. A step between two of these states is one collective, and the step's
gradient is the opposite collective:

================  ============================  ==========================  ====================
function          forward                       backward                    states
================  ============================  ==========================  ====================
`copy_to`         nothing                       all-reduce                  replicated -> (own use)
`reduce_from`     all-reduce                    nothing                     partial -> replicated
`gather_from`     all-gather                    split                       sharded -> replicated
`split_to`        split                         all-gather                  replicated -> sharded
`all_gather`      all-gather                    reduce-scatter              sharded -> (own use)
`reduce_scatter`  reduce-scatter                all-gather                  partial -> sharded
================  ============================  ==========================  ====================

"Own use" means that each rank goes on to compute something different with the whole tensor, so its
gradient is partial and must be summed. ``gather_from`` and ``all_gather`` move the same bytes
forward; they differ in what follows. Choosing the wrong one multiplies or loses gradient.
A backward that will be differentiated itself takes the function of the opposite step.

For a tensor of ``n`` bytes (whole) on ``p`` ranks a ring moves ``2n(p-1)/p`` bytes per rank in an
all-reduce, and half as many in an all-gather or a reduce-scatter, which is why the
sequence-parallel pair costs what one all-reduce does.

All functions return their input unchanged on an axis of size 1. Sums are taken in the tensor's own
dtype. Compilers trace them, forward and backward (`comm.operators`). The layers of
`lightning_megatron.layers.linear` use the building blocks in `lightning_megatron.comm.collectives`
directly, to overlap them with matrix products.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_megatron._torch.graphs import differentiates_again
from lightning_megatron.comm.collectives import (
    own_slice,
    start_gather,
    start_sum,
    start_sum_scatter,
)
from lightning_megatron.topology.axis import Axis


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Use a replicated tensor differently on every rank: identity; its gradients are summed."""
    return x if axis.size == 1 else _apply(_CopyTo, x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sum a partial tensor over the axis: all-reduce; the gradient passes through."""
    return x if axis.size == 1 else _apply(_ReduceFrom, x, axis)


def gather_from(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Join slices along ``dim`` for a replicated use: all-gather; the gradient is split."""
    return x if axis.size == 1 else _apply(_GatherFrom, x, axis, dim)


def split_to(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Keep this rank's slice of a replicated tensor: split; the gradient is all-gathered."""
    return x if axis.size == 1 else _apply(_SplitTo, x, axis, dim)


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Join slices along ``dim`` for a use of each rank's own; the gradient is reduce-scattered."""
    return x if axis.size == 1 else _apply(_AllGather, x, axis, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum a partial tensor and keep a slice along ``dim``; the gradient is all-gathered."""
    return x if axis.size == 1 else _apply(_ReduceScatter, x, axis, dim)


def _apply(function: Any, *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if differentiates_again():
            return reduce_from(grad, ctx.axis), None
        return start_sum(_owned(grad), ctx.axis).wait(), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return start_sum(_owned(x), axis).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (copy_to(grad, ctx.axis) if differentiates_again() else grad), None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_gather(x, axis, dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if differentiates_again():
            return split_to(grad, ctx.axis, ctx.dim), None, None
        return own_slice(grad, ctx.axis, ctx.dim), None, None


class _SplitTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return own_slice(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if differentiates_again():
            return gather_from(grad, ctx.axis, ctx.dim), None, None
        return start_gather(grad, ctx.axis, ctx.dim).wait(), None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_gather(x, axis, dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if differentiates_again():
            return reduce_scatter(grad, ctx.axis, ctx.dim), None, None
        return start_sum_scatter(grad, ctx.axis, ctx.dim).wait(), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_sum_scatter(x, axis, dim).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if differentiates_again():
            return all_gather(grad, ctx.axis, ctx.dim), None, None
        return start_gather(grad, ctx.axis, ctx.dim).wait(), None, None


def _owned(x: Tensor) -> Tensor:
    """A contiguous copy that may be summed in place."""
    return x.clone(memory_format=torch.contiguous_format)
