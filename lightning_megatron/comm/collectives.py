"""Collectives along a dim of a tensor, started now and finished later.

The building blocks of `lightning_megatron.comm.functional`, where their gradients are, and of
layers that overlap them with arithmetic. A sum or gather that has been started is a `Waited`, whose
``wait`` returns the result: a `Pending`, or in a graph of a compiler two operators
(`comm.operators`).
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch.collectives import start_all_gather, start_reduce_scatter
from lightning_megatron.comm.operators import Traced, Waited, define
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.degrees import divisibility_problem
from lightning_megatron.topology.meter import Meter


class Pending:
    """Collective under way.

    Args:
        work: handle of the collective.
        source: tensor that it reads, kept alive until the end.
        finish: function that returns the result, once the collective is over.
        meter: meter of the axis, which counts it.
    """

    __slots__ = ("_finish", "_meter", "_source", "_work")

    def __init__(
        self,
        work: dist.Work | None,
        source: Tensor | None,
        finish: Callable[[], Tensor],
        meter: Meter,
    ) -> None:
        self._work = work
        self._meter = meter
        meter.started(work)
        self._source = source
        self._finish = finish

    def wait(self, *after: Tensor) -> Tensor:
        """Finish the collective and return its result; ``after`` is for compilers (`Waited`)."""
        if self._work is not None:
            self._meter.wait(self._work)
        self._source = None
        return self._finish()


def start_sum(x: Tensor, axis: Axis) -> Waited:
    """Start the sum of ``x`` over the axis in place; ``x`` must be contiguous."""
    if torch.compiler.is_compiling():
        return Traced("sum", x, axis)
    share = 2 * _bytes(x) * (axis.size - 1) / axis.size
    axis.meter.ring(share, axis.group)
    started = dist.all_reduce(x, group=axis.group, async_op=True)
    return Pending(started, None, lambda: x, axis.meter)


def start_gather(x: Tensor, axis: Axis, dim: int, after: Tensor | None = None) -> Waited:
    """Start to gather the axis' slices ``x`` along ``dim``; all have the same shape.

    Args:
        x: this rank's slice.
        axis: axis to gather over.
        dim: dim along which the slices are concatenated.
        after: tensor that compiled code computes before it gathers.
    """
    assert axis.group is not None
    dim %= x.dim()
    if torch.compiler.is_compiling():
        return Traced("gather", x, axis, dim, after)
    share = _bytes(x) * (axis.size - 1)
    axis.meter.ring(share, axis.group)
    source = x.contiguous()
    buffer = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    work = start_all_gather(buffer, source, axis.group)
    parts = buffer.view(axis.size, *x.shape)
    return Pending(work, source, lambda: _joined(parts, dim), axis.meter)


def start_sum_scatter(x: Tensor, axis: Axis, dim: int) -> Waited:
    """Start the sum of ``x`` over the axis, keeping this rank's slice along ``dim``.

    Raises:
        ConfigError: the size of ``dim`` is not divisible by the axis' size.
    """
    assert axis.group is not None
    dim %= x.dim()
    length = _slice_length(x, axis, dim)
    if torch.compiler.is_compiling():
        return Traced("sum_scatter", x, axis, dim)
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    parts = x.view(*before, axis.size, length, *after).movedim(dim, 0)
    share = _bytes(x) * (axis.size - 1) / axis.size
    axis.meter.ring(share, axis.group)
    source = parts.flatten(0, 1).contiguous()
    output = x.new_empty((*before, length, *after))
    started = start_reduce_scatter(output, source, axis.group)
    return Pending(started, source, lambda: output, axis.meter)


def own_slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's equal slice of a replicated tensor along ``dim`` (a view).

    Raises:
        ConfigError: the size of ``dim`` is not divisible by the axis' size.
    """
    dim %= x.dim()
    length = _slice_length(x, axis, dim)
    return x.narrow(dim, axis.rank * length, length)


def _joined(parts: Tensor, dim: int) -> Tensor:
    """Concatenate ``[p, *shape]`` along ``dim`` of the shape; a view where memory allows."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _slice_length(x: Tensor, axis: Axis, dim: int) -> int:
    length = x.shape[dim]
    if length % axis.size:
        name = "sequence length" if dim == 1 else f"size of dim {dim}"
        raise ConfigError(divisibility_problem(name, length, axis.name, axis.size) or "")
    return length // axis.size


def _gathered(shape: Sequence[int], size: int, dim: int) -> list[int]:
    return [*shape[:dim], shape[dim] * size, *shape[dim + 1 :]]


def _scattered(shape: Sequence[int], size: int, dim: int) -> list[int]:
    return [*shape[:dim], shape[dim] // size, *shape[dim + 1 :]]


define("sum", lambda x, axis, _: start_sum(x.clone(), axis), lambda shape, size, dim: shape)
define("gather", start_gather, _gathered)
define("sum_scatter", start_sum_scatter, _scattered)
