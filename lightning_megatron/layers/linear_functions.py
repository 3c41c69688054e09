"""The two linear layers of tensor parallelism as functions with their collectives in backward.

`layers.linear` says what moves where; here each layer is one autograd node, so that the order of
products and collectives is written down: the column layer's backward starts the sum of ``dx`` as
soon as it has it, computes the gradients of the weights meanwhile and waits last; its second gather
of ``x`` (which is not kept: it would undo the saving) runs beside the product that gives ``dx``. On
CPU, where memory is plentiful and a collective slow, the gathered ``x`` is kept instead
(`regathers`).

The gradients of the weights may come later (`layers.delayed_wgrad`), and the products be computed
in another precision (`layers.gemm`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_megatron.comm.collectives import start_gather, start_sum, start_sum_scatter
from lightning_megatron.comm.operators import Waited
from lightning_megatron.layers.delayed_wgrad import (
    Factors,
    WeightGradients,
    compute_dtype,
    input_gradient,
    linear_gradients,
    output,
    plus,
    ready,
    rows,
    wide_gradient,
)
from lightning_megatron.layers.gemm import Products
from lightning_megatron.topology.mesh import Axis

SEQUENCE_DIM = 1
"""Dim along which sequence parallelism splits an activation."""


def regathers(x: Tensor) -> bool:
    """Whether a sequence-parallel column layer gathers ``x`` again rather than keeping it."""
    return x.device.type != "cpu"


class _ColumnParallel(Function):
    """``x, weight, bias, weight, bias, ... -> y, y, ...`` (see the module's table).

    The gradients of the weights may come later (`layers.delayed_wgrad`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        sequence: bool,
        deferral: WeightGradients | None,
        products: Sequence[Products | None],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        x = x.to(compute_dtype(x))
        gathered = start_gather(x, axis, SEQUENCE_DIM).wait() if sequence else x
        weights, biases = parameters[::2], parameters[1::2]
        ctx.axis, ctx.sequence, ctx.deferral, ctx.products = axis, sequence, deferral, products
        ctx.regather, ctx.parameters = sequence and regathers(x), parameters
        ctx.save_for_backward(x if ctx.regather else gathered, *weights)
        found = [
            output(gathered, w, p, b)
            for w, b, p in zip(weights, biases, products, strict=True)
            if w is not None
        ]
        ctx.kept = [kept for _, kept in found]
        return tuple(y for y, _ in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs, deferral = ctx.needs_input_grad, ctx.deferral
        later = deferral is not None and deferral.collecting
        regathered = None
        if ctx.regather and any(needs[5:]) and not later:
            regathered = start_gather(x, ctx.axis, SEQUENCE_DIM, after=grads[0])
        products = ctx.products
        after = grads[0] if ctx.regather else None
        gradients = [
            ready(rows(grad), kept, p)
            for grad, kept, p in zip(grads, ctx.kept, products, strict=True)
        ]
        wide = [
            wide_gradient(rows(grad), bias, p)
            for grad, bias, p in zip(grads, ctx.parameters[1::2], products, strict=True)
        ]
        pending = grad_x = None
        if needs[0]:
            grad_x = _column_input_gradient(gradients, weights, x.dtype, products)
            grad_x = grad_x.view(*grads[0].shape[:-1], x.shape[-1])
            pending = _start_reduction(grad_x, ctx.axis, ctx.sequence)

        def factors() -> list[Factors]:
            whole = x
            if ctx.regather:
                again = regathered or start_gather(x, ctx.axis, SEQUENCE_DIM, after=after)
                whole = again.wait()
            x_ni = rows(whole)
            return [
                Factors(grad_no, x_ni, gradient, p)
                for grad_no, gradient, p in zip(wide, gradients, products, strict=True)
            ]

        found = linear_gradients(ctx.parameters, needs[5:], factors, deferral)
        if pending is not None:
            grad_x = pending.wait(*(gradient for gradient in found if gradient is not None))
        return grad_x, None, None, None, None, *found


class _RowParallel(Function):
    """``x, weight, bias -> y`` (see the module's table)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence: bool,
        deferral: WeightGradients | None,
        products: Products | None,
    ) -> Tensor:
        x = x.to(compute_dtype(x))
        ctx.axis, ctx.sequence, ctx.deferral, ctx.products = axis, sequence, deferral, products
        ctx.parameters = weight, bias
        ctx.save_for_backward(x, weight)
        partial, ctx.kept = output(x, weight, products)
        y = _start_reduction(partial, axis, sequence).wait()
        return y if bias is None else plus(y, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs, products = ctx.needs_input_grad, ctx.products
        if ctx.sequence:
            grad = start_gather(grad, ctx.axis, SEQUENCE_DIM).wait()
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
        return grad_x, *gradients, None, None, None, None


apply_column: Callable[..., tuple[Tensor, ...]] = _ColumnParallel.apply
apply_row: Callable[..., Tensor] = _RowParallel.apply


def _column_input_gradient(
    gradients: Sequence[Any],
    weights: Sequence[Tensor],
    dtype: torch.dtype,
    products: Sequence[Products | None],
) -> Tensor:
    """This rank's part of the input gradient ``[n, in]``, summed over the layers that share it."""
    total = input_gradient(gradients[0], weights[0], dtype, products[0])
    for gradient, weight, multiply in zip(gradients[1:], weights[1:], products[1:], strict=True):
        if multiply is None:
            total.addmm_(gradient, weight.to(gradient.dtype))
        else:
            total.add_(input_gradient(gradient, weight, dtype, multiply))
    return total


def _start_reduction(partial: Tensor, axis: Axis, sequence: bool) -> Waited:
    """Begin to make a partial activation true: whole, or sharded along the sequence."""
    if sequence:
        return start_sum_scatter(partial, axis, SEQUENCE_DIM)
    return start_sum(partial, axis)
