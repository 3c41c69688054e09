"""Output of a `PipelineSequential`, of whose sequences each cp rank has a part.

Outside of a `PipelineSequential` everything is whole and equal on all cp ranks. So what comes out
of one is a `ContextTensor`: it has the shape of the whole tensor and every function of torch
returns what it returns for that, on every rank. Those that work on each position by itself, and
cross entropy, use this rank's part (`whole.context_rules`). Any other gathers the whole once,
which all cp ranks must do: none may stand under ``if trainer.is_global_zero``. `layers.whole` and
`layers.own_part` return plain tensors.

    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())   # on the parts
    pooled = hidden.mean(1)                                                         # on the whole

A `ContextTensor` has no memory of its own. What does not ask a tensor's class for its rules, as an
autograd function of the user's, reaches it below autograd, and gets the whole, too.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass, tree_map
from lightning_megatron._torch.wrappers import stand_in, writes
from lightning_megatron.errors import ConfigError
from lightning_megatron.whole import context_rules as rules
from lightning_megatron.whole.context_part import ContextPart, Place
from lightning_megatron.whole.context_rules import Args, Kwargs, Rule, along
from lightning_megatron.whole.copied_view import changes
from lightning_megatron.whole.split_rules import communicates, functions
from lightning_megatron.whole.splits import own_part, part_of, whole

logger = logging.getLogger(__name__)


class ContextTensor(Tensor):
    """Tensor of whose sequences this cp rank has a part (see the module's text)."""

    handles_split_tensors = True
    _context: ContextPart

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if any(getattr(kind, "handles_weights", False) for kind in types):
            return NotImplemented
        if func in _OF_WRAPPER:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        rule = _RULES.get(func) if args else None
        found = NotImplemented if rule is None else rule(func, args, kwargs or {})
        if found is NotImplemented:
            return _on_whole(func, args, kwargs or {})
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
    part = rules.lazy(x)
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
    first = part_of(args[0]) if args else None
    _refuse_late_readers(func, args, kwargs)
    if first is not None and (changes(func) or func in _SETTLES or communicates(func)):
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

    args, kwargs = tree_map(gathered, (args, kwargs))
    return func(*args, **kwargs)


def _refuse_late_readers(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
    """Refuse to read a gradient that goes to the part, and not to the whole."""
    name = getattr(func, "__name__", str(func))
    if func is torch.autograd.grad:
        inputs = args[1] if len(args) > 1 else kwargs.get("inputs", ())
        inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
        late = any(part_of(x) is not None for x in inputs)
    else:
        part = part_of(args[0]) if args else None
        late = part is not None and part.is_used and func in _WATCH
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


def _attributes() -> set[Any]:
    names = """shape dtype device layout ndim requires_grad grad_fn is_leaf is_cuda is_cpu is_meta
    is_sparse is_quantized is_mkldnn is_nested is_xpu is_mps is_vulkan itemsize output_nr _version
    names _backward_hooks"""
    return {getattr(Tensor, name).__get__ for name in names.split() if hasattr(Tensor, name)}


_OF_WRAPPER = {
    *_attributes(),
    *functions(
        *[
            "size",
            "dim",
            "ndimension",
            "numel",
            "nelement",
            "__len__",
            "__hash__",
            "is_floating_point",
            "is_complex",
            "is_signed",
            "element_size",
            "get_device",
            "is_contiguous",
            "stride",
            "is_inference",
            "is_same_size",
        ]
    ),
    Tensor.__len__,
    Tensor.__hash__,
}
"""Functions that look at the shape and format only."""
_SETTLES = {
    *functions(
        "register_hook", "retain_grad", "requires_grad_", "register_post_accumulate_grad_hook"
    ),
    *(
        getattr(getattr(Tensor, name), access)
        for name, access in (
            ("requires_grad", "__set__"),
            ("grad", "__set__"),
            ("grad", "__get__"),
            ("data", "__get__"),
        )
    ),
}
"""Functions after which the whole tensor alone counts."""
_WATCH = functions("register_hook", "retain_grad")
"""Functions that read the gradient."""


def _table() -> Mapping[Callable[..., Any], Rule]:
    found: dict[Any, Rule] = {}
    make = context_tensor

    def put(rule: Rule, names: str, *, attributes: str = "") -> None:
        found.update(dict.fromkeys(functions(*names.split()), rule))
        for name in attributes.split():
            attribute: Any = getattr(Tensor, name)
            found[attribute.__get__] = rule

    put(_repr, "__repr__ __format__")
    put(rules.same(make), "clone detach contiguous to float double half bfloat16 int long bool")
    put(
        rules.elementwise(make),
        """abs absolute add sub subtract mul multiply div divide true_divide floor_divide remainder
        pow neg negative exp expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan
        sinh cosh tanh sigmoid logit relu relu6 gelu silu mish softplus elu selu celu leaky_relu
        hardtanh hardsigmoid hardswish logsigmoid softsign tanhshrink clamp clamp_min clamp_max clip
        where masked_fill lerp addcmul addcdiv maximum minimum eq ne lt le gt ge not_equal less
        less_equal greater greater_equal isnan isinf isfinite logical_and logical_or logical_not
        bitwise_and bitwise_or bitwise_not sign round floor ceil trunc nan_to_num erf rsub
        zeros_like ones_like logaddexp xlogy __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __neg__
        __pos__ __abs__ __invert__""",
    )
    binary = "add sub mul truediv floordiv mod pow and or xor"
    put(
        rules.elementwise(make),
        " ".join(f"__{kind}{name}__" for name in binary.split() for kind in ("", "r")),
    )
    put(
        along(make, 1),
        "sum mean logsumexp argmax argmin amax amin prod any all std var nansum nanmean median",
    )
    pair = rules.elementwise(make)
    put(rules.pair_or_along(pair, along(make, 1)), "max min")
    put(along(make, 1), "softmax log_softmax cumsum cumprod logcumsumexp")
    put(along(make, 1, last=True), "sort argsort")
    put(along(make, 2, last=True), "topk")
    put(along(make, 2), "norm normalize")
    put(rules.by_row(make, rules.matrix_width), "linear matmul __matmul__")
    put(rules.by_row(make, rules.norm_width), "layer_norm rms_norm")
    put(rules.picked(make), "gather")
    put(rules.reshaped(make), "view reshape")
    put(rules.flattened(make), "flatten")
    put(rules.unsqueezed(make), "unsqueeze squeeze")
    put(
        rules.transposed(make),
        "transpose permute swapaxes swapdims movedim moveaxis",
        attributes="mT",
    )
    put(rules.item(make), "__getitem__")
    put(rules.class_loss(make), "cross_entropy nll_loss")
    return found


_RULES = _table()
