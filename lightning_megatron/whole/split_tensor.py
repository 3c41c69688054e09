"""Tensor of which each tp rank holds a part, and which behaves like the whole.

A column-parallel layer returns a `SplitTensor`: its storage and autograd are those of a plain
tensor, this rank's part; its shape and every function of torch are those of the whole tensor
(`whole.rules`, `whole.split_rules`). So ``logits.argmax(-1)``, ``x.softmax(-1)``,
``logits[..., 7]`` or ``F.cross_entropy(logits.flatten(0, 1), labels)`` return what one process
returns, on every rank.
An activation, or a product with the rank's own weights, costs a few microseconds more than on a
plain tensor. The losses and the row-parallel layers of this library use the part directly.

Functions that need the whole tensor gather it, so all tp ranks must call them: none may stand under
``if trainer.is_global_zero``. Compiled graphs see plain parts.

DTensor has the same meaning. Its dispatch takes some hundred microseconds for each operation, and
a function without a rule is an error there.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.graphs import (
    DisableTorchFunctionSubclass,
    break_graph,
    outside_transforms,
    runs_function,
    runs_transform,
)
from lightning_megatron.comm.collectives import own_slice
from lightning_megatron.comm.functional import reduce_from
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole import rules, split_rules
from lightning_megatron.whole import split_shapes as shapes
from lightning_megatron.whole.autograd_functions import InFunction, in_function
from lightning_megatron.whole.memory import traces_users_code
from lightning_megatron.whole.rules import DividedTensor
from lightning_megatron.whole.split_rules import marked_as
from lightning_megatron.whole.splits import (
    Split,
    beside,
    marked,
    own_part,
    split_of,
    whole,
    whole_shape,
    whole_strides,
)
from lightning_megatron.whole.torch_functions import (
    OF_MEMORY,
    Args,
    Kind,
    Kwargs,
    Rule,
    given_by,
    kind_of,
    told_by_shape,
)
from lightning_megatron.whole.vocab_loss import (
    check_targets,
    own_targets,
    reduced,
    vocab_parallel_cross_entropy,
)


class SplitTensor(DividedTensor):
    """Tensor that is split over tp, of which this rank holds a part (see the module's text).

    `whole` and `own_part` of `whole.splits` return plain tensors.
    """

    moves_front = True
    changes_part = True
    inside: type[Tensor]
    """Class that it has in the forward of a user's function for autograd."""
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
        kind = kind_of(func)
        if runs_transform() and kind not in _OF_TENSOR:
            with outside_transforms():  # which knows parts as plain tensors
                args, kwargs = whole((args, kwargs or {}))
            return func(*args, **kwargs)
        if kind == "backward":  # whose hooks are others' code
            return _backward(*args, **(kwargs or {}))
        if kind == "backward_of_all":
            return _backward_of_all(*args, **(kwargs or {}))
        with DisableTorchFunctionSubclass():
            rule = None if kind is None else RULES.get(kind)
            found = NotImplemented if rule is None else rule(func, args, kwargs or {})
            if found is NotImplemented:
                found = split_rules.on_whole(func, args, kwargs or {})
        if not runs_function():
            return found
        if kind == "storage":
            raise ConfigError(
                "a function for autograd asks for the memory of a tensor of which each tp rank "
                "holds a part, as a kernel does; nearest valid: the function on "
                "lightning_megatron.layers.whole(x), the whole tensor on every tp rank"
            )
        return in_function(found, split_rules.splits_in(args, kwargs or {})[0].topology)

    @override
    def is_kin(self, other: Tensor) -> bool:
        return split_of(other) is not None

    @override
    def local(self) -> Tensor:
        return self

    @property
    @override
    def full_shape(self) -> torch.Size:
        return whole_shape(self, self._split)

    @property
    @override
    def split_dim(self) -> int:
        return self._split.dim

    @property
    @override
    def from_right(self) -> int:
        return self.dim() - self._split.dim

    @override
    def beside(self, other: Tensor) -> Any:
        if other is self:
            return other
        split, place = self._split, self.from_right
        size, of_other = self.shape[split.dim], split_of(other)
        if of_other is None:
            return beside(other, size, place, split.axis)
        is_alike = other.dim() - of_other.dim == place and other.shape[-place] == size
        return other if is_alike else NotImplemented

    @override
    def cut(self, other: Tensor) -> Tensor:
        return own_slice(other, self._split.axis, self._split.dim)

    @override
    def used_by_each(self, tree: Any) -> Any:
        return split_rules.used_by_each(tree, self._split.axis)

    @override
    def with_shape(self, func: Callable[..., Any], shape: tuple[int, ...]) -> Any:
        return shapes.with_shape(func, self, shape)

    @override
    def made(self, out: Any, from_right: int) -> Any:
        return marked_as(out, self, from_right=from_right)


class SplitInFunction(InFunction, SplitTensor):
    """Split tensor that was computed in the forward of a user's function for autograd."""

    outside = SplitTensor


SplitTensor.inside = SplitInFunction


def split_output(part: Tensor, topology: Topology | None) -> Tensor:
    """Return ``part`` as a `SplitTensor` whose last dim is split over tp.

    In a compiled graph it stays a plain tensor.
    """
    if topology is None or topology.tp.size == 1 or torch.compiler.is_compiling():
        return part
    kind = SplitInFunction if runs_function() else SplitTensor
    return marked(part, kind, topology, part.dim() - 1)


def _of_part(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Rule of functions whose result depends neither on values nor on the shape."""
    return func(*args, **kwargs)


def _strides(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> tuple[int, ...] | int:
    x, split = args[0], args[0]._split
    (dim,) = given_by(args, kwargs, dim=None)
    strides = whole_strides(own_part(x), split.dim, split.axis.size)
    return strides if dim is None else strides[dim]


def _shape(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> torch.Size | int:
    return told_by_shape(func, args, kwargs, args[0].full_shape)


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


def _backward_of_all(
    tensors: Sequence[Tensor], grad_tensors: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Rule of ``torch.autograd.backward``."""
    with DisableTorchFunctionSubclass():
        if any(split_of(x) is not None for x in kwargs.get("inputs") or ()):
            torch.autograd.backward(tensors, grad_tensors, *args, **kwargs)
            return
        with torch.enable_grad():
            parts = [own_part(x) for x in tensors]
        given = grad_tensors if isinstance(grad_tensors, Sequence) else [grad_tensors] * len(parts)
        given = [
            None if g is None else _own_gradient(g, y, part.shape)
            for g, y, part in zip(given, tensors, parts, strict=True)
        ]
    torch.autograd.backward(parts, given, *args, **kwargs)


def _own_gradient(gradient: Tensor, of: Tensor, shape: torch.Size) -> Tensor:
    """Gradient of what this rank has of an output."""
    split = split_of(of)
    return whole(gradient) if split is None else own_part(_part_like(gradient, split, shape))


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
        return NotImplemented
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
        return NotImplemented
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


_OF_TENSOR = frozenset(("format", "strides", "shape", "learning", "version"))
RULES: Mapping[Kind, Rule] = {
    **dict.fromkeys(OF_MEMORY, _of_part),
    "strides": _strides,
    "shape": _shape,
    "repr": _repr,
    "deep_copy": _deep_copy,
    "pickle": _reduce,
    "hook": _hook,
    "differentiate": gradients,
    **dict.fromkeys(("same", "detached", "moved", "gradient", "data"), rules.same),
    **dict.fromkeys(("requires_grad_", "detach_"), rules.same),
    **dict.fromkeys(("elementwise", "by_channel", "like"), rules.elementwise),
    "foreach": split_rules.foreach,
    "drawn_like": split_rules.drawn_like,
    "dropout": split_rules.dropout,
    "along": rules.along,
    "sum": partial(rules.along, across=split_rules.summed),
    "mean": partial(rules.along, across=split_rules.averaged),
    "logsumexp": partial(rules.along, across=split_rules.log_sum_exp),
    "extremum": partial(rules.along, across=split_rules.extremum),
    "pair_or_extremum": partial(rules.pair_or_along, across=split_rules.extremum),
    "softmax": partial(rules.along, across=split_rules.softmax),
    "log_softmax": partial(rules.along, across=split_rules.log_softmax),
    "norm": partial(rules.along, across=split_rules.normed),
    "gather": partial(rules.picked, across=split_rules.picked),
    **dict.fromkeys(("matmul", "matrix_product"), split_rules.product),
    "linear": split_rules.linear,
    "layer_norm": rules.layer_norm,
    "attention": split_rules.attention,
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll_loss,
    "reshape": rules.reshape,
    "shaped_as": shapes.shaped_as,
    "flatten": rules.flatten,
    "unflatten": rules.unflatten,
    **dict.fromkeys(("permute", "adjoint"), shapes.permuted),
    "unsqueeze": rules.unsqueezed,
    "squeeze": rules.squeezed,
    "join": rules.joined,
    "expand": shapes.expanded,
    "repeat_interleave": partial(rules.along, across=split_rules.repeated),
    "item": shapes.item,
    "set_item": shapes.set_item,
}
"""Rules by kinds of functions; the whole for any other."""
