"""Rules of torch's functions on tensors whose sequences cp ranks share.

A rule gets a function and its arguments, some of which are `ContextTensor`s. It computes on the
rows of this rank and returns a `ContextTensor`, or something whole where the function reduces to
that; or `NotImplemented`, upon which the function gets whole tensors.

=====================================  ============================================================
elementwise functions                  on the rows; whole operands are cut
along dims behind that of positions    on the rows: softmax, argmax, a linear layer, a norm
views, slices of positions             on the rows
`F.cross_entropy`, `F.nll_loss`        on the rows; sums are added over cp
everything else                        on the whole, gathered over cp
=====================================  ============================================================

What has a gradient and is used on the rows only, as the weight of a linear layer, gets on each rank
the gradient of its own positions, cp-fold: the mean over the ranks is right.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.whole.context_part import ContextPart, Form, Place
from lightning_megatron.whole.context_rows import mean_gradient, sum_over_context
from lightning_megatron.whole.copied_view import changes
from lightning_megatron.whole.split_rules import dims_of, given_by
from lightning_megatron.whole.splits import part_of, split_of
from lightning_megatron.whole.vocab_loss import check_targets

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Rule = Callable[[Callable[..., Any], Args, Kwargs], Any]
Make = Callable[[Tensor, Place], Tensor]


def lazy(x: Any) -> ContextPart | None:
    """Part of a tensor that may still be computed with; None if it has none, or is settled."""
    part: ContextPart | None = part_of(x)
    if part is None or part.is_settled or part.place.residual is not None:
        return None
    return part if part.is_behind(x) else None


def elementwise(make: Make) -> Rule:
    """Make the rule of elementwise functions, with broadcasting."""

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        split = [t for t in tensors if part_of(t) is not None]
        first = lazy(split[0])
        if first is None or changes(func) or "out" in kwargs or first.place.form == "columns":
            return NotImplemented
        if func.__name__ == "where" and len(args) + len(kwargs) == 1:
            return NotImplemented
        dims = max(t.dim() for t in tensors)
        fitted = [_fit(a, first, dims) for a in args]
        named = {name: _fit(value, first, dims) for name, value in kwargs.items()}
        if any(a is NotImplemented for a in (*fitted, *named.values())):
            return NotImplemented
        return make(func(*fitted, **named), first.place)

    return rule


def _fit(value: Any, first: ContextPart, dims: int) -> Any:
    """Operand of an elementwise function beside this part; the whole result has ``dims`` dims."""
    if not isinstance(value, Tensor):
        return value
    part, place = part_of(value), first.place
    if part is not None:
        usable = lazy(value) is not None and part.place == place and value.dim() == dims
        return part.part if usable else NotImplemented
    if value.dim() > dims or split_of(value) is not None:
        return NotImplemented
    value = mean_gradient(value, place.axis)
    behind = dims - (place.leading - 1)
    if value.dim() < behind or value.shape[-behind] == 1:
        return value
    dim = value.dim() - behind
    if place.form == "flat":
        fits = value.shape[0] == first.part.shape[0] * place.count
        return _cut(value, first) if fits else NotImplemented
    return place.cut(value, dim) if value.shape[dim] == place.count else NotImplemented


def _cut(value: Tensor, beside: ContextPart) -> Tensor:
    """Rows of a whole tensor whose first dims are those of the whole beside it."""
    place = beside.place
    if place.form == "flat":
        value = value.reshape(beside.part.shape[0], place.count, *value.shape[1:])
    return place.cut(value, 1)


def same(make: Make) -> Rule:
    """Make the rule of functions that return the same numbers, in another format or memory."""

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        part = lazy(args[0])
        if part is None:
            return NotImplemented
        out = func(part.part, *args[1:], **kwargs)
        return make(out, part.place) if out.device == part.part.device else NotImplemented

    return rule


def along(make: Make, position: int, *, last: bool = False) -> Rule:
    """Make the rule of functions along dims behind that of the positions.

    Args:
        make: makes a `ContextTensor`.
        position: position of the argument that names the dims.
        last: whether the default is the last dim; else it is all dims.
    """

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        part = lazy(args[0]) if args else None
        others = [a for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
        if part is None or others or "out" in kwargs or part.place.form == "columns":
            return NotImplemented
        name = "axis" if "axis" in kwargs else "dim"
        dim = kwargs.get(name, args[position] if len(args) > position else ...)
        if dim is ...:
            dim = -1 if last else None
        moved = _behind(dim, part.place, args[0].dim())
        if moved is None:
            return NotImplemented
        if len(args) > position:
            args = (*args[:position], moved, *args[position + 1 :])
        else:
            kwargs = {**kwargs, name: moved}
        return _made(func(part.part, *args[1:], **kwargs), part.place, make)

    return rule


def _behind(dim: Any, place: Place, count: int) -> Any:
    """Dims from the right, if all are behind that of the positions; else None."""
    dims = None if dim is None else dims_of(dim, count)
    if not dims or min(dims) < place.leading:
        return None
    moved = tuple(d - count for d in dims)
    return moved if isinstance(dim, list | tuple) else moved[0]


def _made(out: Any, place: Place, make: Make) -> Any:
    if isinstance(out, Tensor):
        return make(out, place)
    return type(out)([make(each, place) for each in out])


def pair_or_along(pair: Rule, single: Rule) -> Rule:
    """Make the rule of ``max(x, y)``, or ``single`` if there is one tensor."""

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        tensors = sum(isinstance(a, Tensor) for a in (*args, *kwargs.values()))
        return (pair if tensors > 1 else single)(func, args, kwargs)

    return rule


def by_row(make: Make, width: Callable[[Args, Kwargs], int]) -> Rule:
    """Make the rule of functions of the last dims with weights: a linear layer, a norm.

    Args:
        make: makes a `ContextTensor`.
        width: function that returns the number of dims that each row needs; 0 if none will do.
    """

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        part = lazy(args[0]) if args else None
        if part is None or any(part_of(a) for a in (*args[1:], *kwargs.values())):
            return NotImplemented
        needed = width(args, kwargs)
        if part.place.form == "columns" or not 0 < needed <= args[0].dim() - part.place.leading:
            return NotImplemented
        return make(func(part.part, *args[1:], **kwargs), part.place)

    return rule


def matrix_width(args: Args, kwargs: Kwargs) -> int:
    """Dims of a row that ``x @ weight`` needs."""
    second = args[1] if len(args) > 1 else None
    return int(isinstance(second, Tensor) and second.dim() == 2)


def norm_width(args: Args, kwargs: Kwargs) -> int:
    """Dims of a row that a norm needs."""
    (shape,) = given_by(args, kwargs, normalized_shape=())
    return len(shape)


def picked(make: Make) -> Rule:
    """Make the rule of ``gather`` along a dim behind that of the positions."""

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        part = lazy(args[0])
        dim, index = given_by(args, kwargs, dim=None, index=None)
        if part is None or "out" in kwargs or not isinstance(index, Tensor):
            return NotImplemented
        moved = _behind(dim, part.place, args[0].dim())
        place = part.place
        if moved is None or index.shape[: place.leading] != args[0].shape[: place.leading]:
            return NotImplemented
        other = part_of(index)
        if other is not None and (other.place != place or lazy(index) is None):
            return NotImplemented
        rows = _cut(index, part) if other is None else other.part
        return make(func(part.part, moved, rows), place)

    return rule


def reshaped(make: Make) -> Rule:
    """Make the rule of ``view`` and ``reshape``."""

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        x, shape = args[0], kwargs.get("shape", kwargs.get("size"))
        if shape is None:
            shape = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
        return _with_shape(x, tuple(shape), make)

    return rule


def flattened(make: Make) -> Rule:
    """Make the rule of ``flatten``."""

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        x = args[0]
        start, end = (d % x.dim() for d in given_by(args, kwargs, start_dim=0, end_dim=-1))
        shape = (*x.shape[:start], x.shape[start : end + 1].numel(), *x.shape[end + 1 :])
        return _with_shape(x, shape, make)

    return rule


def _with_shape(x: Tensor, shape: tuple[Any, ...], make: Make) -> Any:
    part = lazy(x)
    if part is None or part.place.form == "columns" or not all(isinstance(n, int) for n in shape):
        return NotImplemented
    known = -torch.Size(shape).numel()
    if -1 in shape:
        if known <= 0 or x.numel() % known:
            return NotImplemented
        shape = tuple(x.numel() // known if n == -1 else n for n in shape)
    batch, held, count = part.part.shape[0], part.part.shape[1], part.place.count
    if x.numel() == 0 or torch.Size(shape).numel() != x.numel():
        return NotImplemented
    if shape[:2] == (batch, count):
        rest, place = shape[2:], replace(part.place, form="rows")
    elif shape[:1] == (batch * count,):
        rest, place = shape[1:], replace(part.place, form="flat")
    else:
        return NotImplemented
    if split_of(part.part) is not None and rest != part.part.shape[2:]:
        return NotImplemented  # by the sizes of parts of tp, which a rank without rows cannot tell
    return make(part.part.reshape(batch, held, *rest), place)


def unsqueezed(make: Make) -> Rule:
    """Make the rule of ``unsqueeze`` and ``squeeze`` behind the dim of the positions."""

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        part = lazy(args[0])
        (dim,) = given_by(args, kwargs, dim=None)
        if part is None or part.place.form == "columns" or not isinstance(dim, int):
            return NotImplemented
        moved = _behind(dim, part.place, args[0].dim() + (func.__name__ == "unsqueeze"))
        return NotImplemented if moved is None else make(func(part.part, moved), part.place)

    return rule


def transposed(make: Make) -> Rule:
    """Make the rule of ``transpose(1, 2)`` of ``[b, n, c]``, which losses of images take."""

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        part, x = lazy(args[0]), args[0]
        if part is None or x.dim() != 3 or part.place.form == "flat":
            return NotImplemented
        probe = torch.empty(2, 3, 4, device="meta")
        if tuple(func(probe, *args[1:], **kwargs).shape) != (2, 4, 3):
            return NotImplemented
        form: Form = "columns" if part.place.form == "rows" else "rows"
        return make(part.part, replace(part.place, form=form))

    return rule


def item(make: Make) -> Rule:
    """Make the rule of ``x[...]``: slices of samples and positions, anything behind them."""

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        x, index = args
        part = lazy(x)
        items = list(index) if isinstance(index, tuple) else [index]
        plain = all(i is Ellipsis or type(i) in (int, slice) for i in items)
        if part is None or part.place.form == "columns" or not plain:
            return NotImplemented
        dots = items.index(Ellipsis) if Ellipsis in items else len(items)
        items[dots : dots + 1] = [slice(None)] * (x.dim() - len(items) + (dots < len(items)))
        place, before = part.place, part.place.leading - 1
        at = items[before]
        samples = items[:before]
        if not all(isinstance(i, slice) for i in (at, *samples)):
            return NotImplemented
        first, stop, step = at.indices(x.shape[before])
        whole = (first, stop) == (0, x.shape[before])
        if step != 1 or (place.form == "flat" and not whole):
            return NotImplemented
        rows = part.part
        if not whole:
            rows, place = _between(part, first, max(first, stop)), place.between(first, stop)
        local = (*(samples or [slice(None)]), slice(None), *items[before + 1 :])
        return make(rows if all(i == slice(None) for i in local) else rows[local], place)

    return rule


def _between(part: ContextPart, first: int, stop: int) -> Tensor:
    """Rows of the positions from ``first`` up to ``stop``: a view, unless both pieces were cut."""
    place, kept = 0, []
    for start, count in part.place.own:
        low, high = max(first, start), min(stop, start + count)
        if high > low:
            kept.append([place + low - start, place + high - start])
        place += count
    if not kept:
        return part.part[:, :0]
    if len(kept) == 2 and kept[0][1] == kept[1][0]:
        kept = [[kept[0][0], kept[1][1]]]
    pieces = [part.part[:, low:high] for low, high in kept]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def class_loss(make: Make) -> Rule:
    """Make the rule of ``F.cross_entropy`` and ``F.nll_loss`` with indices of classes."""

    def rule(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        given: Kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        part, targets = lazy(given.pop("input")), given.pop("target")
        reduction, ignored = given.pop("reduction", "mean"), given.get("ignore_index", -100)
        given = {name: value for name, value in given.items() if value is not None}
        known = given.keys() <= {"weight", "ignore_index", "label_smoothing"}
        if part is None or not known or part_of(targets) is not None:
            return NotImplemented
        place, rows = part.place, part.part
        counts = (rows.shape[0], place.count)
        expected = torch.Size(counts if place.form == "columns" else (counts[0] * counts[1],))
        if (
            (place.form == "rows" or rows.dim() != 3)
            or targets.shape != expected
            or targets.is_floating_point()
            or reduction not in ("mean", "sum", "none")
        ):
            return NotImplemented
        check_targets(targets.reshape(-1), (targets == ignored).reshape(-1), rows.shape[-1])
        own = place.cut(targets.reshape(counts), 1)
        kind = "none" if reduction == "none" else "sum"
        flat = rows.reshape(-1, rows.shape[-1])
        found = func(flat, own.reshape(-1), reduction=kind, **given)
        if reduction == "none":
            form: Form = "flat" if place.form == "flat" else "rows"
            return make(found.view(own.shape), replace(place, form=form))
        total = sum_over_context(found, place.axis)
        return total if reduction == "sum" else total / _weight(targets, ignored, given, total)

    return rule


def _weight(targets: Tensor, ignored: int, given: Kwargs, total: Tensor) -> Tensor:
    """Sum of the weights of all targets, or their number."""
    counted, weight = targets != ignored, given.get("weight")
    if weight is None:
        return counted.sum()
    of_each: Tensor = weight[targets.masked_fill(~counted, 0)]
    return of_each.masked_fill(~counted, 0).sum().to(total.dtype)
