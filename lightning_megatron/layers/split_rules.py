"""What torch's functions do to a split tensor: on each rank's part, or on the whole.

A rule gets a function of torch and its arguments, some of which are split, and runs where these are
seen as the plain parts that they are. It returns what the function would return for the whole
tensors: split itself where each rank can compute its part of the result from its part of the
arguments, else whole, equal on all tp ranks.

===================================  ==============================================================
elementwise functions                on the parts; other operands are cut to fit (`splits.beside`)
along other dims than the split one  on the parts
changes of shape                     on the parts, if these stay parts of equal size in order
products of matrices                 on the parts, where batch, rows or columns are split; a sum
                                     over tp where both operands are split along what is summed over
along the split dim                  sums, means, logsumexp, softmax, argmax, maxima without a
                                     gradient and losses from a few numbers of each rank
everything else                      on the whole, gathered over tp (`on_whole`)
===================================  ==============================================================

The last line makes what has no rule right, at the cost of an all-gather.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron._torch import tree_flatten, tree_map
from lightning_megatron.comm.collectives import own_slice, start_gather
from lightning_megatron.comm.functional import copy_to, gather_from, reduce_from
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.splits import (
    Split,
    beside,
    marked,
    own_part,
    split_of,
    whole,
    whole_shape,
)
from lightning_megatron.topology.mesh import Axis

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Callable[..., Any], Args, Kwargs], Any]

_CHANGES = {
    "__iadd__": "+=",
    "__isub__": "-=",
    "__imul__": "*=",
    "__itruediv__": "/=",
    "__ifloordiv__": "//=",
    "__imod__": "%=",
    "__ipow__": "**=",
    "__iand__": "&=",
    "__ior__": "|=",
    "__ixor__": "^=",
    "__setitem__": "x[...] = y",
    "__set__": "x.data = y",
}
REMEDY = (
    "nearest valid: the same on lightning_megatron.layers.whole(x), the whole tensor on every tp "
    "rank, or gather_output=True in the ColumnParallelLinear that x comes from"
)


def on_whole(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``func`` of the whole tensors.

    Raises:
        ConfigError: it would change a part in place.
    """
    changed = args[0] if args and changes(func) else kwargs.get("out")
    if split_of(changed) is not None:
        name = getattr(func, "__name__", str(func))
        raise ConfigError(
            f"{_CHANGES.get(name, name)}: changes, in place, a tensor of which each tp rank holds "
            f"a part, other than element by element; {REMEDY}"
        )
    args, kwargs = whole((args, kwargs))
    return func(*args, **kwargs)


def changes(func: Callable[..., Any]) -> bool:
    """Whether a function of torch changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in _CHANGES or (name.endswith("_") and not name.endswith("__"))


def on_parts(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``func`` of this rank's parts, whose result says nothing of the tensor's values or shape."""
    return func(*args, **kwargs)


