"""Rules of torch's functions on tensors that are split along one dim over a group of ranks.

The outputs of column-parallel layers are split over tp, along their features
(`whole.split_tensor`); those of a `PipelineSequential` over cp, along their positions
(`whole.context_tensor`). Of both is true: what works element by element, or along other dims, each
rank computes from its part. These rules are here. What differs are the parts:

=====================  ===============================  ==========================================
what                   over tp                          over cp
=====================  ===============================  ==========================================
the tensor             the part itself, of another      a tensor without memory; its part is behind
                       class; autograd knows the part   it, and autograd knows the whole
functions see          the part's shape                 the whole's shape
ranks have             parts of equal size, in order    any positions, perhaps none
the split dim is       any                              that behind the samples (or samples and
                                                        positions in one dim)
a gradient of what     is the sum over the ranks        is their mean: each counts its positions
all ranks have alike                                    cp-fold
changes in place       change the part                  make the whole all there is
=====================  ===============================  ==========================================

So a rule asks the tensor for them: `DividedTensor` has what rules need. A dim is named by its place
from the right, as the part may have other dims in front of it than the whole.

A rule returns ``NotImplemented`` where the function takes the whole tensor, which its class then
gathers. A rule decides that without communication, from what all ranks know.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatron._torch.graphs import tree_flatten
from lightning_megatron.whole.splits import split_of
from lightning_megatron.whole.torch_functions import (
    TORCH_FUNCTIONS,
    Args,
    Kwargs,
    Rule,
    changes,
    dims_of,
    given_by,
)


class DividedTensor(Tensor):
    """Tensor that is split along one dim over a group of ranks, as rules see it."""

    moves_front: bool
    """Whether dims in front of the split one may come and go."""
    changes_part: bool
    """Whether the part is changed where the tensor is changed in place."""

    def is_kin(self, other: Tensor) -> bool:
        """Whether another tensor is divided over the same group."""
        raise NotImplementedError

    def local(self) -> Tensor | None:
        """Return this rank's part, of which rules compute; None if only the whole counts."""
        raise NotImplementedError

    @property
    def full_shape(self) -> torch.Size:
        """Shape of the whole."""
        raise NotImplementedError

    @property
    def split_dim(self) -> int:
        """Dim of the whole that is split."""
        raise NotImplementedError

    @property
    def from_right(self) -> int:
        """Place of the split dim from the right, 1 for the last."""
        return self.dim() - self.split_dim

    def beside(self, other: Tensor) -> Any:
        """Return an operand of an elementwise function for the part.

        ``NotImplemented`` if the function takes the whole.
        """
        raise NotImplementedError

    def cut(self, other: Tensor) -> Tensor:
        """Return this rank's part of a plain tensor that has this one's size in the split dim."""
        raise NotImplementedError

    def used_by_each(self, tree: Any) -> Any:
        """Return weights that each rank applies to its own part."""
        raise NotImplementedError

    def with_shape(self, func: Callable[..., Any], shape: tuple[int, ...]) -> Any:
        """Return this tensor, the whole of which gets a shape by ``func``.

        ``NotImplemented`` if it takes the whole.
        """
        raise NotImplementedError

    def made(self, out: Any, from_right: int) -> Any:
        """Return what follows from this one, of which ``out`` are the parts.

        Args:
            out: part, or a sequence of such.
            from_right: place of its split dim.
        """
        raise NotImplementedError


def tensors_in(args: Args, kwargs: Kwargs) -> list[Tensor]:
    """Tensors among the arguments."""
    if not kwargs and all(isinstance(a, _FLAT) for a in args):
        return [a for a in args if isinstance(a, Tensor)]
    return [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]


_FLAT = (Tensor, int, float)


def first_divided(args: Args, kwargs: Kwargs) -> DividedTensor | None:
    """Return the first divided tensor among the arguments."""
    for x in tensors_in(args, kwargs):
        if isinstance(x, DividedTensor):
            return x
    return None


def _has_kin(x: DividedTensor, args: Args, kwargs: Kwargs) -> bool:
    """Whether arguments beside the first are divided as that is."""
    return any(map(x.is_kin, tensors_in(args[1:], kwargs)))


def _first(args: Args) -> tuple[DividedTensor, Tensor] | None:
    """The first argument and this rank's part of it; None if there is none."""
    x = args[0] if args else None
    local = x.local() if isinstance(x, DividedTensor) else None
    return None if local is None else (args[0], local)


# Element by element -------------------------------------------------------------------------------


