"""Weight gradients that are computed later than the gradients of the activations.

A zero-bubble pipeline schedule (arXiv 2401.10241) runs the backward of a stage in two parts: the
*input* part, for which the previous stage waits, and the *weight* part, for which nobody does.
Linear layers are where the two can be told apart: each is one product. So during an input part,
linear layers *defer*: instead of a weight gradient they leave behind its two factors, and the
weight part multiplies them. Everything else of a backward runs once, in the input part, the weight
gradients of other layers (norms, embeddings, convolutions) included; all saved activations but the
factors are freed there. Recomputation, shared weights and a module called twice need no care, as
each product is a piece of its own.

The backward of a compiled graph is one piece. So where a network is compiled, layers that may defer
(under schedules that split backwards, and only there) break the graph: what lies between them is
compiled, and their products run as they are, which a compiler would leave to the same libraries
anyway.

Layers of this package and plain ``nn.Linear`` can defer. A weight that is no parameter (made by a
parametrization, for example) is treated like those of other layers, because the graph behind it is
gone by the time of the weight part.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron._torch import compile_with_callers_only, in_shape
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.gemm import Products


class Piece(NamedTuple):
    """Gradients to be computed."""

    targets: list[Tensor]
    """Weights, and views of weights."""
    compute: Callable[[], list[Tensor]]
    """Their gradients."""


class Factors(NamedTuple):
    """What the gradients of a weight and its bias are made of."""

    grad_no: Tensor | None
    """Gradient of the output, ``[n, out]``; None where nothing needs it (`wide_gradient`)."""
    x_ni: Tensor
    """Input, ``[n, in]``."""
    gradient: Any = None
    """``grad_no`` as ``products`` made it `ready`."""
    products: Products | None = None
    """How to multiply."""


_breaking: list[Callable[..., Any]] = []
_Called = TypeVar("_Called", bound=Callable[..., Any])


def breaks_graphs(function: _Called) -> _Called:
    """Mark a function that calls itself by `WeightGradients.outside_graphs`, or one that does."""
    _breaking.append(function)
    return function


class WeightGradients:
    """What the layers of one rank have deferred.

    Attributes:
        collecting: whether layers are to defer now.
        enabled: whether what runs forward (or is recomputed) now will be asked to defer. Where it
            will not, plain linear layers keep to torch's own function, which costs less.
    """

    def __init__(self) -> None:
        self.collecting, self.enabled = False, True
        self._pieces: list[Piece] = []
        self._outside: Callable[..., Any] | None = None

    def outside_graphs(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` between the graphs of a compiler that is about to trace it."""
        assert self._outside is not None
        return self._outside(function, *args)

    def load(self) -> None:
        """Get ready for compilers; not at import, as it loads theirs."""
        self._outside = torch.compiler.disable(_call)  # type: ignore[no-untyped-call]
        for function in _breaking:
            compile_with_callers_only(function)

    def add(self, targets: list[Tensor], compute: Callable[[], list[Tensor]]) -> None:
        """Called in a layer's backward: leave the gradients of ``targets`` for later."""
        self._pieces.append(Piece(targets, compute))

    def take(self) -> list[Piece]:
        """Everything deferred since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces


def add_gradients(pieces: list[Piece]) -> None:
    """Compute deferred gradients and add them to ``.grad``; empties the list as it goes."""
    total: dict[int, tuple[Tensor, Tensor]] = {}
    pieces.reverse()
    while pieces:
        targets, compute = pieces.pop()
        for target, gradient in zip(targets, compute(), strict=True):
            known = total.get(id(target))
            total[id(target)] = target, gradient if known is None else known[1].add_(gradient)
    if total:
        torch.autograd.backward(
            [target for target, _ in total.values()], [g for _, g in total.values()]
        )


def can_defer(weights: Sequence[Tensor | None]) -> bool:
    """Whether gradients can be sent to ``weights`` after the graph has been used up."""
    return torch.is_grad_enabled() and all(
        w is None or w.is_leaf or (w._is_view() and w._base is not None and w._base.is_leaf)
        for w in weights
    )


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def attach(module: nn.Module, deferral: WeightGradients) -> None:
    """Let the linear layers inside ``module`` defer to ``deferral`` while it collects."""
    deferral.load()
    for child in module.modules():
        if isinstance(child, ParallelLayer):
            child.deferral = deferral
        elif type(child) is nn.Linear:
            _take_over(child, deferral, getattr(child, PRODUCTS, None))


def end_graphs(module: nn.Module) -> None:
    """Let layers inside ``module`` run between the graphs of a compiler while they must.

    Those of tp that have ``products`` of their own must: these share scales over tp and keep
    histories of them, which no graph can.
    """
    never = WeightGradients()
    never.enabled = False
    never.load()
    for child in module.modules():
        if isinstance(child, ParallelLayer) and child.tp_size > 1:
            child.without_graphs = never


def without_graphs(layers: Sequence[ParallelLayer]) -> WeightGradients | None:
    """Who calls layers that share an input between graphs; None if they can be part of one."""
    first = layers[0]
    if first.deferral is not None:
        found: WeightGradients | None = first.deferral
        return found
    own = any(getattr(layer, PRODUCTS, None) is not None for layer in layers)
    return first.without_graphs if own else None


def multiply_with(layer: nn.Module, products: Products | None) -> None:
    """Let a linear layer, ours or a plain ``nn.Linear``, compute its products in another way."""
    setattr(layer, PRODUCTS, products)
    if type(layer) is nn.Linear:
        taken = getattr(layer.__dict__.get("forward"), "__self__", None)
        deferral = taken.deferral if isinstance(taken, _Taken) else None
        _take_over(layer, deferral, products)


def _take_over(
    layer: nn.Linear, deferral: WeightGradients | None, products: Products | None
) -> None:
    # On the instance, so that its class, and what looks at it, stay as they are. A method, as a
    # compiler makes one graph for all layers whose forwards are methods with the same code.
    object.__setattr__(layer, "forward", _Taken(layer, deferral, products).run)


PRODUCTS = "products"
"""Attribute of a linear layer that says how it multiplies (`layers.gemm`)."""


@breaks_graphs
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    deferral: WeightGradients | None,
    products: Products | None = None,
) -> Tensor:
    """``F.linear`` whose weight gradients can be deferred, and whose products be others.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.
        deferral: where to leave weight gradients, if not None.
        products: how to multiply, if not as torch does.
    """
    if deferral is not None and torch.compiler.is_compiling():
        y: Tensor = deferral.outside_graphs(linear, x, weight, bias, deferral, products)
        return y
    if deferral is not None and not (deferral.enabled and can_defer((weight, bias))):
        deferral = None
    if deferral is None and products is None:
        return F.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias, deferral, products)  # type: ignore[no-untyped-call]
    return result


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product with ``x``: autocast's where it is on (as for ``F.linear``)."""
    kind = x.device.type
    # Autocast has not heard of the meta device.
    if not x.is_meta and x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def rows(x: Tensor) -> Tensor:
    """``[..., features]`` as ``[n, features]``."""
    return x.reshape(-1, x.shape[-1])


