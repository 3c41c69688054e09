"""Where a sequence is cut over cp, and where it is joined.

A *splitter* takes a tensor that is whole and equal on all cp ranks and keeps this rank's part, the
chunks of `topology.context_layout`. A *joiner* returns the whole tensor, equal on all cp ranks.

=========  ==============================  ===================================
function   forward                         backward
=========  ==============================  ===================================
`split`    own positions, nothing sent     own positions among zeros, nothing sent
`join`     all-gather over cp              reduce-scatter over cp
=========  ==============================  ===================================

Gradients are means over dp x cp. So the gradient of a whole tensor may differ from cp rank to cp
rank, as long as the mean over the ranks is right, and that of a part counts cp-fold. A splitter
then need not communicate. The gradient of a joined tensor is summed over the ranks: they are equal
where the same follows on all of them, and parts of a sum where a splitter follows.

A sequence of length ``s`` is filled up with zeros behind its end. A joiner drops what was computed
there, and its gradient there is zero.

Under sequence parallelism the part of a cp rank is cut over tp once more, in the residual stream.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_megatron.comm.collectives import (
    start_gather,
    start_sum,
    start_sum_scatter,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.whole.splits import part_of, whole


def split(x: Tensor, layout: ContextLayout, rank: int, dim: int = 1) -> Tensor:
    """Return a cp rank's part of a whole tensor, filled up with zeros.

    Args:
        x: whole tensor, equal on all cp ranks; also a `ContextTensor`.
        layout: split of ``dim``.
        rank: cp rank.
        dim: dim of the sequence.

    Raises:
        ConfigError: ``dim`` has another size than the sequence.
    """
    of_sequence = part_of(x)
    if of_sequence is not None:
        if of_sequence.is_part(layout) and of_sequence.is_behind(x) and dim == 1:
            part: Tensor = of_sequence.local()
            return part
        x = whole(x)
    dim %= x.dim()
    if x.shape[dim] != layout.length:
        raise ConfigError(
            f"cp={layout.cp}: a tensor of shape {tuple(x.shape)} belongs to a sequence of "
            f"{layout.length} positions: dim {dim} must have that size; nearest valid: the tensor "
            "of the whole sequence, which the layers cut themselves"
        )
    return keep_rows(x, own_rows(layout, rank), dim, layout.local)


def join(x: Tensor, layout: ContextLayout, axis: Axis, dim: int = 1) -> Tensor:
    """Return the whole tensor of which each cp rank has a part; all of them must call this."""
    return join_rows(x, [own_rows(layout, rank) for rank in range(axis.size)], axis, dim)


Rows = tuple[tuple[int, int], ...]
"""Positions that a rank holds, in its order: the first and the number of each piece."""


def own_rows(layout: ContextLayout, rank: int, start: int = 0, stop: int | None = None) -> Rows:
    """Positions in ``[start, stop)`` that a cp rank holds, counted from ``start``; no padding."""
    end = layout.length if stop is None else stop
    cut = [(max(c.start, start), min(c.stop, end)) for c in layout.chunks(rank)]
    return tuple((first - start, last - first) for first, last in cut if last > first)


def mean_gradient(x: Tensor, axis: Axis) -> Tensor:
    """Return ``x``, which all cp ranks have alike; its gradient is the mean of the ranks'.

    Behind it each rank has the gradient of its own positions, cp-fold: the mean is that of one
    process, for whoever reads it.
    """
    learns = x.requires_grad and torch.is_grad_enabled()
    return _mean_gradient(x, axis) if learns and axis.size > 1 else x


def keep_rows(x: Tensor, rows: Rows, dim: int, size: int | None = None) -> Tensor:
    """Return these rows of a whole tensor, followed by zeros up to ``size``."""
    size = sum(count for _, count in rows) if size is None else size
    return _keep(x, rows, dim % x.dim(), size) if x.requires_grad else _rows(x, rows, dim, size)


def join_rows(x: Tensor, rows: Sequence[Rows], axis: Axis, dim: int) -> Tensor:
    """Return the whole tensor of which each cp rank has these rows, perhaps followed by padding."""
    return _join(x, tuple(rows), axis, dim % x.dim())


def only_layout(context: Context, local: int, who: str) -> ContextLayout:
    """Split of the only sequence of which this rank has ``local`` positions.

    Raises:
        ConfigError: there is none, or several of other lengths, with ``who`` at its beginning.
    """
    lengths = sorted(context.lengths(local))
    if len(lengths) > 1:
        raise ConfigError(
            f"cp={context.cp.size}: {who} got a part of a sequence, but sequences of "
            f"{' and '.join(map(str, lengths))} positions have parts of {local} positions each; "
            "nearest valid: a PipelineSequential for each, or one length"
        )
    return context.layout(local)


def own_positions(layout: ContextLayout, rank: int, device: torch.device | None = None) -> Tensor:
    """Positions ``[local]`` that a cp rank holds, in its order; padding comes after the end."""
    chunks = layout.chunks(rank)
    return torch.cat([torch.arange(c.start, c.stop, device=device) for c in chunks])


def _rows(x: Tensor, rows: Rows, dim: int, size: int) -> Tensor:
    pieces = [x.narrow(dim, start, count) for start, count in rows]
    missing = size - sum(count for _, count in rows)
    if missing or not pieces:
        dim %= x.dim()
        pieces.append(x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :])))
    return torch.cat(pieces, dim)


class _Keep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, dim: int, size: int) -> Tensor:
        ctx.where = rows, dim, x.shape[dim]
        return _rows(x, rows, dim, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, dim, length = ctx.where
        whole, place = grad.new_zeros((*grad.shape[:dim], length, *grad.shape[dim + 1 :])), 0
        for start, count in rows:
            whole.narrow(dim, start, count).copy_(grad.narrow(dim, place, count))
            place += count
        return whole, None, None, None


class _MeanGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = start_sum(grad.clone(memory_format=torch.contiguous_format), ctx.axis).wait()
        return total / ctx.axis.size, None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: tuple[Rows, ...], axis: Axis, dim: int) -> Tensor:
        ctx.where = rows, axis, dim, x.shape[dim]
        size = max(sum(count for _, count in of_rank) for of_rank in rows)
        if not size:
            return _fitted(x, dim, 0)
        parts = start_gather(_fitted(x, dim, size).unsqueeze(0), axis, 0).wait()
        pieces = []
        for of_rank, part in zip(rows, parts.unbind(0), strict=True):
            place = 0
            for start, count in of_rank:
                pieces.append((start, part.narrow(dim, place, count)))
                place += count
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, axis, dim, held = ctx.where
        return sum_rows(grad, rows, axis, dim, held), None, None, None


def sum_rows(grad: Tensor, rows: Sequence[Rows], axis: Axis, dim: int, held: int) -> Tensor:
    """Sum a gradient of the whole over the ranks; each keeps that of its rows, and zeros."""
    size = max(sum(count for _, count in of_rank) for of_rank in rows)
    if not size:
        return grad.new_zeros((*grad.shape[:dim], held, *grad.shape[dim + 1 :]))
    parts = torch.stack([_rows(grad, of_rank, dim, size) for of_rank in rows])
    return _fitted(start_sum_scatter(parts, axis, 0).wait().squeeze(0), dim, held)


def _fitted(x: Tensor, dim: int, size: int) -> Tensor:
    """Return ``x`` with so many rows, cut or filled up at its end."""
    if x.shape[dim] >= size:
        return x.narrow(dim, 0, size)
    missing = x.new_zeros((*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :]))
    return torch.cat((x, missing), dim)


_keep: Callable[..., Tensor] = _Keep.apply
_mean_gradient: Callable[..., Tensor] = _MeanGradient.apply
_join: Callable[..., Tensor] = _Join.apply


def sum_over_context(x: Tensor, axis: Axis) -> Tensor:
    """Sum what each cp rank has of its part of the sequences; the gradient counts cp-fold."""
    return _sum(x, axis)


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.size = axis.size
        return start_sum(x.clone(), axis).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


_sum: Callable[..., Tensor] = _Sum.apply
