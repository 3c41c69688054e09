"""Matrix products of a linear layer, which a low precision computes in its own way.

A linear layer is three products: the output, and in backward the gradients of the input and of the
weight. A `GemmBackend` computes these. `layers.linear` and `layers.delayed_wgrad` do the rest
(collectives, deferral, the bias). A layer whose ``gemm`` is None multiplies as torch and autocast
do; `precision.fp8` sets other backends.

Shapes: ``[n, in]`` inputs, ``[n, out]`` outputs and their gradients, ``[out, in]`` weights: those
of this tp rank, with all leading dims in ``n``.
"""

from typing import Any, Protocol

import torch
from torch import Tensor


class GemmBackend(Protocol):
    """Implementation of the three matrix products of a linear layer."""

    def output(self, x_ni: Tensor, weight_oi: Tensor) -> tuple[Tensor, Any]:
        """Compute the output, without bias, in the format of ``x_ni``.

        Returns:
            The output ``[n, out]``, and something small that the backward needs (scales).
        """
        ...

    def prepare_gradient(self, grad_no: Tensor, kept: Any) -> Any:
        """Convert the gradient of an output for the two products of the backward.

        Args:
            grad_no: gradient of the output.
            kept: second result of `output`.
        """
        ...

    def input_gradient(self, gradient: Any, weight_oi: Tensor) -> Tensor:
        """Compute the gradient ``[n, in]`` of the input, in the format of the output's."""
        ...

    def weight_gradient(self, gradient: Any, x_ni: Tensor) -> Tensor:
        """Compute the gradient ``[out, in]`` of the weight."""
        ...


class GroupedGemm(Protocol):
    """Implementation of the three products of a stack of matrices with groups of rows.

    Rows are sorted by group, ``counts[g]`` for group ``g``, perhaps none; ``[g, out, in]`` is the
    stack (`layers.experts.grouped`).
    """

    def output(self, x_ni: Tensor, weight_goi: Tensor, counts: list[int]) -> tuple[Tensor, Any]:
        """Compute the output, in the format of ``x_ni``, and what the backward needs of it."""
        ...

    def prepare_gradient(self, grad_no: Tensor, kept: Any, counts: list[int]) -> Any:
        """Convert the gradient of an output for the two products of the backward."""
        ...

    def input_gradient(
        self,
        gradient: Any,
        weight_goi: Tensor,
        counts: list[int],
        total_ni: Tensor | None = None,
    ) -> Tensor:
        """Compute the gradient ``[n, in]`` of the rows, in the format of the output's.

        Added to ``total_ni``, which is returned, where there is one.
        """
        ...

    def weight_gradient(
        self,
        gradient: Any,
        x_ni: Tensor,
        counts: list[int],
        factor: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """Compute ``factor`` times the gradient ``[g, out, in]`` of the stack, in ``dtype``.

        That of a group without rows is 0.
        """
        ...