def weight_gradient(factors: Factors, weight: Tensor) -> Tensor:
    """Gradient ``[out, in]`` of a weight, in its own dtype."""
    grad_no, x_ni, gradient, products = factors
    if products is not None:
        return products.weight_gradient(gradient, x_ni).to(weight.dtype)
    assert grad_no is not None
    return grad_no.t().mm(x_ni).to(weight.dtype)


def bias_gradient(grad_no: Tensor, bias: Tensor) -> Tensor:
    """Gradient ``[out]`` of a bias, in its own dtype."""
    return grad_no.sum(0).to(bias.dtype)


def output(
    x: Tensor, weight: Tensor, products: Products | None, bias: Tensor | None = None
) -> tuple[Tensor, Any]:
    """The product ``[..., out]`` plus bias, no view, and what `ready` wants of the product."""
    weight = weight.to(x.dtype)
    if products is None:
        bias = None if bias is None else bias.to(x.dtype)
        y, kept = F.linear(rows(x), weight, bias), None
    else:
        y, kept = products.output(rows(x), weight)
        if bias is not None:
            y = plus(y, bias)
    return (y if x.dim() == 2 else in_shape(y, (*x.shape[:-1], y.shape[-1]))), kept


def plus(y: Tensor, bias: Tensor) -> Tensor:
    """``y + bias``; ``y`` may be written into.

    Not in a graph, where it would save nothing: a function that writes into its result has wrong
    gradients there in torch 2.11.
    """
    return y + bias if torch.compiler.is_compiling() else y.add_(bias)


