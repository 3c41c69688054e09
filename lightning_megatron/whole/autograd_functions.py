"""Functions of a user's for autograd that get tensors of which each tp rank has a part.

``Own.apply(logits)`` does not ask the class of ``logits`` for a rule: torch calls ``Own.forward``
with the tensor, and ``Own.backward`` with a gradient and with what was saved. In the forward every
function of torch follows the rules of `whole.split_tensor`, so the values are right. In the
backward torch hands out plain parts, of which a softmax would be one of the part:

* the gradient of an output that is split, and an output that was saved, are plain tensors;
* the gradient that comes back may be whole, where autograd knows the input as a part.

Torch knows whether a forward runs: it switches off forward-mode differentiation for it
(`runs_function`). What is computed there gets a class of its own, so that the output, when it is
used for the first time behind the call, is known to come from such a function. Its node, the
``ctx`` of the backward, then becomes a `_Node`, which marks what it hands out and fits what comes
back. Nothing is gathered that the code of the function does not need whole.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from typing_extensions import override

from lightning_megatron._torch.graphs import (
    DisableTorchFunctionSubclass,
    input_shape,
    runs_function,
    tree_flatten,
)
from lightning_megatron.comm.collectives import own_slice
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.splits import Split, marked, own_part, split_of, whole
from lightning_megatron.whole.torch_functions import kind_of


class InFunction:
    """Mixin of tensors that were computed in the forward of a function for autograd."""

    outside: type[Tensor]
    """Class that it has behind the function."""
    _topology: Topology

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Rule of the class within the function; behind it, the tensor becomes what it is there."""
        kwargs = kwargs or {}
        if kind_of(func) == "set_learning":  # which torch does before the tensor has a node
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        inside = runs_function()
        left = [x for x in _of_functions(args, kwargs) if not inside or _is_output(x)]
        _settle(left)
        if not left:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
        return func(*args, **kwargs)


class WholeInFunction(InFunction, Tensor):
    """Whole tensor that was computed from a split one."""

    outside = Tensor

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own = [x for x in _of_functions(args, kwargs or {}) if isinstance(x, WholeInFunction)]
        if not runs_function() or any(map(_is_output, own)):
            return super().__torch_function__(func, types, args, kwargs)
        topology = own[0]._topology
        for x in own:
            x.__class__ = Tensor  # type: ignore[assignment]
        try:
            return in_function(func(*args, **(kwargs or {})), topology)
        finally:
            in_function(own, topology)


def in_function(found: Any, topology: Topology) -> Any:
    """Let results of a function of torch know that a forward of a user's function has made them."""
    for x in [found] if isinstance(found, Tensor) else tree_flatten(found)[0]:
        if isinstance(x, Tensor) and not isinstance(x, InFunction):
            inside = WholeInFunction if type(x) is Tensor else getattr(x, "inside", None)
            if inside is not None:
                x.__class__ = inside
                x._topology = topology  # type: ignore[attr-defined]
    return found


def _is_output(x: Tensor) -> bool:
    """Whether it left a function: within one nothing has such a node."""
    with DisableTorchFunctionSubclass():
        return isinstance(x.grad_fn, BackwardCFunction)


def _of_functions(args: Any, kwargs: Any) -> Iterator[Any]:
    return (x for x in tree_flatten((args, kwargs))[0] if isinstance(x, InFunction))


def _settle(tensors: list[Any]) -> None:
    """Give outputs of functions their classes, and watch the nodes that they come from."""
    with DisableTorchFunctionSubclass():
        for x in tensors:
            outside = getattr(type(x), "outside", None)
            if outside is None:  # it was there twice
                continue
            x.__class__ = outside
            node, split, topology = x.grad_fn, split_of(x), x.__dict__.pop("_topology", None)
            if isinstance(node, BackwardCFunction) and not _is_ours(node):
                outputs = _outputs(node, topology if split is None else split.topology)
                outputs[x.output_nr] = outside, split


def _outputs(node: Any, topology: Topology) -> dict[int, Any]:
    """Outputs of a node, which from now on marks what its backward gets, and fits its results."""
    if not isinstance(node, _Node):
        kind: Any = type(node)
        node.__class__ = _with_parts(kind)
        node._outputs, node._topology = {}, topology
    found: dict[int, Any] = node._outputs
    return found


def _is_ours(node: Any) -> bool:
    module = str(getattr(node._forward_cls, "__module__", ""))
    return module.partition(".")[0] == __name__.partition(".")[0]


class _Node:
    """Node of a user's function, whose backward gets split tensors where its forward had them."""

    _outputs: dict[int, tuple[type[Tensor], Split | None]]
    """Classes and splits of its outputs, by number."""
    _topology: Topology
    next_functions: Any
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """Saved tensors; an output that was saved comes back split."""
        found: tuple[Any, ...] = super().saved_tensors  # type: ignore[misc]
        own: Any = self
        with DisableTorchFunctionSubclass():
            for x in found:
                if type(x) is Tensor and x.grad_fn is own:
                    self._mark(x, x.output_nr)
        return found

    def apply(self, *gradients: Any) -> Any:
        """Call the backward."""
        given = [self._as_output(nr, gradient) for nr, gradient in enumerate(gradients)]
        found = super().apply(*given)  # type: ignore[misc]
        single = not isinstance(found, tuple)
        fitted = self._as_inputs((found,) if single else found)
        return fitted[0] if single else fitted

    def _as_output(self, nr: int, gradient: Tensor | None) -> Tensor | None:
        """Gradient of an output, split as that is."""
        if gradient is None:
            return None
        with DisableTorchFunctionSubclass():
            return self._mark(gradient.as_subclass(Tensor).view_as(gradient), nr)

    def _mark(self, x: Tensor, nr: int) -> Tensor:
        kind, split = self._outputs.get(nr, (Tensor, None))
        return x if split is None else marked(x, kind, split.topology, split.dim)

    def _as_inputs(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Gradients of the inputs, in the shapes that autograd knows."""
        edges = [edge for edge in self.next_functions if edge[0] is not None]
        learning = [place for place, needs in enumerate(self.needs_input_grad) if needs]
        found = list(gradients)
        for place, edge in zip(learning, edges, strict=False):
            if place < len(found) and isinstance(found[place], Tensor):
                found[place] = _fitted(found[place], input_shape(*edge), self._topology)
        return tuple(found)


def _fitted(gradient: Tensor, shape: torch.Size, topology: Topology) -> Tensor:
    """Gradient in the shape of an input: a part as it is, else the whole or the part of it."""
    with DisableTorchFunctionSubclass():
        part = own_part(gradient)
        if part.shape == shape:
            return part
        found: Tensor = whole(gradient)
        if found.dim() == len(shape):
            sizes = list(zip(found.shape, shape, strict=True))
            cut = [dim for dim, (size, held) in enumerate(sizes) if size != held]
            if len(cut) == 1 and found.shape[cut[0]] == shape[cut[0]] * topology.tp.size:
                return own_slice(found, topology.tp, cut[0])
        return found


@cache
def _with_parts(kind: type) -> type:
    """Class of nodes as `_Node`, which torch made for a function."""
    return type(kind.__name__, (_Node, kind), {})
