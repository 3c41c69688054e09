"""Output of a `PipelineSequential`, of whose sequences each cp rank has a part.

Outside of a `PipelineSequential` everything is whole and equal on all cp ranks. So what comes out
of one is a `ContextTensor`: it has the shape of the whole tensor and every function of torch
returns what it returns for that, on every rank. Those that work on each position by itself, and
cross entropy, use this rank's part (`whole.rules`, `whole.context_rules`). Any other gathers
the whole once, which all cp ranks must do: none may stand under ``if trainer.is_global_zero``.
`layers.whole` and `layers.own_part` return plain tensors.

    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())   # on the parts
    pooled = hidden.mean(1)                                                         # on the whole

A `ContextTensor` has no memory of its own. What does not ask a tensor's class for its rules, as an
autograd function of the user's, reaches it below autograd, and gets the whole, too.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass, tree_map
from lightning_megatron._torch.wrappers import stand_in, writes
from lightning_megatron.errors import ConfigError
from lightning_megatron.whole import context_rules, rules
from lightning_megatron.whole.context_part import ContextPart, Place
from lightning_megatron.whole.copied_view import as_views, copies_in
from lightning_megatron.whole.rules import DividedTensor
from lightning_megatron.whole.splits import own_part, part_of, whole
from lightning_megatron.whole.torch_functions import (
    CHANGES,
    Args,
    Kind,
    Kwargs,
    Rule,
    by_place,
    changes,
    communicates,
    kind_of,
)

logger = logging.getLogger(__name__)


class ContextTensor(DividedTensor):
    """Tensor of whose sequences this cp rank has a part (see the module's text)."""

    handles_split_tensors = True
    moves_front = False
    changes_part = False
    _context: ContextPart

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if any(getattr(kind, "handles_weights", False) for kind in types):
            return NotImplemented
        kind = kind_of(func)
        if kind in _OF_WRAPPER:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        rule = RULES.get(kind) if args and kind is not None else None
        first = None if rule is None else rules.first_divided(args, kwargs or {})
        found: Any = NotImplemented
        if rule is not None and isinstance(first, ContextTensor):  # not split over tp, as a whole
            found = rule(func, args, kwargs or {})
        if found is NotImplemented:
            return _on_whole(func, args, kwargs or {})
        if kind in _VIEWS and func.__name__ not in _COPIES:
            _share(first, found)
        if isinstance(found, Tensor) and found.requires_grad:
            for part in filter(None, map(part_of, args)):
                part.is_used = True
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch gives the type of a static method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if writes(func):
            raise ConfigError(
                f"{func}: changes the output of a PipelineSequential, of whose sequences each cp "
                "rank has a part; nearest valid: the same on lightning_megatron.layers.whole(x)"
            )
        with torch.no_grad():
            args, kwargs = tree_map(_values, (args, kwargs or {}))
            return func(*args, **kwargs)

    @override
    def is_kin(self, other: Tensor) -> bool:
        return part_of(other) is not None

    @override
    def local(self) -> Tensor | None:
        part = context_rules.lazy(self)
        return None if part is None else part.in_form()

    @property
    @override
    def full_shape(self) -> torch.Size:
        return self.shape

    @property
    @override
    def split_dim(self) -> int:
        return self._context.place.dim

    @override
    def beside(self, other: Tensor) -> Any:
        part = context_rules.lazy(self)
        return NotImplemented if part is None else context_rules.beside(self, part, other)

    @override
    def cut(self, other: Tensor) -> Tensor:
        return context_rules.cut(self._context, other, self.split_dim)

    @override
    def used_by_each(self, tree: Any) -> Any:
        return tree

    @override
    def with_shape(self, func: Callable[..., Any], shape: tuple[int, ...]) -> Any:
        return context_rules.with_shape(self, shape)

    @override
    def made(self, out: Any, from_right: int) -> Any:
        if not isinstance(out, Tensor):
            return type(out)([self.made(each, from_right) for each in out])
        if self._context.place.form == "columns":
            if out.dim() != 3 or from_right != 1:
                return NotImplemented
            out = out.transpose(1, 2)
        return self.placed(out, self._context.place)

    def placed(self, part: Tensor, place: Place) -> "ContextTensor":
        """Return the tensor of which this rank has ``part``."""
        return context_tensor(part, place)


def context_tensor(part: Tensor, place: Place) -> ContextTensor:
    """Return the whole tensor of which this rank has ``part``."""
    behind = ContextPart(part, place)
    whole_shape = place.shape(part)
    if place.residual is not None:
        whole_shape = torch.Size((part.shape[0], place.count, *part.shape[2:]))
    plain = own_part(part)
    if part.requires_grad and torch.is_grad_enabled():
        made: ContextTensor = _exit(plain, behind, whole_shape)
    else:
        made = stand_in(ContextTensor, plain, whole_shape)
    behind.node = made.grad_fn
    made._context = behind
    return made


def on_rows(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return ``function(x)`` for one that works on each position by itself, from this rank's rows.

    Its parameters get the gradient of these rows, cp-fold.
    """
    part = context_rules.lazy(x)
    if part is None or part.place.form == "columns":
        return function(part_of(x).whole_of(x))
    return context_tensor(function(part.part), part.place)


def _values(leaf: Any) -> Any:
    """Values of the whole, for what works below autograd."""
    part = part_of(leaf)
    return leaf if part is None else whole(part.whole()).detach()


class _Exit(Function):
    """Gradient of the whole, where no rule saw it being used."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, behind: ContextPart, shape: torch.Size) -> Tensor:
        ctx.behind = behind
        made: Tensor = stand_in(ContextTensor, part, shape)
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        behind: ContextPart = ctx.behind
        if behind.is_settled:
            raise ConfigError(
                "an autograd function got the output of a PipelineSequential that was changed in "
                "place, or has a hook; nearest valid: the function, or the change, on "
                "lightning_megatron.layers.whole(x)"
            )
        return behind.gradient(whole(grad)), None, None


_exit: Callable[..., Any] = _Exit.apply


def _on_whole(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``func`` of the whole tensors."""
    args, kwargs = by_place(func, args, kwargs)
    first = part_of(args[0]) if args else None
    _refuse_late_readers(func, args, kwargs)
    writes = changes(func, kwargs) or communicates(func)
    if writes or kwargs.get("out") is not None:
        _refuse_shared(func, args, kwargs)
    if first is not None and (writes or kind_of(func) in _SETTLES):
        with torch.enable_grad():
            first.whole()
        first.is_settled = True

    def gathered(leaf: Any) -> Any:
        part = part_of(leaf)
        if part is None:
            return leaf
        _say_once(getattr(func, "__name__", str(func)), part.place)
        if part.place.residual is not None and not part.place.may_gather:
            raise ConfigError(_of_residual(func))
        return part.whole_of(leaf)

    given, (args, kwargs) = (args, kwargs), tree_map(gathered, (args, kwargs))
    is_itself = writes or (first is not None and first.is_settled)
    copies = [] if is_itself else copies_in((args, kwargs), given)
    return as_views(func(*args, **kwargs), copies)


def _share(first: Any, found: Any) -> None:
    """Note that tensors have one memory in one process."""
    sharers = first._context.sharers
    if not sharers:
        sharers.append(ref(first))
    for x in (found,) if isinstance(found, Tensor) else found:
        part = part_of(x)
        if part is not None and x is not first:
            part.sharers = sharers
            sharers.append(ref(x))


def _refuse_shared(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
    """Refuse to change what in one process is a view of a tensor that somebody has, or has views.

    A change makes the whole all there is of a tensor, and that of another one is another.
    """
    part = part_of(args[0]) if args else None
    if communicates(func) or kind_of(func) in _SETTLES:
        return
    others = () if part is None else (found() for found in part.sharers)
    has_others = any(x is not None and x is not args[0] for x in others)
    if has_others or kind_of(func) == "reshape_in_place" or part_of(kwargs.get("out")) is not None:
        name = getattr(func, "__name__", str(func))
        raise ConfigError(
            f"{CHANGES.get(name, name)}: changes the output of a PipelineSequential, of whose "
            "sequences each cp rank has a part, or a view of it, and other tensors share its "
            "memory or its shape; nearest valid: the same on lightning_megatron.layers.whole(x), "
            "or on x.clone()"
        )


def _refuse_late_readers(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
    """Refuse to read a gradient that goes to the part, and not to the whole."""
    name = getattr(func, "__name__", str(func))
    if kind_of(func) == "differentiate":
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs", ())
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
        late = any(part_of(x) is not None for x in inputs)
    else:
        part = part_of(args[0]) if args else None
        late = part is not None and part.is_used and kind_of(func) in _WATCH
    if late:
        raise ConfigError(
            f"{name} of the output of a PipelineSequential that was already used: under cp > 1 its "
            "gradient went by parts; nearest valid: x = lightning_megatron.layers.whole(x) before "
            "it is used, or register_hook and retain_grad before"
        )


def _of_residual(func: Callable[..., Any]) -> str:
    return (
        f"{getattr(func, '__name__', func)}: sequence_parallel=True and cp > 1, and a "
        "PipelineSequential returned the residual stream, of which each tp and cp rank has a part; "
        "nearest valid: lightning_megatron.layers.whole(x), a ColumnParallelLinear or "
        "GatherContext() as its last item, or sequence_parallel=False"
    )


def _say_once(name: str, place: Place) -> None:
    if name not in place.said and not name.startswith("__get"):
        place.said.add(name)
        logger.info(
            "%s of what a PipelineSequential returned gathers its sequences over cp. Losses, "
            "F.cross_entropy and functions along the last dim do not",
            name,
        )


def _repr(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> str:
    part = part_of(args[0])
    place = part.place
    return (
        f"ContextTensor({part.part!r}, shape={tuple(args[0].shape)}, positions "
        f"{place.own} of {place.count}, cp rank {place.axis.rank} of {place.axis.size})"
    )


_OF_WRAPPER = frozenset(("format", "strides", "shape", "learning", "version"))
"""Functions that look at the shape and format only."""
_SETTLES = frozenset(
    ("hook", "retain_grad", "requires_grad_", "set_learning", "set_gradient", "gradient", "data")
)
"""Functions after which the whole tensor alone counts."""
_WATCH = frozenset(("hook", "retain_grad"))
"""Functions that read the gradient."""
_VIEWS = frozenset(
    ("reshape", "flatten", "unflatten", "permute", "unsqueeze", "squeeze", "item")
    + ("same", "detached", "moved", "along")
)
"""Kinds of functions that may return a view, or the tensor itself."""
_COPIES = frozenset(
    ("clone", "prod", "nansum", "nanmean", "median", "nanmedian", "std", "var", "any", "all")
    + ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort", "topk")
    + ("kthvalue", "normalize", "index_select")
)
"""Functions of these kinds that return memory of its own."""
RULES: Mapping[Kind, Rule] = {
    "repr": _repr,
    **dict.fromkeys(("same", "detached", "moved"), rules.same),
    **dict.fromkeys(("elementwise", "like"), rules.elementwise),
    **dict.fromkeys(("along", "sum", "mean", "logsumexp", "extremum", "softmax"), rules.along),
    **dict.fromkeys(("log_softmax", "norm", "repeat_interleave"), rules.along),
    "join": rules.joined,
    "pair_or_extremum": rules.pair_or_along,
    "gather": rules.picked,
    **dict.fromkeys(("matmul", "linear"), rules.linear),
    "layer_norm": rules.layer_norm,
    "reshape": rules.reshape,
    "flatten": rules.flatten,
    "unflatten": rules.unflatten,
    "permute": context_rules.transposed,
    "unsqueeze": rules.unsqueezed,
    "squeeze": rules.squeezed,
    "item": context_rules.item,
    **dict.fromkeys(("cross_entropy", "nll_loss"), context_rules.class_loss),
}
"""Rules by kinds of functions; the whole for any other."""
