"""Rules of torch's functions on tensors that are split over tp, beside those of `whole.rules`.

A rule gets a function of torch and its arguments, some of which are split, and sees these as plain
parts. It returns what the function would return for the whole tensors: a split tensor where each
rank can compute its part of the result from its part of the arguments, else a whole tensor, equal
on all tp ranks; or ``NotImplemented``, upon which the function gets the whole (`on_whole`).

===================================  ==============================================================
elementwise functions                on the parts; other operands are sliced (`splits.beside`)
along other dims than the split one  on the parts
changes of shape                     on the parts, if these stay parts of equal size in order
products of matrices                 on the parts, where batch, rows or columns are split; a sum
                                     over tp where both operands are split along what is summed over
along the split dim                  sums, means, logsumexp, softmax, argmax, maxima without a
                                     gradient and losses from a few numbers of each rank
everything else                      on the whole, gathered over tp (`on_whole`)
===================================  ==============================================================

The last line makes functions without a rule right, at the cost of an all-gather.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_megatron._torch.devices import on_host
from lightning_megatron._torch.graphs import EnableTorchFunction, tree_map
from lightning_megatron.comm.collectives import own_slice, start_gather
from lightning_megatron.comm.functional import copy_to, gather_from, reduce_from
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.whole import rules
from lightning_megatron.whole.copied_view import as_views, copies_in
from lightning_megatron.whole.part_norms import norms
from lightning_megatron.whole.rules import tensors_in
from lightning_megatron.whole.splits import (
    Split,
    beside,
    marked,
    order_in_memory,
    own_part,
    split_of,
    whole,
    whole_shape,
)
from lightning_megatron.whole.torch_functions import (
    CHANGES,
    TORCH_FUNCTIONS,
    Args,
    Kwargs,
    by_place,
    changes,
    communicates,
    given_by,
)

REMEDY = (
    "nearest valid: the same function on lightning_megatron.layers.whole(x), the whole tensor on "
    "every tp rank, or gather_output=True in the ColumnParallelLinear that x comes from"
)


def on_whole(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule: ``func`` of the whole tensors.

    What changes a part in place, as those of weights and gradients, changes the whole, of which
    this rank then keeps its part.

    Raises:
        ConfigError: ``func`` would change a part in place that has a gradient.
    """
    args, kwargs = by_place(func, args, kwargs)
    changes_first = args and (changes(func) or communicates(func))
    changed = args[0] if changes_first else kwargs.get("out")
    if split_of(changed) is not None:
        memory = "out" in kwargs or getattr(func, "__name__", "") == "__set__"
        if not (memory or learns(changed)):
            return _written(func, args, kwargs)
        name = getattr(func, "__name__", str(func))
        raise ConfigError(
            f"{CHANGES.get(name, name)}: changes in place, and not element by element, a "
            f"tensor of which each tp rank holds a part; {REMEDY}"
        )
    given, (args, kwargs) = (args, kwargs), whole((args, kwargs))
    return as_views(func(*args, **kwargs), copies_in((args, kwargs), given))


