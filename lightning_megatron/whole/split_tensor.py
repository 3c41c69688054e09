"""Tensor of which each tp rank holds a part, and which behaves like the whole.

A column-parallel layer returns a `SplitTensor`: its storage and autograd are those of a plain
tensor, this rank's part; its shape and every function of torch are those of the whole tensor
(`whole.split_rules`). So ``logits.argmax(-1)``, ``x.softmax(-1)``, ``logits[..., 7]`` or
``F.cross_entropy(logits.flatten(0, 1), labels)`` return what one process returns, on every rank.
An activation, or a product with the rank's own weights, costs a few microseconds more than on a
plain tensor. The losses and the row-parallel layers of this library use the part directly.

Functions that need the whole tensor gather it, so all tp ranks must call them: none may stand under
``if trainer.is_global_zero``. Compiled graphs see plain parts.

DTensor has the same meaning. Its dispatch takes some hundred microseconds for each operation, and
a function without a rule is an error there.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass, break_graph
from lightning_megatron.comm.functional import reduce_from
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole import split_rules as rules
from lightning_megatron.whole import split_shapes as shapes
from lightning_megatron.whole.memory import traces_users_code
from lightning_megatron.whole.split_rules import Args, Kwargs, Rule, along, functions
from lightning_megatron.whole.splits import Split, beside, marked, own_part, split_of, whole_shape
from lightning_megatron.whole.vocab_loss import (
    check_targets,
    own_targets,
    reduced,
    vocab_parallel_cross_entropy,
)


class SplitTensor(Tensor):
    """Tensor that is split over tp, of which this rank holds a part (see the module's text).

    `whole` and `own_part` of `whole.splits` return plain tensors.
    """

    _split: Split

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if traces_users_code():
            break_graph()  # and call ``func`` for what it is
            with DisableTorchFunctionSubclass():  # for the compiler, which looks at the tensor
                return func(*args, **(kwargs or {}))
        if any(getattr(kind, "handles_split_tensors", False) for kind in types):
            return NotImplemented
        if func is Tensor.backward:  # whose hooks are others' code
            return _backward(*args, **(kwargs or {}))
        with DisableTorchFunctionSubclass():
            return _RULES.get(func, rules.on_whole)(func, args, kwargs or {})


def split_output(part: Tensor, topology: Topology | None) -> Tensor:
    """Return ``part`` as a `SplitTensor` whose last dim is split over tp.

    In a compiled graph it stays a plain tensor.
    """
    if topology is None or topology.tp.size == 1 or torch.compiler.is_compiling():
        return part
    return marked(part, SplitTensor, topology, part.dim() - 1)


def _shape(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> torch.Size:
    return whole_shape(args[0], args[0]._split)


def _size(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    shape, dim = _shape(func, args, kwargs), kwargs.get("dim", args[1] if len(args) > 1 else None)
    return shape if dim is None else shape[dim]


def _count(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> int:
    return _shape(func, args, kwargs).numel()


def _length(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> int:
    return _shape(func, args, kwargs)[0]


def _same(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of functions whose result is the part's values in another tensor, or None."""
    x, out = args[0], func(*args, **kwargs)
    if not isinstance(out, Tensor) or split_of(out) is not None:
        return out
    return marked(out, type(x), x._split.topology, x._split.dim)


def _repr(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> str:
    x = args[0]
    split = x._split
    return (
        f"SplitTensor({own_part(x)!r}, shape={tuple(whole_shape(x, split))}, "
        f"part {split.axis.rank} of {split.axis.size} along dim {split.dim})"
    )


def _deep_copy(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    x, memo = args
    copied = copy.deepcopy(own_part(x), memo)
    memo[id(x)] = out = marked(copied, type(x), x._split.topology, x._split.dim)
    return out


def _reduce(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    raise ConfigError(
        "a tensor of which each tp rank holds a part cannot be pickled, as another process could "
        "not gather it; nearest valid: lightning_megatron.layers.whole(x), on every tp rank"
    )


def _hook(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of gradient hooks: the gradient is split as the tensor is."""
    x, hook = args
    split, kind = x._split, type(x)

    def with_part(gradient: Tensor) -> Any:
        found = hook(marked(gradient.view_as(gradient), kind, split.topology, split.dim))
        with DisableTorchFunctionSubclass():
            return None if found is None else _part_like(found, split, shape)

    shape = x.shape
    return func(x, with_part)


def _part_like(value: Tensor, split: Split, shape: torch.Size) -> Tensor:
    """Return the part of ``value``, which is whole or already a part of ``shape``."""
    if split_of(value) is not None or value.shape == shape:
        return own_part(value)
    fitted: Tensor = beside(value, shape[split.dim], len(shape) - split.dim, split.axis)
    return fitted


def _backward(x: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    """Rule of ``backward``, from a gradient of the whole or of the part."""
    with DisableTorchFunctionSubclass():
        part, split = own_part(x), split_of(x)
        if gradient is not None and split is not None:
            gradient = _part_like(gradient, split, part.shape)
    part.backward(gradient, *args, **kwargs)  # type: ignore[no-untyped-call]


def gradients(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``torch.autograd.grad``: the gradient of a split tensor is split as it is."""
    outputs, inputs = args
    given = kwargs.pop("grad_outputs", None)
    if given is not None:
        given = (given,) if isinstance(given, Tensor) else given
        given = [
            g if g is None or split_of(y) is None else _part_like(g, y._split, y.shape)
            for g, y in zip(given, outputs, strict=True)
        ]
    found = func(outputs, inputs, grad_outputs=given, **kwargs)
    for x, gradient in zip(inputs, found, strict=True):
        if gradient is not None and split_of(x) is not None:
            marked(gradient, type(x), x._split.topology, x._split.dim)
    return found


def _cross_entropy(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``F.cross_entropy`` on logits that are split by classes."""
    names = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    x, targets, ignored = args[0], args[1], kwargs.get("ignore_index", -100)
    smoothing, reduction = kwargs.get("label_smoothing", 0.0), kwargs.get("reduction", "mean")
    plain = all(kwargs.get(name) is None for name in ("weight", "size_average", "reduce"))
    by_class = _by_class(x, targets) if plain and kwargs.keys() <= set(names) else None
    if by_class is None:
        return rules.on_whole(func, args, kwargs)
    logits_nv, targets_n, axis = by_class
    loss_n = vocab_parallel_cross_entropy(logits_nv, targets_n, axis, ignored, smoothing, 0.0)
    loss = reduced(loss_n, targets, ignored, reduction)
    return loss if torch.is_autocast_enabled(x.device.type) else loss.to(x.dtype)


def _nll_loss(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of ``F.nll_loss`` on log-probabilities that are split by classes."""
    x, targets, ignored = args[0], args[1], kwargs.get("ignore_index", -100)
    plain = all(kwargs.get(name) is None for name in ("weight", "size_average", "reduce"))
    by_class = _by_class(x, targets) if plain else None
    if by_class is None:
        return rules.on_whole(func, args, kwargs)
    log_p_nv, targets_n, axis = by_class
    ignored_n, size = targets_n == ignored, log_p_nv.shape[-1]
    check_targets(targets_n, ignored_n, size * axis.size)
    index_n, foreign_n = own_targets(targets_n, ignored_n, size, axis)
    own_n = log_p_nv.gather(-1, index_n.unsqueeze(-1)).squeeze(-1).masked_fill(foreign_n, 0)
    return reduced(-reduce_from(own_n, axis), targets, ignored, kwargs.get("reduction", "mean"))


def _by_class(x: Any, targets: Any) -> tuple[Tensor, Tensor, Axis] | None:
    """Return ``x`` as ``[n, v]``, class indices ``[n]`` and the axis, if classes are split."""
    split = split_of(x)
    of_classes = min(1, x.dim() - 1)
    if split is None or split.dim != of_classes or split_of(targets) is not None:
        return None
    if targets.is_floating_point() or targets.shape != x.shape[:1] * (x.dim() > 1) + x.shape[2:]:
        return None
    x_nv = x.as_subclass(Tensor).movedim(of_classes, -1)
    return x_nv.reshape(-1, x_nv.shape[-1]), targets.reshape(-1), split.axis


def _table() -> Mapping[Callable[..., Any], Rule]:
    found: dict[Any, Rule] = {}

    def put(rule: Rule, names: str, *, attributes: str = "", in_place: bool = False) -> None:
        each = names.split()
        each += [name + "_" for name in each] if in_place else []
        found.update(dict.fromkeys(functions(*each), rule))
        for name in attributes.split():
            if hasattr(Tensor, name):
                found[getattr(Tensor, name).__get__] = rule

    put(
        rules.on_parts,
        """as_subclass dim ndimension is_floating_point is_complex is_signed element_size get_device
        is_contiguous retain_grad is_inference data_ptr untyped_storage is_same_size stride
        storage_offset register_post_accumulate_grad_hook has_names is_pinned is_shared
        new_empty new_zeros new_ones new_full new_tensor""",
        attributes="""dtype device layout requires_grad grad_fn is_leaf ndim is_cuda is_cpu is_meta
        is_sparse is_quantized is_mkldnn is_nested is_xpu is_mps is_vulkan
        output_nr itemsize
        _version _backward_hooks _base names retains_grad""",
    )
    for name in ("requires_grad", "grad"):
        found[getattr(Tensor, name).__set__] = rules.on_parts
    found[torch.autograd.grad] = gradients
    put(_same, "clone detach contiguous requires_grad_ detach_")
    put(_same, "", attributes="data grad")
    put(_size, "size")
    put(_shape, "", attributes="shape")
    put(_count, "numel nelement")
    put(_length, "__len__")
    put(_repr, "__repr__ __format__")
    put(_deep_copy, "__deepcopy__")
    put(_reduce, "__reduce_ex__ __reduce__")
    put(_hook, "register_hook")
    put(
        rules.elementwise,
        """abs absolute add sub subtract mul multiply div divide true_divide floor_divide remainder
        fmod pow float_power neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt
        square reciprocal sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid logit
        relu relu6 gelu silu mish softplus elu selu celu leaky_relu hardtanh hardsigmoid hardswish
        logsigmoid softsign tanhshrink softshrink hardshrink threshold prelu expit clamp clamp_min
        clamp_max clip where masked_fill lerp addcmul addcdiv maximum minimum fmax fmin eq ne lt le
        gt ge not_equal less less_equal greater greater_equal isnan isinf isfinite isclose isreal
        isposinf isneginf logical_and logical_or logical_not logical_xor bitwise_and bitwise_or
        bitwise_not bitwise_xor sign sgn signbit round floor ceil trunc fix frac nan_to_num erf
        erfc erfinv atan2 hypot xlogy xlog1py logaddexp logaddexp2 copysign heaviside ldexp digamma
        lgamma entr ndtr rsub zeros_like ones_like full_like empty_like copy fill zero type_as""",
        in_place=True,
    )
    binary = "add sub mul truediv floordiv mod pow and or xor"
    put(
        rules.elementwise,
        " ".join(f"__{kind}{name}__" for name in binary.split() for kind in ("", "r", "i"))
        + " __div__ __rdiv__ __idiv__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__"
        + " __neg__ __pos__ __abs__ __invert__",
    )
    put(rules.moved, "to float double half bfloat16 int long short bool char byte cpu cuda type")
    put(rules.drawn_like, "rand_like randn_like randint_like")
    put(rules.dropout, "dropout alpha_dropout feature_dropout", in_place=True)
    put(shapes.reshape, "view reshape")
    put(shapes.shaped_as, "view_as reshape_as")
    put(shapes.flatten, "flatten")
    put(shapes.unflatten, "unflatten")
    put(
        shapes.permuted,
        "transpose permute movedim moveaxis swapaxes swapdims t adjoint unsqueeze",
        attributes="T mT H mH",
    )
    put(shapes.squeezed, "squeeze")
    put(shapes.chunked, "chunk split split_with_sizes tensor_split narrow index_select")
    put(shapes.without_a_dim, "select unbind")
    put(shapes.joined, "cat concat concatenate stack")
    put(shapes.expanded, "expand")
    put(shapes.repeated, "repeat_interleave")
    put(shapes.item, "__getitem__")
    put(shapes.set_item, "__setitem__")
    put(along(1, special=rules.summed), "sum")
    put(along(1, special=rules.averaged), "mean")
    put(along(1, special=rules.log_sum_exp), "logsumexp")
    put(along(1, special=rules.extremum), "argmax argmin amax amin")
    put(rules.pair_or_along(along(1, special=rules.extremum)), "max min")
    put(along(1, keeps=True, special=rules.softmax), "softmax")
    put(along(1, keeps=True, special=rules.log_softmax), "log_softmax")
    put(along(1, keeps=True), "cumsum cumprod logcumsumexp cummax cummin")
    put(along(1, keeps=True, last=True), "sort argsort")
    put(along(2, keeps=True, last=True), "topk")
    put(along(2, last=True), "kthvalue")
    put(along(1), "prod any all nansum nanmean median nanmedian std var")
    put(along(2, special=rules.normed), "norm")
    for func in rules.FOREACH:
        found[func] = rules.foreach
    put(along(2, keeps=True), "normalize")
    put(rules.picked, "gather")
    put(rules.product, "matmul bmm mm __matmul__ __rmatmul__")
    put(rules.linear, "linear")
    put(rules.layer_norm, "layer_norm rms_norm")
    put(rules.attention, "scaled_dot_product_attention")
    put(_cross_entropy, "cross_entropy")
    put(_nll_loss, "nll_loss")
    return found


_RULES = _table()
OF_TENSOR = frozenset(func for func, rule in _RULES.items() if rule is rules.on_parts)
"""Functions that depend neither on values nor on shapes."""


def rule_of(func: Callable[..., Any]) -> Rule:
    """Rule of a function of torch on split tensors."""
    return _RULES.get(func, rules.on_whole)