def elementwise(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Element by element, with broadcasting."""
    tensors = _tensors(args, kwargs)
    found = _alike(tensors)
    others = (changes(func) and split_of(args[0]) is None) or "out" in kwargs
    if found is None or others or (func.__name__ == "where" and len(args) + len(kwargs) == 1):
        return on_whole(func, args, kwargs)
    first, split, from_right = found
    size = first.shape[split.dim]

    def fit(leaf: Any) -> Any:
        return leaf if split_of(leaf) is not None else beside(leaf, size, from_right, split.axis)

    if any(split_of(t) is None for t in tensors):
        args = tuple(fit(a) for a in args)  # elementwise functions take no lists
        kwargs = {name: fit(value) for name, value in kwargs.items()}
    return _put(func(*args, **kwargs), first, from_right=from_right)


def moved(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """To another device or format; to another device as a whole, as groups belong to devices."""
    x, out = args[0], func(*args, **kwargs)
    if not isinstance(out, Tensor):
        return out
    if split_of(x) is None or out.device.type != x.device.type:
        return on_whole(func, args, kwargs)
    return _put(out, x, x._split.dim)


def drawn_like(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Random numbers: this rank's part of those that one process draws."""
    x, split = args[0], split_of(args[0])
    if split is None:
        return on_whole(func, args, kwargs)
    template = torch.empty(whole_shape(x, split), dtype=x.dtype, device=x.device)
    drawn = own_slice(func(template, *args[1:], **kwargs), split.axis, split.dim).contiguous()
    return _put(drawn, x, split.dim)


def dropout(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Dropout, of other elements on every rank."""
    split = split_of(args[0] if args else None)
    if split is None:
        return on_whole(func, args, kwargs)
    with split.topology.rng.sharded():
        return _put(func(*args, **kwargs), args[0], split.dim)


def reshape(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``view`` and ``reshape``, by the sizes of the whole or, where these fit, of the part."""
    x, shape = args[0], kwargs.get("shape", kwargs.get("size"))
    if shape is None:
        shape = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
    if split_of(x) is None or not all(isinstance(n, int) for n in shape):
        return on_whole(func, args, kwargs)
    found = _reshaped(func, x, tuple(shape))
    return on_whole(func, args, kwargs) if found is None else found


def _reshaped(func: Callable[..., Any], x: Tensor, shape: tuple[int, ...]) -> Tensor | None:
    found = _local_shape(x, _split(x), shape)
    if found is None:
        return None
    local, dim = found
    out: Tensor = _put(
        x.view(local) if getattr(func, "__name__", "") == "view" else x.reshape(local), x, dim
    )
    return out


def _local_shape(
    x: Tensor, split: Split, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], int] | None:
    """The part's shape and split dim where the whole gets ``shape``, if it is a part of that.

    A part is an interval of the split dim, for each index of the dims before. So these have to be
    kept or merged among themselves, and what follows them to begin with a dim that divides.
    """
    p, before = split.axis.size, math.prod(x.shape[: split.dim])
    count = x.numel() * p
    if -1 in shape:
        known = -math.prod(shape)
        if known == 0 or count % known:
            return None
        shape = tuple(count // known if n == -1 else n for n in shape)
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
    """``view_as`` and ``reshape_as`` of a tensor that is split alike.

    A function of autograd that returns its input (hooks of modules' backwards are some, FSDP2's
    on the inputs of a unit, too) views it as itself.
    """
    x, other = (*args, None)[:2]
    if split_of(x) is None or split_of(x) != split_of(other):
        return on_whole(func, args, kwargs)
    return _put(func(x, other), x, _split(x).dim)


def flatten(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``flatten``."""
    x = args[0]
    start, end = _given(args, kwargs, start_dim=0, end_dim=-1)
    if split_of(x) is None:
        return on_whole(func, args, kwargs)
    shape, n = whole_shape(x, x._split), x.dim()
    start, end = start % n, end % n
    merged = (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :])
    found = _reshaped(func, x, merged)
    return on_whole(func, args, kwargs) if found is None else found


def unflatten(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``unflatten``."""
    x = args[0]
    dim, sizes = _given(args, kwargs, dim=0, sizes=())
    if split_of(x) is None or not isinstance(dim, int):
        return on_whole(func, args, kwargs)
    shape, dim = whole_shape(x, x._split), dim % x.dim()
    known = -math.prod(sizes)
    cut = [shape[dim] // known if n == -1 else n for n in sizes]
    found = _reshaped(func, x, (*shape[:dim], *cut, *shape[dim + 1 :]))
    return on_whole(func, args, kwargs) if found is None else found


def permuted(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Dims in another order, or more or fewer of size 1: where the split one goes is looked up."""
    x = args[0]
    split = split_of(x)
    if split is None:
        return on_whole(func, args, kwargs)
    # A tensor without memory, whose split dim alone has a size that is not 1.
    probe = torch.empty(
        [2 if d == split.dim else 1 for d in range(x.dim())], device="meta", dtype=torch.bool
    )
    out = func(*args, **kwargs)
    return _put(out, x, tuple(func(probe, *args[1:], **kwargs).shape).index(2))


def squeezed(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``squeeze``, by the sizes of the whole: the split dim stays."""
    x, split = args[0], split_of(args[0])
    (dim,) = _given(args, kwargs, dim=None)
    dims = None if split is None else _dims(dim, x.dim())
    if split is None or dims is None:
        return on_whole(func, args, kwargs)
    gone = tuple(d for d in dims if x.shape[d] == 1 and d != split.dim)
    return _put(x.squeeze(gone), x, split.dim - sum(d < split.dim for d in gone))


def pieces(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Pieces along a dim."""
    x, split = args[0], split_of(args[0])
    place = 1 if func.__name__ in ("index_select", "narrow") else 2
    dim = kwargs.get("dim", args[place] if len(args) > place else 0)
    dims = _dims(dim, x.dim()) if split is not None else None
    if split is None or dims is None or split.dim in dims:
        return on_whole(func, args, kwargs)
    return _put(func(*args, **kwargs), x, split.dim)


def without_a_dim(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``select`` and ``unbind``."""
    x, split = args[0], split_of(args[0])
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if split is None or split.dim == dim % x.dim():
        return on_whole(func, args, kwargs)
    out = func(*args, **kwargs)
    return _put(out, x, split.dim - (dim % x.dim() < split.dim))


def joined(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``cat`` and ``stack`` along another dim."""
    (tensors,), rest = args[:1], args[1:]
    dim = kwargs.get("dim", rest[0] if rest else 0)
    splits = {split_of(t) for t in tensors}
    (split, *others) = splits
    if others or split is None or "out" in kwargs:
        return on_whole(func, args, kwargs)
    stacks = func.__name__ == "stack"
    dim %= tensors[0].dim() + stacks
    if not stacks and dim == split.dim:
        return on_whole(func, args, kwargs)
    return _put(func(*args, **kwargs), tensors[0], split.dim + (stacks and dim <= split.dim))


def expanded(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``expand``, to sizes of the whole."""
    x, split = args[0], split_of(args[0])
    sizes = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
    if split is None or kwargs:
        return on_whole(func, args, kwargs)
    sizes, place = list(sizes), split.dim - x.dim()
    if sizes[place] == x.shape[place] * split.axis.size:
        sizes[place] = -1
    return _put(x.expand(sizes), x, from_right=-place)


def repeated(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``repeat_interleave`` by a number: each rank repeats its own."""
    x, split = args[0], split_of(args[0])
    times, dim = _given(args, kwargs, repeats=1, dim=None)
    if split is None or dim is None or not isinstance(times, int):
        return on_whole(func, args, kwargs)
    return _put(func(*args, **kwargs), x, split.dim)


def item(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``x[...]``."""
    x, index = args
    split = split_of(x)
    place = None if split is None else _kept_by(index, x, split)
    if place is None:
        return on_whole(func, args, kwargs)
    return _put(func(x, index), x, from_right=place)


def set_item(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``x[...] = y``, where every rank has its part of what changes, or ``y`` is a number."""
    x, index, value = args
    split = split_of(x)
    if split is None:
        return on_whole(func, args, kwargs)
    place = _kept_by(index, x, split)
    size = x.shape[split.dim]
    if place is not None:
        kept = split_of(value)
        if kept is None:
            value = beside(value, size, place, split.axis)
        elif value.dim() - kept.dim != place:
            return on_whole(func, args, kwargs)
        return func(x, index, value)
    if isinstance(value, Tensor) and value.dim() > 0:
        return on_whole(func, args, kwargs)
    (index,) = (whole(index),) if isinstance(index, Tensor) else (index,)
    mask = torch.zeros(whole_shape(x, split), dtype=torch.bool, device=x.device)
    mask[index] = True
    x.masked_fill_(own_slice(mask, split.axis, split.dim), value)
    return None


def _kept_by(index: Any, x: Tensor, split: Split) -> int | None:
    """The place of the split dim, from the right, in what ``index`` takes all parts of alike."""
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


def along(
    position: int, *, keeps: bool = False, special: Rule | None = None, last: bool = False
) -> Rule:
    """A rule of functions that work along a dim, or several.

    Args:
        position: of the argument that names them.
        keeps: whether the result has these dims, whatever ``keepdim`` says.
        special: the rule where the split dim is among them; `on_whole` when None.
        last: whether the last dim is meant when none is named; else all are.
    """

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        x: Any = args[0] if args else kwargs.get("input")
        split = split_of(x)
        if split is None or len(_tensors(args, kwargs)) > 1 or "out" in kwargs:
            return on_whole(func, args, kwargs)
        dim = kwargs.get("dim", kwargs.get("axis", args[position] if len(args) > position else ...))
        if dim is ...:
            dim = -1 if last else None
        dims = _dims(dim, x.dim())
        if dims is None:
            return on_whole(func, args, kwargs)
        if split.dim in dims:
            return (special or on_whole)(func, args, kwargs)
        out = func(*args, **kwargs)
        flags = [a for a in args[position + 1 :] if isinstance(a, bool)]  # the last is keepdim
        kept = keeps or kwargs.get("keepdim", bool(flags) and flags[-1])
        return _put(out, x, split.dim - (0 if kept else sum(d < split.dim for d in dims)))

    return rule


def _dims(dim: Any, count: int) -> tuple[int, ...] | None:
    if dim is None or dim == ():
        return tuple(range(count))
    dims = tuple(dim) if isinstance(dim, list | tuple) else (dim,)
    return tuple(d % count for d in dims) if all(isinstance(d, int) for d in dims) else None


def summed(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The sum over the split dim."""
    return reduce_from(func(*args, **kwargs), args[0]._split.axis)


def averaged(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """The mean over the split dim, of parts of equal size."""
    axis = args[0]._split.axis
    return reduce_from(func(*args, **kwargs), axis) / axis.size


def log_sum_exp(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``logsumexp`` over the split dim."""
    of_part = func(*args, **kwargs)
    return gather_from(of_part.unsqueeze(0), args[0]._split.axis, 0).logsumexp(0)


def log_softmax(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``log_softmax`` along the split dim; each rank has its part of the result."""
    x, split = args[0], args[0]._split
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dtype = kwargs.get("dtype", next((a for a in args[2:] if isinstance(a, torch.dtype)), None))
    if dim is None:  # F.softmax then guesses it
        return on_whole(func, args, kwargs)
    wide = x.to(dtype or _softmax_dtype(x))
    lse = gather_from(wide.logsumexp(dim, keepdim=True).unsqueeze(0), split.axis, 0).logsumexp(0)
    out = wide - copy_to(lse, split.axis)
    return _put(out if dtype or out.dtype == _result_dtype(x) else out.to(x.dtype), x, split.dim)


def softmax(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``softmax`` along the split dim; each rank has its part of the result."""
    out = log_softmax(func, args, kwargs)
    return out if split_of(out) is None else _put(out.exp(), args[0], args[0]._split.dim)


def _softmax_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _result_dtype(x: Tensor) -> torch.dtype:
    """Format of a softmax of ``x``: float32 under autocast."""
    return _softmax_dtype(x) if torch.is_autocast_enabled(x.device.type) else x.dtype


def extremum(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``argmax``, ``max`` and ``amax`` along the split dim, ``min`` likewise, where nothing learns.

    Of equal numbers torch takes the first, and so the first rank's. The gradient of ``amax`` is
    spread over all of them, which takes the whole.
    """
    x, name = args[0], func.__name__
    dim, keepdim = _given(args, kwargs, dim=None, keepdim=False)
    if (_learns(x) and not name.startswith("arg")) or not isinstance(dim, int):
        return on_whole(func, args, kwargs)
    axis, least = x._split.axis, name.endswith("min")
    values, places = (x.min if least else x.max)(dim, keepdim=True)
    size = x.shape[dim]
    of_all = _parts(values.detach(), axis)
    owner = (of_all.argmin if least else of_all.argmax)(0, keepdim=True)
    value = of_all.gather(0, owner).squeeze(0)
    place = _parts(places + size * axis.rank, axis).gather(0, owner).squeeze(0)
    if not keepdim:
        value, place = value.squeeze(dim), place.squeeze(dim)
    if name.startswith("arg"):
        return place
    if name in ("amax", "amin"):
        return value
    kind = torch.return_types.min if least else torch.return_types.max
    return kind((value, place))


def pair_or_along(rule: Rule) -> Rule:
    """``max(x, y)``, or ``rule`` where there is one tensor."""

    def either(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        pair = len(_tensors(args, kwargs)) > 1
        return (elementwise if pair else rule)(func, args, kwargs)

    return either


def _parts(x: Tensor, axis: Axis) -> Tensor:
    """``x`` of all ranks, on a new dim 0; no gradient passes."""
    return start_gather(x.unsqueeze(0), axis, 0).wait()


def product(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``a @ b``."""
    a, b = (*args, None, None)[:2]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or min(a.dim(), b.dim()) < 2:
        return on_whole(func, args, kwargs)
    if func.__name__ == "__rmatmul__":
        a, b, func = b, a, torch.matmul
    in_a, in_b = (None if split_of(t) is None else t.dim() - _split(t).dim for t in (a, b))
    axis = _splits((a, b), {})[0].axis
    if in_a == 1 and in_b == 2:
        return reduce_from(func(a, b), axis)
    if in_a is not None and in_a > 1 and (in_b == in_a > 2 or in_b is None):
        other = copy_to(b, axis) if in_a == 2 and _learns(b) else b
        if in_a > 2 and in_b is None:
            other = beside(b, a.shape[-in_a], in_a, axis)
        return _put(func(a, other), a, from_right=in_a)
    if in_a is None and in_b is not None and in_b != 2:
        other = copy_to(a, axis) if _learns(a) else a
        if in_b > 2:
            other = beside(a, b.shape[-in_b], in_b, axis)
        return _put(func(other, b), b, from_right=in_b)
    return on_whole(func, args, kwargs)


def linear(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``F.linear`` of a tensor that is split along another dim than the features."""
    x, split = args[0], split_of(args[0])
    if split is None or split.dim == x.dim() - 1 or len(_splits(args, kwargs)) > 1:
        return on_whole(func, args, kwargs)
    rest, kwargs = _used_by_each((args[1:], kwargs), split.axis)
    return _put(func(x, *rest, **kwargs), x, split.dim)


def layer_norm(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Norms over the last dims, the split one not among them."""
    x, split = args[0], split_of(args[0])
    (shape,) = _given(args, kwargs, normalized_shape=())
    if split is None or split.dim >= x.dim() - len(shape) or len(_splits(args, kwargs)) > 1:
        return on_whole(func, args, kwargs)
    rest, kwargs = _used_by_each((args[1:], kwargs), split.axis)
    return _put(func(x, *rest, **kwargs), x, split.dim)


def attention(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``scaled_dot_product_attention`` of tensors that are split by heads."""
    names = ("query", "key", "value")
    given = [*args[:3], *(kwargs[name] for name in names[len(args[:3]) :])]
    q, split = given[0], split_of(given[0])
    if split is None or len({split_of(t) for t in given}) > 1 or split.dim >= q.dim() - 2:
        return on_whole(func, args, kwargs)
    size, place = q.shape[split.dim], q.dim() - split.dim

    def fit(leaf: Any) -> Any:
        return leaf if split_of(leaf) is not None else beside(leaf, size, place, split.axis)

    args, kwargs = tree_map(fit, (args, kwargs))
    with split.topology.rng.sharded():
        return _put(func(*args, **kwargs), q, split.dim)


def picked(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``gather`` along the split dim: what this rank has, and zeros, summed over the ranks.

    Raises:
        IndexError: on CPU, an index lies outside of the dim.
    """
    x, split = args[0], split_of(args[0])
    dim, index = _given(args, kwargs, dim=None, index=None)
    if split is None or split_of(index) is not None or dim is None or "out" in kwargs:
        return on_whole(func, args, kwargs)
    dim, size = dim % x.dim(), x.shape[split.dim]
    if dim != split.dim:
        return on_whole(func, args, kwargs)
    if index.device.type == "cpu" and bool(((index < 0) | (index >= size * split.axis.size)).any()):
        raise IndexError(f"index out of bounds for dimension {dim} of {size * split.axis.size}")
    local = index - size * split.axis.rank
    foreign = (local < 0) | (local >= size)
    found = own_part(x).gather(dim, local.masked_fill(foreign, 0)).masked_fill(foreign, 0)
    return reduce_from(found, split.axis)


def _used_by_each(tree: Any, axis: Axis) -> Any:
    """Weights of which each rank finds a part of the gradient."""
    return tree_map(lambda leaf: copy_to(leaf, axis) if _learns(leaf) else leaf, tree)


def _learns(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()


_FLAT = (Tensor, int, float)


def _tensors(args: Args, kwargs: Kwargs) -> list[Tensor]:
    if not kwargs and all(isinstance(a, _FLAT) for a in args):
        return [a for a in args if isinstance(a, Tensor)]
    return [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]


def _splits(args: Args, kwargs: Kwargs) -> list[Split]:
    return [s for s in (split_of(t) for t in _tensors(args, kwargs)) if s is not None]


def _alike(tensors: Iterable[Tensor]) -> tuple[Tensor, Split, int] | None:
    """A split tensor, its split, and its place from the right, if all that are split agree."""
    found: tuple[Tensor, Split, int] | None = None
    for x in tensors:
        split = split_of(x)
        if split is None:
            continue
        place = x.dim() - split.dim
        if found is None:
            found = x, split, place
        elif place != found[2] or x.shape[-place] != found[0].shape[-place]:
            return None
    return found


def _split(x: Any) -> Split:
    found: Split = x._split
    return found


def _given(args: Args, kwargs: Kwargs, **defaults: Any) -> tuple[Any, ...]:
    """Arguments after the first, by name or place."""
    return tuple(
        kwargs.get(name, args[place] if len(args) > place else default)
        for place, (name, default) in enumerate(defaults.items(), 1)
    )


def _put(out: Any, like: Tensor, dim: int = 0, *, from_right: int | None = None) -> Any:
    """Mark what was computed from the part ``like``: a tensor, or a sequence of some."""
    topology = _split(like).topology
    for tensor in (out,) if isinstance(out, Tensor) else out:
        place = dim if from_right is None else tensor.dim() - from_right
        marked(tensor, type(like), topology, place)
    return out


def functions(*names: str) -> list[Callable[..., Any]]:
    """What torch, its functional module and tensors call by these names."""
    spaces = (torch, F, Tensor, torch.special)
    return [getattr(space, name) for name in names for space in spaces if hasattr(space, name)]