def _written(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Tensor:
    part: Tensor = args[0]
    split = split_in(part)
    with torch.no_grad():
        changed = whole(part)
        rest, kwargs = whole((args[1:], kwargs))
        func(changed, *rest, **kwargs)
        own_part(part).copy_(own_slice(changed, split.axis, split.dim))
    return part


def foreach(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of functions of lists of tensors: each by itself; norms go together over the ranks."""
    name = TORCH_FUNCTIONS[func].of_each
    order: Any = kwargs.get("ord", args[1] if len(args) > 1 else 2.0)
    if name == "norm" and order > 0 and not any(map(learns, args[0])):
        return norms(args[0], float(order), kwargs.get("dtype"))
    each: Any = torch.linalg.vector_norm if name == "norm" else getattr(Tensor, name)
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)]
    found = []
    with EnableTorchFunction():
        for place in range(len(lists[0])):
            own = [a[place] if isinstance(a, list | tuple) else a for a in args]
            named = {k: v[place] if isinstance(v, list | tuple) else v for k, v in kwargs.items()}
            found.append(each(*own, **named))
    return None if name.endswith("_") else found


def drawn_like(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of random numbers: this rank's part of those that one process draws."""
    x, split = args[0], split_of(args[0])
    if split is None:
        return NotImplemented
    order = order_in_memory(own_part(x))
    sizes = [whole_shape(x, split)[d] for d in order]
    template = torch.empty(sizes, dtype=x.dtype, device=x.device)
    template = template.permute([order.index(d) for d in range(x.dim())])
    drawn = own_slice(func(template, *args[1:], **kwargs), split.axis, split.dim).clone()
    return marked_as(drawn, x, split.dim)


def dropout(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of dropout: each rank draws its own mask."""
    split = split_of(args[0] if args else None)
    if split is None:
        return NotImplemented
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    drops = bool(training) and p != 0  # else nothing is drawn, in one process either
    with split.topology.rng.sharded() if drops else nullcontext():
        return marked_as(func(*args, **kwargs), args[0], split.dim)


def summed(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of the sum over the split dim."""
    return reduce_from(func(*args, **kwargs), args[0]._split.axis)


def averaged(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of the mean over the split dim, of parts of equal size."""
    axis = args[0]._split.axis
    return reduce_from(func(*args, **kwargs), axis) / axis.size


def log_sum_exp(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``logsumexp`` over the split dim."""
    of_part = func(*args, **kwargs)
    return gather_from(of_part.unsqueeze(0), args[0]._split.axis, 0).logsumexp(0)


def log_softmax(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``log_softmax`` along the split dim; each rank has its part of the result."""
    x, split = args[0], args[0]._split
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dtype = kwargs.get("dtype", next((a for a in args[2:] if isinstance(a, torch.dtype)), None))
    if dim is None:  # F.softmax then guesses it
        return NotImplemented
    wide = x.to(dtype or _softmax_dtype(x))
    lse = gather_from(wide.logsumexp(dim, keepdim=True).unsqueeze(0), split.axis, 0).logsumexp(0)
    out = wide - copy_to(lse, split.axis)
    return marked_as(
        out if dtype or out.dtype == _result_dtype(x) else out.to(x.dtype), x, split.dim
    )


def repeated(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``repeat_interleave`` along the split dim by a number: each rank repeats its part."""
    x = args[0]
    times, dim = given_by(args, kwargs, repeats=1, dim=None)
    if dim is None or not isinstance(times, int):
        return NotImplemented
    return marked_as(func(*args, **kwargs), x, split_in(x).dim)


def normed(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of the norm of all elements: the norm of the norms of the parts."""
    x = args[0]
    order, dim, keeps_dims, dtype = given_by(
        args, kwargs, p=2.0, dim=None, keepdim=False, dtype=None
    )
    order = 2.0 if order in (None, "fro") else kwargs.get("ord", order)
    if dim is not None or keeps_dims or isinstance(order, str) or order <= 0:
        return NotImplemented
    wide = dtype or torch.promote_types(x.dtype, torch.float32)
    local = torch.linalg.vector_norm(own_part(x), order, dtype=wide)
    norm = torch.linalg.vector_norm(gather_from(local.view(1), x._split.axis, 0), order)
    return norm.to(dtype or x.dtype)


def softmax(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``softmax`` along the split dim; each rank has its part of the result."""
    out = log_softmax(func, args, kwargs)
    return out if split_of(out) is None else marked_as(out.exp(), args[0], args[0]._split.dim)


def _softmax_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _result_dtype(x: Tensor) -> torch.dtype:
    """Format of a softmax of ``x``: float32 under autocast."""
    return _softmax_dtype(x) if torch.is_autocast_enabled(x.device.type) else x.dtype


def extremum(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``argmax``, ``max``, ``amax`` and the minima along the split dim, without gradient.

    Among equal numbers torch takes the first, so the first rank's. The gradient of ``amax`` is
    spread over all equal numbers, which takes the whole tensor.
    """
    x, name = args[0], func.__name__
    dim, keepdim = given_by(args, kwargs, dim=None, keepdim=False)
    if (learns(x) and not name.startswith("arg")) or not isinstance(dim, int):
        return NotImplemented
    axis, least = x._split.axis, name.endswith("min")
    values, places = (x.min if least else x.max)(dim, keepdim=True)
    size = x.shape[dim]
    of_all = _every(values.detach(), axis)
    owner = (of_all.argmin if least else of_all.argmax)(0, keepdim=True)
    value = of_all.gather(0, owner).squeeze(0)
    place = _every(places + size * axis.rank, axis).gather(0, owner).squeeze(0)
    if not keepdim:
        value, place = value.squeeze(dim), place.squeeze(dim)
    if name.startswith("arg"):
        return place
    if name in ("amax", "amin"):
        return value
    kind = torch.return_types.min if least else torch.return_types.max
    return kind((value, place))


def _every(x: Tensor, axis: Axis) -> Tensor:
    """Gather ``x`` of all ranks on a new dim 0; no gradient passes."""
    return start_gather(x.unsqueeze(0), axis, 0).wait()


def product(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``a @ b``."""
    a, b = (*args, None, None)[:2]
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or min(a.dim(), b.dim()) < 2:
        return NotImplemented
    if func.__name__ == "__rmatmul__":
        a, b, func = b, a, torch.matmul
    in_a, in_b = (None if split_of(t) is None else t.dim() - split_in(t).dim for t in (a, b))
    axis = splits_in((a, b), {})[0].axis
    if in_a == 1 and in_b == 2:
        return reduce_from(func(a, b), axis)
    if in_a is not None and in_a > 1 and (in_b == in_a > 2 or in_b is None):
        other = copy_to(b, axis) if in_a == 2 and learns(b) else b
        if in_a > 2 and in_b is None:
            other = beside(b, a.shape[-in_a], in_a, axis)
        return marked_as(func(a, other), a, from_right=in_a)
    if in_a is None and in_b is not None and in_b != 2:
        other = copy_to(a, axis) if learns(a) else a
        if in_b > 2:
            other = beside(a, b.shape[-in_b], in_b, axis)
        return marked_as(func(other, b), b, from_right=in_b)
    return NotImplemented


def linear(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``F.linear``."""
    if split_of(args[0] if args else None) is None:
        return _linear_of_part(func, args, kwargs)
    return rules.linear(func, args, kwargs)


def _linear_of_part(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Features that follow from this rank's rows of a weight, as a split tensor."""
    x, weight, bias = (*args, kwargs.get("weight"), kwargs.get("bias"))[:3]
    split = split_of(weight)
    if split is None or split.dim != 0 or weight.dim() != 2 or len(args) < 2:
        return NotImplemented
    if bias is not None and split_of(bias) is None:
        bias = beside(bias, weight.shape[0], 1, split.axis)
    out = func(copy_to(x, split.axis) if learns(x) else x, own_part(weight), bias)
    return marked(out, type(weight), split.topology, out.dim() - 1)


def attention(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``scaled_dot_product_attention`` on tensors that are split by heads."""
    names = ("query", "key", "value")
    given = [*args[:3], *(kwargs[name] for name in names[len(args[:3]) :])]
    q, split = given[0], split_of(given[0])
    if split is None or len({split_of(t) for t in given}) > 1 or split.dim >= q.dim() - 2:
        return NotImplemented
    size, place = q.shape[split.dim], q.dim() - split.dim

    def fit(leaf: Any) -> Any:
        return leaf if split_of(leaf) is not None else beside(leaf, size, place, split.axis)

    args, kwargs = tree_map(fit, (args, kwargs))
    drops = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) != 0
    with split.topology.rng.sharded() if drops else nullcontext():
        return marked_as(func(*args, **kwargs), q, split.dim)


def picked(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``gather`` along the split dim: own values and zeros, summed over the ranks.

    Raises:
        IndexError: an index lies outside the dim (found on CPU only).
    """
    x, split = args[0], split_in(args[0])
    (dim, index), size = given_by(args, kwargs, dim=None, index=None), x.shape[split.dim]
    if split_of(index) is not None or "out" in kwargs:
        return NotImplemented
    if on_host(index.device) and bool(((index < 0) | (index >= size * split.axis.size)).any()):
        whole_size = size * split.axis.size
        raise IndexError(f"index out of bounds for dimension {split.dim} of {whole_size}")
    local = index - size * split.axis.rank
    foreign = (local < 0) | (local >= size)
    found = own_part(x).gather(dim, local.masked_fill(foreign, 0)).masked_fill(foreign, 0)
    return reduce_from(found, split.axis)


def used_by_each(tree: Any, axis: Axis) -> Any:
    """Weights whose gradient is a sum over ranks."""
    return tree_map(lambda leaf: copy_to(leaf, axis) if learns(leaf) else leaf, tree)


def learns(leaf: Any) -> bool:
    """Whether somebody will want a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled()


def splits_in(args: Args, kwargs: Kwargs) -> list[Split]:
    """Splits of the tensors that are split."""
    return [s for s in (split_of(t) for t in tensors_in(args, kwargs)) if s is not None]


def split_in(x: Any) -> Split:
    """Split of ``x``, which must be split."""
    found: Split = x._split
    return found


def marked_as(out: Any, like: Tensor, dim: int = 0, *, from_right: int | None = None) -> Any:
    """Mark a result, computed from the part ``like``: a tensor, or a sequence of tensors."""
    topology = split_in(like).topology
    for tensor in (out,) if isinstance(out, Tensor) else out:
        place = dim if from_right is None else tensor.dim() - from_right
        marked(tensor, type(like), topology, place)
    return out
