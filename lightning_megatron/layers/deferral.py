"""Weight gradients that are computed later than the gradients of the activations.

A zero-bubble pipeline schedule (arXiv 2401.10241) runs the backward of a stage in two parts: the
*input* part, for which the previous stage waits, and the *weight* part, for which nobody does.
Linear layers are where the two can be told apart: each is one product. So during an input part,
linear layers *defer*: instead of a weight gradient they leave behind its two factors, and the
weight part multiplies them. Everything else of a backward runs once, in the input part, the weight
gradients of other layers (norms, embeddings, convolutions) included; all saved activations but the
factors are freed there. Recomputation, shared weights and a module called twice need no care, as
each product is a piece of its own.

Layers of this package and plain ``nn.Linear`` can defer. A weight that is no parameter (made by a
parametrization, for example) is treated like those of other layers, because the graph behind it is
gone by the time of the weight part.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lightning_megatron.layers.base import ParallelLayer


class Piece(NamedTuple):
    """Gradients to be computed."""

    targets: list[Tensor]
    """Weights, and views of weights."""
    compute: Callable[[], list[Tensor]]
    """Their gradients."""


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


def attach(module: nn.Module, deferral: WeightGradients) -> None:
    """Let the linear layers inside ``module`` defer to ``deferral`` while it collects."""
    for child in module.modules():
        if isinstance(child, ParallelLayer):
            child.deferral = deferral
        elif type(child) is nn.Linear:
            # On the instance, so that its class, and what looks at it, stay as they are.
            object.__setattr__(child, "forward", partial(_forward, child, deferral))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, deferral: WeightGradients | None
) -> Tensor:
    """``F.linear`` whose weight gradients can be deferred, where ``deferral`` is not None."""
    if deferral is None or not deferral.enabled or not can_defer((weight, bias)):
        return F.linear(x, weight, bias)
    result: Tensor = _Linear.apply(x, weight, bias, deferral)  # type: ignore[no-untyped-call]
    return result


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a product with ``x``: autocast's where it is on (as for ``F.linear``)."""
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def rows(x: Tensor) -> Tensor:
    """``[..., features]`` as ``[n, features]``."""
    return x.reshape(-1, x.shape[-1])


def weight_gradient(grad_no: Tensor, x_ni: Tensor, weight: Tensor) -> Tensor:
    """Gradient ``[out, in]`` of a weight, in its own dtype."""
    return grad_no.t().mm(x_ni).to(weight.dtype)


def bias_gradient(grad_no: Tensor, bias: Tensor) -> Tensor:
    """Gradient ``[out]`` of a bias, in its own dtype."""
    return grad_no.sum(0).to(bias.dtype)


def _forward(module: nn.Linear, deferral: WeightGradients, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias, deferral)


class _Linear(Function):
    """``x, weight, bias -> y``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferral: WeightGradients
    ) -> Tensor:
        x = x.to(compute_dtype(x))
        ctx.deferral, ctx.parameters = deferral, (weight, bias)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_no, x_ni = rows(grad), rows(x)
        grad_x = grad_no.mm(weight.to(grad.dtype)).view(x.shape) if needs[0] else None
        gradients = linear_gradients(
            ctx.parameters, needs[1:3], lambda: [(grad_no, x_ni)], ctx.deferral
        )
        return grad_x, *gradients, None


def linear_gradients(
    parameters: Sequence[Tensor | None],
    needs: Sequence[bool],
    factors: Callable[[], list[tuple[Tensor, Tensor]]],
    deferral: WeightGradients | None,
) -> list[Tensor | None]:
    """Gradients of weights and biases, now or later.

    Args:
        parameters: ``weight, bias, weight, bias, ...`` (a bias may be None), as they were passed to
            the function: a saved tensor, once unpacked, may no longer lead to the parameter.
        needs: which of them need a gradient.
        factors: for each pair the gradient of the output ``[n, out]`` and the input ``[n, in]``.
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
            grad_no, x_ni = pairs[i // 2]
            parameter = parameters[i]
            assert parameter is not None
            found.append(
                bias_gradient(grad_no, parameter)
                if i % 2
                else weight_gradient(grad_no, x_ni, parameter)
            )
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