def ready(grad_no: Tensor, kept: Any, products: Products | None) -> Any:
    """An output's gradient as `input_gradient` and `weight_gradient` want it."""
    return grad_no if products is None else products.gradient(grad_no, kept)


def wide_gradient(grad_no: Tensor, bias: Tensor | None, products: Products | None) -> Tensor | None:
    """An output's gradient as it came, None where products of their own are all that needs it.

    What is deferred then holds the gradient in the format of the products only.
    """
    return grad_no if products is None or bias is not None else None


def input_gradient(
    gradient: Any, weight: Tensor, dtype: torch.dtype, products: Products | None
) -> Tensor:
    """Gradient ``[n, in]`` of an input of format ``dtype``, from what `ready` returned."""
    if products is not None:
        return products.input_gradient(gradient, weight.to(dtype))
    grad_no: Tensor = gradient
    return grad_no.mm(weight.to(grad_no.dtype))


class _Taken(NamedTuple):
    """A plain layer that computes as ours do."""

    layer: nn.Linear
    deferral: WeightGradients | None
    products: Products | None

    @breaks_graphs
    def run(self, x: Tensor) -> Tensor:
        """In place of the layer's forward."""
        return linear(x, self.layer.weight, self.layer.bias, self.deferral, self.products)


class _Linear(Function):
    """``x, weight, bias -> y``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        deferral: WeightGradients | None,
        products: Products | None,
    ) -> Tensor:
        x = x.to(compute_dtype(x))
        ctx.deferral, ctx.parameters, ctx.products = deferral, (weight, bias), products
        ctx.save_for_backward(x, weight)
        y, ctx.kept = output(x, weight, products, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, products = ctx.needs_input_grad, ctx.products
        grad_no, x_ni = rows(grad), rows(x)
        gradient = ready(grad_no, ctx.kept, products)
        grad_x = (
            input_gradient(gradient, weight, x.dtype, products).view(x.shape) if needs[0] else None
        )
        wide_no = wide_gradient(grad_no, ctx.parameters[1], products)
        gradients = linear_gradients(
            ctx.parameters,
            needs[1:3],
            lambda: [Factors(wide_no, x_ni, gradient, products)],
            ctx.deferral,
        )
        return grad_x, *gradients, None, None


def linear_gradients(
    parameters: Sequence[Tensor | None],
    needs: Sequence[bool],
    factors: Callable[[], list[Factors]],
    deferral: WeightGradients | None,
) -> list[Tensor | None]:
    """Gradients of weights and biases, now or later.

    Args:
        parameters: ``weight, bias, weight, bias, ...`` (a bias may be None), as they were passed to
            the function: a saved tensor, once unpacked, may no longer lead to the parameter.
        needs: which of them need a gradient.
        factors: for each pair what its gradients are made of.
        deferral: where to leave them, if it collects.

    Returns:
        For every parameter its gradient, None if it needs none or if it is deferred.
    """
    wanted = [
        i
        for i, (p, need) in enumerate(zip(parameters, needs, strict=True))
        if need and p is not None
    ]

    def compute() -> list[Tensor]:
        pairs = factors()
        found = []
        for i in wanted:
            pair, parameter = pairs[i // 2], parameters[i]
            assert parameter is not None
            if i % 2 and pair.grad_no is not None:
                found.append(bias_gradient(pair.grad_no, parameter))
            else:
                found.append(weight_gradient(pair, parameter))
        return found

    gradients: list[Tensor | None] = [None] * len(parameters)
    if not wanted:
        return gradients
    if deferral is not None and deferral.collecting:
        deferral.add([p for i in wanted if (p := parameters[i]) is not None], compute)
        return gradients
    for i, gradient in zip(wanted, compute(), strict=True):
        gradients[i] = gradient
    return gradients
