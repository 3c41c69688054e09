"""Autograd functions of the column-parallel and the row-parallel linear layer.

`layers.linear` says which collectives they need. Each layer is one autograd node here, which fixes
the order of products and collectives: the column layer's backward starts the sum of ``dx`` as soon
as it has it, computes the gradients of the weights meanwhile and waits last. Its second gather of
``x`` runs beside the product that gives ``dx`` (keeping ``x`` would undo the saving). On CPU, where
memory is plentiful and a collective slow, the gathered ``x`` is kept instead (`regathers`).

Weight gradients may be deferred (`layers.delayed_wgrad`), and a `GemmBackend` may compute the
products in another precision (`layers.gemm`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from lightning_megatron._torch.devices import on_host
from lightning_megatron._torch.graphs import differentiates_again
from lightning_megatron.comm.collectives import start_gather, start_sum, start_sum_scatter
from lightning_megatron.comm.functional import copy_to, reduce_from
from lightning_megatron.comm.operators import Waited
from lightning_megatron.layers.delayed_wgrad import (
    WgradFactors,
    WgradQueue,
    add_bias,
    compute_dtype,
    input_gradient,
    linear_gradients,
    output,
    prepare_gradient,
    rows,
    twice,
    unquantized_gradient,
)
from lightning_megatron.layers.gemm import GemmBackend
from lightning_megatron.topology.axis import Axis
from lightning_megatron.whole.memory import on_memory, saved_tensors

SEQUENCE_DIM = 1
"""Dim along which sequence parallelism splits an activation."""


def regathers(x: Tensor) -> bool:
    """Whether a sequence-parallel column layer gathers ``x`` again rather than keeping it."""
    return not on_host(x.device)


class _ColumnParallel(Function):
    """``x, weight, bias, weight, bias, ... -> y, y, ...`` (see the module's table).

    Weight gradients may be deferred (`layers.delayed_wgrad`).
    """

    @staticmethod
    @on_memory
    def forward(
        ctx: Any,
        x: Tensor,
        axis: Axis,
        sequence: bool,
        wgrad_queue: WgradQueue | None,
        gemm: Sequence[GemmBackend | None],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        x = x.to(compute_dtype(x))
        gathered = start_gather(x, axis, SEQUENCE_DIM).wait() if sequence else x
        weights, biases = parameters[::2], parameters[1::2]
        ctx.axis = axis
        ctx.sequence = sequence
        ctx.wgrad_queue = wgrad_queue
        ctx.gemm = gemm
        ctx.regather = sequence and regathers(x)
        ctx.parameters = parameters
        ctx.save_for_backward(x if ctx.regather else gathered, *weights)
        found = [
            output(gathered, w, p, b)
            for w, b, p in zip(weights, biases, gemm, strict=True)
            if w is not None
        ]
        ctx.kept = [kept for _, kept in found]
        return tuple(y for y, _ in found)

    @staticmethod
    @on_memory
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = saved_tensors(ctx)
        if differentiates_again():
            return _column_twice(ctx, x, grads)
        needs, wgrad_queue = ctx.needs_input_grad, ctx.wgrad_queue
        later = wgrad_queue is not None and wgrad_queue.collecting
        regathered = None
        if ctx.regather and any(needs[5:]) and not later:
            regathered = start_gather(x, ctx.axis, SEQUENCE_DIM, after=grads[0])
        gemm = ctx.gemm
        after = grads[0] if ctx.regather else None
        gradients = [
            prepare_gradient(rows(grad), kept, p)
            for grad, kept, p in zip(grads, ctx.kept, gemm, strict=True)
        ]
        wide = [
            unquantized_gradient(rows(grad), bias, p)
            for grad, bias, p in zip(grads, ctx.parameters[1::2], gemm, strict=True)
        ]
        pending = grad_x = None
        if needs[0]:
            grad_x = _column_input_gradient(gradients, weights, x.dtype, gemm)
            grad_x = grad_x.view(*grads[0].shape[:-1], x.shape[-1])
            pending = _start_reduction(grad_x, ctx.axis, ctx.sequence)

        def factors() -> list[WgradFactors]:
            whole = x
            if ctx.regather:
                again = regathered or start_gather(x, ctx.axis, SEQUENCE_DIM, after=after)
                whole = again.wait()
            x_ni = rows(whole)
            return [
                WgradFactors(grad_no, x_ni, gradient, p)
                for grad_no, gradient, p in zip(wide, gradients, gemm, strict=True)
            ]

        found = linear_gradients(ctx.parameters, needs[5:], factors, wgrad_queue)
        if pending is not None:
            grad_x = pending.wait(*(gradient for gradient in found if gradient is not None))
        return grad_x, None, None, None, None, *found


class _RowParallel(Function):
    """``x, weight, bias -> y`` (see the module's table)."""

    @staticmethod
    @on_memory
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        axis: Axis,
        sequence: bool,
        wgrad_queue: WgradQueue | None,
        gemm: GemmBackend | None,
    ) -> Tensor:
        x = x.to(compute_dtype(x))
        ctx.axis = axis
        ctx.sequence = sequence
        ctx.wgrad_queue = wgrad_queue
        ctx.gemm = gemm
        ctx.parameters = weight, bias
        ctx.save_for_backward(x, weight)
        partial, ctx.kept = output(x, weight, gemm)
        y = _start_reduction(partial, axis, sequence).wait()
        return y if bias is None else add_bias(y, bias)

    @staticmethod
    @on_memory
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved_tensors(ctx)
        if differentiates_again():
            return _row_twice(ctx, x, grad)
        needs, gemm = ctx.needs_input_grad, ctx.gemm
        if ctx.sequence:
            grad = start_gather(grad, ctx.axis, SEQUENCE_DIM).wait()
        grad_no, x_ni = rows(grad), rows(x)
        gradient = prepare_gradient(grad_no, ctx.kept, gemm)
        grad_x = input_gradient(gradient, weight, x.dtype, gemm).view(x.shape) if needs[0] else None
        wide_no = unquantized_gradient(grad_no, ctx.parameters[1], gemm)
        gradients = linear_gradients(
            ctx.parameters,
            needs[1:3],
            lambda: [WgradFactors(wide_no, x_ni, gradient, gemm)],
            ctx.wgrad_queue,
        )
        return grad_x, *gradients, None, None, None, None


apply_column: Callable[..., tuple[Tensor, ...]] = _ColumnParallel.apply
apply_row: Callable[..., Tensor] = _RowParallel.apply


def _column_twice(ctx: Any, x: Tensor, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of column-parallel layers that can be differentiated."""

    def layers(x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        given = copy_to(x, ctx.axis)
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        return tuple(F.linear(given, w, b) for w, b in pairs if w is not None)

    needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[5:])
    found = twice(layers, (x, *ctx.parameters), grads, needs, ctx.gemm, sequence=ctx.sequence)
    return found[0], None, None, None, None, *found[1:]


def _row_twice(ctx: Any, x: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients of a row-parallel layer that can be differentiated."""

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = reduce_from(F.linear(x, weight), ctx.axis)
        return y if bias is None else y + bias

    needs, backends, sequence = ctx.needs_input_grad, (ctx.gemm,), ctx.sequence
    found = twice(layer, (x, *ctx.parameters), (grad,), needs, backends, sequence=sequence)
    return *found, None, None, None, None


def _column_input_gradient(
    gradients: Sequence[Any],
    weights: Sequence[Tensor],
    dtype: torch.dtype,
    gemm: Sequence[GemmBackend | None],
) -> Tensor:
    """Sum this rank's part of the input gradient ``[n, in]`` over the layers that share x."""
    total = input_gradient(gradients[0], weights[0], dtype, gemm[0])
    for gradient, weight, multiply in zip(gradients[1:], weights[1:], gemm[1:], strict=True):
        if multiply is None:
            total.addmm_(gradient, weight.to(gradient.dtype))
        else:
            total.add_(input_gradient(gradient, weight, dtype, multiply))
    return total


def _start_reduction(partial: Tensor, axis: Axis, sequence: bool) -> Waited:
    """Start the sum of a partial activation: whole, or sharded along the sequence."""
    if sequence:
        return start_sum_scatter(partial, axis, SEQUENCE_DIM)
    return start_sum(partial, axis)
