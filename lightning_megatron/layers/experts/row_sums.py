"""Rows that are copied to several places, and rows that are added up; each the other's gradient.

A token goes to several experts, and their outputs are added up again. Both steps are known by
`RowSums`: which of ``m`` sums each of ``n`` rows belongs to. Sums are taken row by row in a fixed
order, by one thread each (``torch.embedding_bag``), so they are the same in every run; PyTorch's
``index_add`` on a GPU adds in the order of arrival.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class RowSums(NamedTuple):
    """Rows, and the sums that they belong to."""

    sum_n: Tensor
    """Sum of each row, ``[n]`` int64."""
    order_n: Tensor
    """Rows in the order in which they are added: those of the first sum, then of the second."""
    start_m: Tensor
    """Place in ``order_n`` at which each sum begins, ``[m]``."""


def starts(counts_m: Tensor) -> Tensor:
    """First place of each of several runs, from their lengths."""
    return counts_m.cumsum(0) - counts_m


def inverse(order_n: Tensor) -> Tensor:
    """Place of each index in a permutation."""
    places = torch.empty_like(order_n)
    places[order_n] = torch.arange(order_n.shape[0], device=order_n.device)
    return places


def spread(x_mh: Tensor, sums: RowSums) -> Tensor:
    """Copy ``x_mh[sums.sum_n]``, ``[n, h]``."""
    y: Tensor = _Spread.apply(x_mh, *sums)  # type: ignore[no-untyped-call]
    return y


def collect(y_nh: Tensor, sums: RowSums) -> Tensor:
    """Add rows up, ``[m, h]``."""
    x: Tensor = _Collect.apply(y_nh, *sums)  # type: ignore[no-untyped-call]
    return x


def _added(y_nh: Tensor, order_n: Tensor, start_m: Tensor) -> Tensor:
    if not len(y_nh) or not len(start_m):
        return y_nh.new_zeros((len(start_m), y_nh.shape[1]))
    added: Tensor = torch.embedding_bag(y_nh, order_n, start_m, mode=0)[0]
    return added


# Indices are saved as tensors, not in the context: a block that is recomputed keeps none.


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sum_n: Tensor, order_n: Tensor, start_m: Tensor) -> Tensor:
        ctx.save_for_backward(order_n, start_m)
        return x.index_select(0, sum_n)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _added(grad.contiguous(), *ctx.saved_tensors), None, None, None


class _Collect(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, sum_n: Tensor, order_n: Tensor, start_m: Tensor) -> Tensor:
        ctx.save_for_backward(sum_n)
        return _added(y, order_n, start_m)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (sum_n,) = ctx.saved_tensors
        return grad.index_select(0, sum_n), None, None, None


def take(weights: Tensor, place: Tensor) -> Tensor:
    """Return elements of the flattened ``weights``, in the shape of ``place``.

    Args:
        weights: any tensor.
        place: indices, none twice; ``weights.numel()`` stands for a 0, any number of times.
    """
    taken: Tensor = _Take.apply(weights, place)  # type: ignore[no-untyped-call]
    return taken


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.shape = weights.shape
        return torch.cat((weights.reshape(-1), weights.new_zeros(1)))[place]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        whole = grad.new_zeros(ctx.shape.numel() + 1)
        whole.scatter_(0, place.reshape(-1), grad.reshape(-1))
        return whole[:-1].view(ctx.shape), None
