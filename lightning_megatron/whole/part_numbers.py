"""Numbers of parts of weights that are completed over the ranks, and what parts learn from them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass
from lightning_megatron.whole.part_norms import own_number
from lightning_megatron.whole.places import Place
from lightning_megatron.whole.torch_functions import (
    TORCH_FUNCTIONS,
    Args,
    Kwargs,
    Total,
)

LEARNING: frozenset[Total | None] = frozenset(("sum", "mean", "norm"))
"""Reductions through which parts learn; gradients of maxima depend on who has the same number."""


def total_of(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Total | None:
    """Return to which number a call reduces all elements; None if it does not."""
    about = TORCH_FUNCTIONS.get(func)
    if about is None or about.total is None:
        return None
    if about.kind == "norm_or_matrix_norm" and (len(args) > 1 or "ord" in kwargs):
        return None  # torch.linalg.norm(w, 2) is the largest singular value
    is_norm = about.total == "norm"
    options = {k: v for k, v in kwargs.items() if k not in ("p", "ord", "dtype")}
    rest = args[2 if is_norm else 1 :]
    if is_norm and _order(args, kwargs) is None:
        return None
    all_at_once = all(v is None or v is False for v in (*rest, *options.values()))
    return about.total if all_at_once else None


def _order(args: Args, kwargs: Kwargs) -> float | None:
    """Order of a norm; None if it is none of the vector's of all elements."""
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else 2.0))
    if order in (None, "fro"):
        return 2.0
    return float(order) if not isinstance(order, str) and float(order) > 0 else None


def reduced(total: Total, x: Tensor, place: Place, args: Args, kwargs: Kwargs) -> Tensor:
    """Return the number of the whole; ``x`` is this rank's part of it. Collective."""
    with DisableTorchFunctionSubclass():
        local = x.to_local() if isinstance(x, DTensor) else x.as_subclass(Tensor)
        dtype = kwargs.get("dtype")
        local = local if dtype is None else local.to(dtype)
        order = _order(args, kwargs) if total == "norm" else None
        found = own_number(total, local, order)
        for at, group in enumerate(place.groups):
            learners = place.learners if at == len(place.groups) - 1 else None
            each: Tensor = _OfRanks.apply(found, group, learners)  # type: ignore[no-untyped-call]
            found = own_number("sum" if total == "mean" else total, each, order)
        if total == "mean":
            found = found / place.shape.numel()
        of_sum = local.dtype.is_floating_point or total not in ("sum", "mean")
        return one_of(found.to(local.dtype) if of_sum else found, place.copies)


class _OfRanks(Function):
    """Numbers of all ranks of a group; a rank's own learns what all say, or their mean."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, group: dist.ProcessGroup, learners: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.group, ctx.learners = group, learners
        asked = value.to(torch.uint8) if value.dtype == torch.bool else value
        every = [torch.empty_like(asked) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, asked.contiguous(), group=group)
        return torch.stack(every).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _mean(gradient, ctx.learners)[dist.get_rank(ctx.group)], None, None


class WholeOfParts(Function):
    """Whole of which ranks have parts; a part learns what all ranks say of it, or their mean."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, part: Tensor, place: Place) -> Tensor:
        """Return the whole; ``local`` is the plain tensor that learns, ``part`` the same."""
        ctx.place = place
        return place.gather(part)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the part of what the ranks say."""
        with DisableTorchFunctionSubclass():
            own = ctx.place.own_part(_mean(gradient, ctx.place.learners))
            return (own.to_local() if isinstance(own, DTensor) else own), None, None


def _mean(gradient: Tensor, learners: dist.ProcessGroup | None) -> Tensor:
    if learners is None:
        return gradient
    gradient = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(gradient, group=learners)
    return gradient / dist.get_world_size(learners)


class _OneOf(Function):
    """Identity whose gradient is divided among the ranks that will sum it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def one_of(value: Tensor, ranks: int) -> Tensor:
    """Return ``value``, whose gradient is divided among the ranks that will sum it."""
    if ranks == 1 or not (value.requires_grad and torch.is_grad_enabled()):
        return value
    shared: Tensor = _OneOf.apply(value, ranks)  # type: ignore[no-untyped-call]
    return shared