def elementwise(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of elementwise functions, with broadcasting."""
    first = first_divided(args, kwargs)
    if first is None or "out" in kwargs:
        return NotImplemented
    if changes(func, kwargs):
        changed = args[0] if args else kwargs.get("input")
        if not (isinstance(changed, DividedTensor) and changed.changes_part):
            return NotImplemented
    if func.__name__ == "where" and len(args) + len(kwargs) == 1:
        return NotImplemented
    fitted, named = _beside(first, args), _beside(first, kwargs.values())
    if fitted is None or named is None:
        return NotImplemented
    return first.made(func(*fitted, **dict(zip(kwargs, named, strict=True))), first.from_right)


def _beside(first: DividedTensor, values: Iterable[Any]) -> list[Any] | None:
    """Operands for the part of ``first``, none of which is a list; None if it takes the whole."""
    fitted = []
    for value in values:
        operand = first.beside(value) if isinstance(value, Tensor) else value
        if operand is NotImplemented:
            return None
        fitted.append(operand)
    return fitted


def same(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of functions that return the same numbers, in another format or memory."""
    found = _first(args)
    if found is None:
        return NotImplemented
    x, local = found
    out = func(local, *args[1:], **kwargs)
    if not isinstance(out, Tensor):  # the name of the format, or that there is no gradient
        return out
    return x.made(out, x.from_right) if out.device == local.device else NotImplemented


# Along dims ---------------------------------------------------------------------------------------


def along(func: Callable[..., Any], args: Args, kwargs: Kwargs, across: Rule | None = None) -> Any:
    """Rule of functions along a dim, or several.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its arguments by name.
        across: rule if the split dim is among the dims; the whole if None.
    """
    if not args:
        args, kwargs = (kwargs.get("input"),), {k: v for k, v in kwargs.items() if k != "input"}
    found = _first(args)
    if found is None or _has_kin(found[0], args, kwargs) or "out" in kwargs:
        return NotImplemented
    (x, local), about = found, TORCH_FUNCTIONS[func]
    name, at = "axis" if "axis" in kwargs else "dim", about.dim_at
    count, split = x.dim(), x.split_dim
    dim = kwargs.get(name, args[at] if len(args) > at else about.default_dim)
    dims = dims_of(dim, count)
    if dims is None:
        return NotImplemented
    if split in dims:
        return NotImplemented if across is None else across(func, args, kwargs)
    if min(dims) < split and not x.moves_front:
        return NotImplemented
    moved = tuple(d - count for d in dims) if isinstance(dim, list | tuple) else dims[0] - count
    if len(args) > at:
        args = (*args[:at], moved, *args[at + 1 :])
    else:
        kwargs = {**kwargs, name: moved}
    out = func(local, *args[1:], **kwargs)
    of_each = out if isinstance(out, Tensor) else next(iter(out), local)
    is_kept = of_each.dim() == local.dim()
    return x.made(out, x.from_right - (0 if is_kept else sum(d > split for d in dims)))


def pair_or_along(
    func: Callable[..., Any], args: Args, kwargs: Kwargs, across: Rule | None = None
) -> Any:
    """Rule of ``max(x, y)``, or that along dims if there is one tensor."""
    if len(tensors_in(args, kwargs)) > 1:
        return elementwise(func, args, kwargs)
    return along(func, args, kwargs, across)


def picked(func: Callable[..., Any], args: Args, kwargs: Kwargs, across: Rule | None = None) -> Any:
    """Rule of ``gather``, with a rule if it is along the split dim."""
    found = _first(args)
    dim, index = given_by(args, kwargs, dim=None, index=None)
    if found is None or not (isinstance(dim, int) and isinstance(index, Tensor)):
        return NotImplemented
    (x, local), count, split = found, args[0].dim(), args[0].split_dim
    if dim % count == split:
        return NotImplemented if across is None else across(func, args, kwargs)
    if "out" in kwargs or index.dim() != count or (dim % count < split and not x.moves_front):
        return NotImplemented
    if x.is_kin(index):
        rows = x.beside(index)
    elif split_of(index) is None and index.shape[split] == x.full_shape[split]:
        rows = x.cut(index)
    else:
        rows = NotImplemented
    if rows is NotImplemented:
        return NotImplemented
    return x.made(func(local, dim % count - count, rows), x.from_right)


def joined(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``cat`` and ``stack`` along another dim than the split one."""
    tensors = args[0] if args else ()
    first = first_divided((tensors,), {})
    if first is None or not all(map(first.is_kin, tensors)) or "out" in kwargs:
        return NotImplemented
    parts, stacks = _beside(first, tensors), func.__name__ == "stack"
    count, split = first.dim() + stacks, first.split_dim
    (dim,) = given_by(args, kwargs, dim=0)
    is_behind = dim % count > split
    if parts is None or (not stacks and dim % count == split):
        return NotImplemented
    if not (is_behind or first.moves_front):
        return NotImplemented
    return first.made(func(parts, dim % count - count), first.from_right + (stacks and is_behind))


# Weights, which each position gets ----------------------------------------------------------------


def by_row(
    func: Callable[..., Any], args: Args, kwargs: Kwargs, width: Callable[[Args, Kwargs], int]
) -> Any:
    """Rule of functions of the last dims with weights: a linear layer, a norm.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its arguments by name.
        width: function that returns the number of dims that each row needs; 0 if none will do.
    """
    found = _first(args)
    if found is None or _has_kin(found[0], args, kwargs):
        return NotImplemented
    x, local = found
    if not 0 < width(args, kwargs) < x.from_right:
        return NotImplemented
    rest, kwargs = x.used_by_each((args[1:], kwargs))
    return x.made(func(local, *rest, **kwargs), x.from_right)


def linear(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``F.linear`` and ``x @ weight``."""
    return by_row(func, args, kwargs, _matrix_width)


def layer_norm(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of norms over the last dims."""
    return by_row(func, args, kwargs, _norm_width)


def _matrix_width(args: Args, kwargs: Kwargs) -> int:
    second = next(iter(tensors_in(args[1:], kwargs)), None)
    return int(second is not None and second.dim() == 2)


def _norm_width(args: Args, kwargs: Kwargs) -> int:
    (shape,) = given_by(args, kwargs, normalized_shape=())
    return len(shape)


# Views --------------------------------------------------------------------------------------------


def reshape(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``view`` and ``reshape``."""
    shape = kwargs.get("shape", kwargs.get("size"))
    if shape is None:
        shape = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
    return _reshaped(func, args[0], tuple(shape))


def flatten(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``flatten``."""
    x = args[0]
    if not isinstance(x, DividedTensor):
        return NotImplemented
    shape = x.full_shape
    start, end = (d % len(shape) for d in given_by(args, kwargs, start_dim=0, end_dim=-1))
    merged = math.prod(shape[start : end + 1])
    return _reshaped(func, x, (*shape[:start], merged, *shape[end + 1 :]))


def unflatten(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``unflatten``."""
    x = args[0]
    dim, sizes = given_by(args, kwargs, dim=0, sizes=())
    if not isinstance(x, DividedTensor) or not isinstance(dim, int):
        return NotImplemented
    shape, dim = x.full_shape, dim % x.dim()
    known = -math.prod(sizes)
    cut = [shape[dim] // known if n == -1 else n for n in sizes]
    return _reshaped(func, x, (*shape[:dim], *cut, *shape[dim + 1 :]))


def _reshaped(func: Callable[..., Any], x: Any, shape: tuple[Any, ...]) -> Any:
    if not isinstance(x, DividedTensor) or not all(isinstance(n, int) for n in shape):
        return NotImplemented
    if -1 in shape:
        known, count = -math.prod(shape), x.full_shape.numel()
        if known <= 0 or count % known:
            return NotImplemented
        shape = tuple(count // known if n == -1 else n for n in shape)
    return x.with_shape(func, shape)


def unsqueezed(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``unsqueeze``."""
    found = _first(args)
    (dim,) = given_by(args, kwargs, dim=None)
    if found is None or not isinstance(dim, int):
        return NotImplemented
    (x, local), count = found, args[0].dim() + 1
    is_behind = dim % count > x.split_dim
    if not (is_behind or x.moves_front):
        return NotImplemented
    return x.made(func(local, dim % count - count), x.from_right + is_behind)


def squeezed(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``squeeze``, by the sizes of the whole."""
    found = _first(args)
    (dim,) = given_by(args, kwargs, dim=None)
    dims = None if found is None else dims_of(dim, args[0].dim())
    if found is None or dims is None:
        return NotImplemented
    (x, local), split, count = found, args[0].split_dim, args[0].dim()
    gone = [d for d in dims if x.full_shape[d] == 1]
    if split in gone or (gone and min(gone) < split and not x.moves_front):
        return NotImplemented
    out = local.squeeze(tuple(d - count for d in gone))
    return x.made(out, x.from_right - sum(d > split for d in gone))
