"""Collectives that autograd understands, and their asynchronous building blocks.

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

For a tensor of ``n`` bytes (whole) on ``p`` ranks a ring moves ``2n(p-1)/p`` bytes per rank in an
all-reduce, and half as many in an all-gather or a reduce-scatter, which is why the
sequence-parallel pair costs what one all-reduce does.

All functions return their input unchanged on an axis of size 1. Sums are taken in the tensor's own
dtype. The layers of `lightning_megatron.layers.linear` use the building blocks below directly, to
overlap them with matrix products.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from lightning_megatron._torch import start_all_gather, start_reduce_scatter
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.degrees import divisibility_problem
from lightning_megatron.topology.mesh import Axis


class Pending:
    """A collective under way.

    Args:
        work: the collective.
        tensor: what it fills.
        source: what it reads, kept alive until the end.
        join: for a gather, the number of parts in ``tensor`` and the dim along which to join them.
    """

    __slots__ = ("_join", "_source", "_tensor", "_work")

    def __init__(
        self,
        work: dist.Work | None,
        tensor: Tensor,
        source: Tensor | None = None,
        join: tuple[int, int] | None = None,
    ) -> None:
        self._work = work
        self._tensor = tensor
        self._source = source
        self._join = join

    def wait(self) -> Tensor:
        """Finish the collective and return its result."""
        if self._work is not None:
            self._work.wait()
        self._source = None
        return self._tensor if self._join is None else _joined(self._tensor, *self._join)


def start_sum(x: Tensor, axis: Axis) -> Pending:
    """Begin to sum ``x`` over the axis in place; ``x`` must be contiguous."""
    return Pending(dist.all_reduce(x, group=axis.group, async_op=True), x)


def start_gather(x: Tensor, axis: Axis, dim: int) -> Pending:
    """Begin to join the axis' slices ``x`` along ``dim``; all have the same shape."""
    assert axis.group is not None
    x = x.contiguous()
    buffer = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    work = start_all_gather(buffer, x, axis.group)
    return Pending(work, buffer, x, (axis.size, dim % x.dim()))


def start_sum_scatter(x: Tensor, axis: Axis, dim: int) -> Pending:
    """Begin to sum ``x`` over the axis, keeping this rank's slice along ``dim``.

    Raises:
        ConfigError: ``dim`` cannot be divided by the axis' size.
    """
    assert axis.group is not None
    dim %= x.dim()
    length = x.shape[dim]
    _check_divisible(length, axis, dim)
    shape = (*x.shape[:dim], length // axis.size, *x.shape[dim + 1 :])
    split = (*x.shape[:dim], axis.size, length // axis.size, *x.shape[dim + 1 :])
    parts = x.view(split).movedim(dim, 0).flatten(0, 1).contiguous()
    output = x.new_empty(shape)
    return Pending(start_reduce_scatter(output, parts, axis.group), output, parts)


def own_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's equal slice of a replicated tensor along ``dim`` (a view).

    Raises:
        ConfigError: ``dim`` cannot be divided by the axis' size.
    """
    dim %= x.dim()
    _check_divisible(x.shape[dim], axis, dim)
    length = x.shape[dim] // axis.size
    return x.narrow(dim, axis.rank * length, length)


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


def _joined(buffer: Tensor, parts: int, dim: int) -> Tensor:
    """Parts that lie one after another, joined along ``dim``; a view where memory allows."""
    if dim == 0:
        return buffer
    return buffer.view(parts, -1, *buffer.shape[1:]).movedim(0, dim).flatten(dim, dim + 1)


def _check_divisible(length: int, axis: Axis, dim: int) -> None:
    if length % axis.size == 0:
        return
    name = "sequence length" if dim == 1 else f"size of dim {dim}"
    problem = divisibility_problem(name, length, axis.name, axis.size)
    raise ConfigError(problem or "")


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return start_sum(_owned(grad), ctx.axis).wait(), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, axis: Axis) -> Tensor:
        return start_sum(_owned(x), axis).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_gather(x, axis, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return own_slice(grad, ctx.axis, ctx.dim), None, None


class _SplitTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return own_slice(x, axis, dim).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_gather(grad, ctx.axis, ctx.dim).wait(), None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_gather(x, axis, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_sum_scatter(grad, ctx.axis, ctx.dim).wait(), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return start_sum_scatter(x, axis, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_gather(grad, ctx.axis, ctx.dim).wait(), None, None


def _owned(x: Tensor) -> Tensor:
    """A contiguous copy that may be summed in place."""
    return x.clone(memory_format=torch.contiguous_format)
