"""Rules of views, chunks and indices of split tensors, as in `whole.split_rules`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import own_slice
from lightning_megatron.whole.split_rules import marked_as, split_in
from lightning_megatron.whole.splits import (
    Split,
    beside,
    split_of,
    whole,
    whole_shape,
)
from lightning_megatron.whole.torch_functions import Args, Kwargs


def with_shape(func: Callable[..., Any], x: Tensor, shape: tuple[int, ...]) -> Any:
    """Return a split tensor, the whole of which, or else the part, gets a shape by ``func``."""
    found = _local_shape(x, split_in(x), shape)
    if found is None:
        return NotImplemented
    local, dim = found
    is_view = getattr(func, "__name__", "") == "view"
    return marked_as(x.view(local) if is_view else x.reshape(local), x, dim)


def _local_shape(
    x: Tensor, split: Split, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], int] | None:
    """Shape and split dim of the part when the whole gets ``shape``; None if it is no part of it.

    A part is an interval of the split dim, for each index of the dims before it. So those dims must
    be kept or merged among themselves, and the next dim must be divisible.
    """
    p, before = split.axis.size, math.prod(x.shape[: split.dim])
    count = x.numel() * p
    of_part = math.prod(shape) == x.numel() != count
    if not of_part and math.prod(shape) != count:
        return None
    starts = [e for e in range(len(shape)) if math.prod(shape[:e]) == before]
    if of_part:
        starts = [e for e in starts if shape[e] != 1] or starts[-1:]
        return (shape, starts[0]) if starts else None
    for e in starts:
        if shape[e] % p == 0:
            return (*shape[:e], shape[e] // p, *shape[e + 1 :]), e
    return None


def shaped_as(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``view_as`` and ``reshape_as`` on a tensor that is split alike.

    Autograd functions that return their input view it as itself: hooks of modules' backwards, and
    FSDP2's on the inputs of a unit.
    """
    x, other = (*args, None)[:2]
    if split_of(x) is None or split_of(x) != split_of(other):
        return NotImplemented
    return marked_as(func(x, other), x, split_in(x).dim)


def permuted(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of permutations."""
    x = args[0]
    split = split_of(x)
    if split is None:
        return NotImplemented
    # A tensor without memory, whose split dim alone has a size that is not 1.
    probe = torch.empty(
        [2 if d == split.dim else 1 for d in range(x.dim())], device="meta", dtype=torch.bool
    )
    out = func(*args, **kwargs)
    return marked_as(out, x, tuple(func(probe, *args[1:], **kwargs).shape).index(2))


def expanded(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``expand``, to sizes of the whole."""
    x, split = args[0], split_of(args[0])
    sizes = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
    if split is None or kwargs:
        return NotImplemented
    sizes, place = list(sizes), split.dim - x.dim()
    if sizes[place] == x.shape[place] * split.axis.size:
        sizes[place] = -1
    return marked_as(x.expand(sizes), x, from_right=-place)


def item(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``x[...]``."""
    x, index = args
    split = split_of(x)
    place = None if split is None else _kept_by(index, x, split)
    if place is None:
        return NotImplemented
    return marked_as(func(x, index), x, from_right=place)


def set_item(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``x[...] = y``, if every rank has its part of the change, or ``y`` is a number."""
    x, index, value = args
    split = split_of(x)
    if split is None:
        return NotImplemented
    place = _kept_by(index, x, split)
    size = x.shape[split.dim]
    if place is not None:
        kept = split_of(value)
        if kept is None:
            value = beside(value, size, place, split.axis)
        elif value.dim() - kept.dim != place:
            return NotImplemented
        return func(x, index, value)
    if isinstance(value, Tensor) and value.dim() > 0:
        return NotImplemented
    (index,) = (whole(index),) if isinstance(index, Tensor) else (index,)
    mask = torch.zeros(whole_shape(x, split), dtype=torch.bool, device=x.device)
    mask[index] = True
    x.masked_fill_(own_slice(mask, split.axis, split.dim), value)
    return None


def _kept_by(index: Any, x: Tensor, split: Split) -> int | None:
    """Split dim of ``x[index]``, from the right; None if ranks would select different indices."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(split_of(i) is not None for i in items):
        return None
    used = sum(_consumes(i) for i in items)
    dots = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
    items[dots : dots + 1] = [slice(None)] * (x.dim() - used)
    dim, place, found = 0, 0, False
    for i in items:
        taken = _consumes(i)
        if dim <= split.dim < dim + taken:
            if not isinstance(i, slice) or not _takes_all(i, x.shape[split.dim] * split.axis.size):
                return None
            place, found = 1, True
        elif found:
            if not (i is None or isinstance(i, slice | int)) or isinstance(i, bool):
                return None
            place += i is None or isinstance(i, slice)
        dim += taken
    return place if found else None


def _consumes(index: Any) -> int:
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
        return index.dim()
    return 1


def _takes_all(part: slice, size: int) -> bool:
    return part.indices(size) == (0, size, 1)
