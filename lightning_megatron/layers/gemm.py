"""The matrix products of a linear layer, which a low precision may compute in its own way.

A linear layer is three products: the output, and in backward the gradients of the input and of the
weight. What surrounds them (collectives, deferral, the bias) is the business of `layers.linear` and
`layers.delayed_wgrad`, whatever the products are made of. A layer whose ``products`` is None
multiplies as autocast says; `precision.fp8` gives others.

Shapes: ``[n, in]`` inputs, ``[n, out]`` outputs and their gradients, ``[out, in]`` weights: those
of this tp rank, with all leading dims in ``n``.
"""

from typing import Any, Protocol

from torch import Tensor


class Products(Protocol):
    """How a layer multiplies."""

    def output(self, x_ni: Tensor, weight_oi: Tensor) -> tuple[Tensor, Any]:
        """The product of the forward, without bias, in the format of ``x_ni``.

        Returns:
            The output ``[n, out]``, and something small that the backward needs.
        """
        ...

    def gradient(self, grad_no: Tensor, kept: Any) -> Any:
        """Make an output's gradient ready for the two products of the backward.

        Args:
            grad_no: the gradient.
            kept: what `output` returned.
        """
        ...

    def input_gradient(self, gradient: Any, weight_oi: Tensor) -> Tensor:
        """The gradient ``[n, in]`` of the input, in the format of the output's."""
        ...

    def weight_gradient(self, gradient: Any, x_ni: Tensor) -> Tensor:
        """The gradient ``[out, in]`` of the weight."""
        ...
