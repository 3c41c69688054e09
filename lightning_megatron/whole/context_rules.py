"""Rules of torch's functions on tensors whose sequences cp ranks share, beside `whole.rules`.

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

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatron.whole.context_part import ContextPart, Form
from lightning_megatron.whole.context_rows import mean_gradient, sum_over_context
from lightning_megatron.whole.splits import part_of, split_of
from lightning_megatron.whole.torch_functions import Args, Kwargs
from lightning_megatron.whole.vocab_loss import check_targets


def lazy(x: Any) -> ContextPart | None:
    """Part of a tensor that may still be computed with; None if it has none, or is settled."""
    part: ContextPart | None = part_of(x)
    if part is None or part.is_settled or part.place.residual is not None:
        return None
    return part if part.is_behind(x) else None


def beside(x: Tensor, first: ContextPart, other: Tensor) -> Any:
    """Operand of an elementwise function beside the part ``first`` of ``x``."""
    part, place = part_of(other), first.place
    if part is not None:
        usable = lazy(other) is not None and part.place == place and other.dim() == x.dim()
        return part.in_form() if usable else NotImplemented
    if other.dim() > x.dim() or split_of(other) is not None:
        return NotImplemented
    other = mean_gradient(other, place.axis)
    behind = x.dim() - place.dim
    if other.dim() < behind or other.shape[-behind] == 1:
        return other
    if other.shape[-behind] != x.shape[-behind]:
        return NotImplemented
    return cut(first, other, other.dim() - behind)


def cut(first: ContextPart, other: Tensor, dim: int) -> Tensor:
    """Rows of a whole tensor, of which ``dim`` is as the split dim of the whole beside it."""
    place = first.place
    if place.form == "flat":
        other, dim = other.reshape(first.part.shape[0], place.count, *other.shape[1:]), 1
    return place.cut(other, dim)


def with_shape(x: Any, shape: tuple[int, ...]) -> Any:
    """Return ``x`` with another shape, if samples and positions stay, or become one dim."""
    part = lazy(x)
    if part is None or part.place.form == "columns":
        return NotImplemented
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
    return x.placed(part.part.reshape(batch, held, *rest), place)


def transposed(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``transpose(1, 2)`` of ``[b, n, c]``, which losses of images take."""
    part, x = lazy(args[0]), args[0]
    if part is None or x.dim() != 3 or part.place.form == "flat":
        return NotImplemented
    probe = torch.empty(2, 3, 4, device="meta")
    if tuple(func(probe, *args[1:], **kwargs).shape) != (2, 4, 3):
        return NotImplemented
    form: Form = "columns" if part.place.form == "rows" else "rows"
    return x.placed(part.part, replace(part.place, form=form))


def item(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``x[...]``: slices of samples and positions, anything behind them."""
    x, index = args
    part = lazy(x)
    items = list(index) if isinstance(index, tuple) else [index]
    plain = all(i is Ellipsis or type(i) in (int, slice) for i in items)
    if part is None or part.place.form == "columns" or not plain:
        return NotImplemented
    dots = items.index(Ellipsis) if Ellipsis in items else len(items)
    items[dots : dots + 1] = [slice(None)] * (x.dim() - len(items) + (dots < len(items)))
    place, before = part.place, part.place.dim
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
    return x.placed(rows if all(i == slice(None) for i in local) else rows[local], place)


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


def class_loss(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``F.cross_entropy`` and ``F.nll_loss`` with indices of classes."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given: Kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    x, targets = given.pop("input"), given.pop("target")
    part = lazy(x)
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
        return x.placed(found.view(own.shape), replace(place, form=form))
    total = sum_over_context(found, place.axis)
    return total if reduction == "sum" else total / _weight(targets, ignored, given, total)


def _weight(targets: Tensor, ignored: int, given: Kwargs, total: Tensor) -> Tensor:
    """Sum of the weights of all targets, or their number."""
    counted, weight = targets != ignored, given.get("weight")
    if weight is None:
        return counted.sum()
    of_each: Tensor = weight[targets.masked_fill(~counted, 0)]
    return of_each.masked_fill(~counted, 0).sum().to(total.dtype)
