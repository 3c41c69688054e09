"""The MLPs of several experts, each of its own rows, as one autograd node.

With a gate, for the rows of each expert::

    g = x Wg^T    u = x Wu^T    a = f(g) * u    y = (w a) Wd^T

``w`` is the weight that the router gives the row. Multiplied with ``y``, as it is written in
papers, its gradient would need ``y``; here it is ``a . (dy Wd)``, of what backward has anyway
(Megatron-LM does so, too).

Autograd would keep ``x``, ``g``, ``u``, ``f(g)`` and ``a``; tokens are copied ``top_k`` times here,
so that these are most of a network's activations. The node keeps ``x``, ``g`` and ``u``, computes
``a`` again in backward, and writes gradients over what is no longer needed. That is half of the
memory, and less time, as fresh memory costs more than an elementwise function. Indexing a stack in
plain autograd would even make a tensor of zeros as large as the stack for each expert.

Models of other libraries keep gate and up as one stack, ``[e, 2f, h]``: one product then gives
``[g, u]``, and one the gradients of both.

The gradients of the matrices are multiplied by a factor on the way, which makes a mean over the
ranks that share experts one process's gradient (`Experts.gradient_factor`). They may be deferred
(`layers.delayed_wgrad`), and a `GroupedGemm` may multiply in another precision (`layers.gemm`).

Shapes: ``n`` rows, ``e`` experts, ``h`` hidden size, ``f`` hidden size of an expert.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_megatron.layers.delayed_wgrad import WgradQueue, can_defer, compute_dtype
from lightning_megatron.layers.experts.grouped import RowCounts, TorchGroupedGemm
from lightning_megatron.layers.gemm import GroupedGemm
from lightning_megatron.layers.mlp import activation_function
from lightning_megatron.layers.size_checks import Activation
from lightning_megatron.whole.memory import on_memory, saved_tensors

_TORCH = TorchGroupedGemm()


def expert_mlp(
    x_nh: Tensor,
    weights: Sequence[Tensor],
    counts: Sequence[int],
    activation: Activation,
    *,
    scale_n: Tensor | None = None,
    gradient_factor: float = 1.0,
    wgrad_queue: WgradQueue | None = None,
    gemm: Sequence[GroupedGemm] | None = None,
    packed: bool = False,
) -> Tensor:
    """Apply the MLP of each expert to its rows.

    Under autocast the products are computed in its format.

    Args:
        x_nh: rows ``[n, h]``, sorted by expert; there may be none.
        weights: ``gate`` (where the activation has one) and ``up``, ``[e, f, h]``, and ``down``,
            ``[e, h, f]``; or gate and up as one, and ``down`` (``packed``).
        counts: rows of each expert; their sum is ``n``.
        activation: see `MLP`.
        scale_n: factor of each row's output, ``[n]``; 1 when None.
        gradient_factor: factor of the gradients of the weights.
        wgrad_queue: queue of deferred weight gradients; None: never defer.
        gemm: backends of the products with each of ``weights``; None: torch.
        packed: whether the first of ``weights`` is ``[e, 2f, h]``, the gate before the up.

    Returns:
        ``[n, h]``.
    """
    if wgrad_queue is not None and not (wgrad_queue.enabled and can_defer(weights)):
        wgrad_queue = None
    options = _Options(
        RowCounts(counts),
        activation,
        gradient_factor,
        wgrad_queue,
        list(gemm or [_TORCH] * len(weights)),
        packed,
    )
    y: Tensor = _ExpertMLP.apply(x_nh, scale_n, options, *weights)  # type: ignore[no-untyped-call]
    return y


class _Options(NamedTuple):
    """Options of the node."""

    counts: list[int]
    activation: Activation
    factor: float
    wgrad_queue: WgradQueue | None
    gemm: list[GroupedGemm]
    packed: bool


class _WeightFactors(NamedTuple):
    """Factors of the gradient of a stack."""

    gemm: GroupedGemm
    gradient: Any
    """Gradient of the output, prepared by ``gemm``."""
    x_ni: Tensor
    dtype: torch.dtype
    """Number format of the stack."""


class _ExpertMLP(Function):
    """``x, scale, gate, up, down -> y``, or without ``gate``, or with both as one."""

    @staticmethod
    @on_memory
    def forward(
        ctx: Any, x: Tensor, scale: Tensor | None, options: _Options, *weights: Tensor
    ) -> Tensor:
        x = x.to(compute_dtype(x)).contiguous()
        counts, gemm = options.counts, options.gemm
        made = [
            p.output(x, w.to(x.dtype), counts) for p, w in zip(gemm[:-1], weights[:-1], strict=True)
        ]
        hidden = [y for y, _ in made]
        a = _activated(options.activation, _unpacked(hidden, options.packed))
        if scale is not None:
            a.mul_(scale.unsqueeze(-1))
        y, kept = gemm[-1].output(a, weights[-1].to(x.dtype), counts)
        ctx.options, ctx.kept = options, [*(needed for _, needed in made), kept]
        # A saved tensor, once unpacked, may no longer lead to the parameter.
        ctx.parameters = weights
        ctx.save_for_backward(scale, x, *hidden, *weights)
        return y

    @staticmethod
    @once_differentiable
    @on_memory
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        options: _Options = ctx.options
        counts, gemm, needs = options.counts, options.gemm, ctx.needs_input_grad
        stacks = len(gemm)
        scale, *saved = saved_tensors(ctx)  # once: a checkpoint refuses to be asked again
        x, *hidden = saved[:stacks]
        *into, down = saved[stacks:]
        prepared = gemm[-1].prepare_gradient(grad.contiguous(), ctx.kept[-1], counts)
        grad_a = gemm[-1].input_gradient(prepared, down.to(x.dtype), counts)
        parts = _unpacked(hidden, options.packed)
        a, grads, grad_scale = _hidden_gradients(options.activation, parts, grad_a, scale)
        if options.packed:
            grads = [torch.cat(grads, -1)]
        factors = [
            _WeightFactors(p, p.prepare_gradient(g, kept, counts), x, w.dtype)
            for p, g, kept, w in zip(gemm[:-1], grads, ctx.kept[:-1], into, strict=True)
        ]
        grad_x = _rows_gradient(factors, into, counts) if needs[0] else None
        factors.append(_WeightFactors(gemm[-1], prepared, a, down.dtype))
        wanted = [i for i, need in enumerate(needs[3:]) if need]
        compute = _weight_gradients([factors[i] for i in wanted], counts, options.factor)
        gradients: list[Tensor | None] = [None] * stacks
        if options.wgrad_queue is not None and options.wgrad_queue.collecting and wanted:
            options.wgrad_queue.add([ctx.parameters[i] for i in wanted], compute)
        else:
            for i, gradient in zip(wanted, compute(), strict=True):
                gradients[i] = gradient
        return grad_x, grad_scale, None, *gradients


def _unpacked(hidden: list[Tensor], packed: bool) -> list[Tensor]:
    return list(hidden[0].chunk(2, -1)) if packed else hidden


def _activated(activation: Activation, hidden: Sequence[Tensor]) -> Tensor:
    """Input of ``down``; ``hidden`` are the outputs of gate and up, or of up alone."""
    a = activation_function(activation)(hidden[0])
    return a if len(hidden) == 1 else a.mul_(hidden[1])


def _hidden_gradients(
    activation: Activation, hidden: Sequence[Tensor], grad_a: Tensor, scale: Tensor | None
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """Input of ``down`` again, and gradients of ``hidden`` and ``scale``; writes over ``grad_a``.

    ``grad_a`` is the gradient of that input.
    """
    first = activation_function(activation)(hidden[0])
    a = first if len(hidden) == 1 else first * hidden[1]
    grad_scale = None
    if scale is not None:
        grad_scale = torch.linalg.vecdot(a, grad_a).to(scale.dtype)
        a.mul_(scale.unsqueeze(-1))
        grad_a.mul_(scale.unsqueeze(-1))
    if len(hidden) == 1:
        return a, [_through(activation, grad_a, hidden[0])], grad_scale
    grad_up = first.mul_(grad_a)
    grads = [_through(activation, grad_a.mul_(hidden[1]), hidden[0]), grad_up]
    return a, grads, grad_scale


def _rows_gradient(
    factors: Sequence[_WeightFactors], weights: Sequence[Tensor], counts: list[int]
) -> Tensor:
    """Gradient of the rows, added up over the stacks that multiply them."""
    total = None
    for f, w in zip(factors, weights, strict=True):
        total = f.gemm.input_gradient(f.gradient, w.to(f.x_ni.dtype), counts, total)
    assert total is not None
    return total


def _weight_gradients(
    factors: Sequence[_WeightFactors], counts: list[int], factor: float
) -> Callable[[], list[Tensor]]:
    """Return a function that computes the gradients of stacks."""

    @torch.no_grad()  # a deferred call comes after the node's backward
    def compute() -> list[Tensor]:
        return [
            f.gemm.weight_gradient(f.gradient, f.x_ni, counts, factor, f.dtype) for f in factors
        ]

    return compute


def _through(activation: Activation, grad: Tensor, x: Tensor) -> Tensor:
    """Gradient of the elementwise function's input, written over that of its output."""
    aten = torch.ops.aten
    if activation == "swiglu":
        aten.silu_backward.grad_input(grad, x, grad_input=grad)
    elif activation == "relu":
        aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad)
    else:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        aten.gelu_backward.grad_input(grad, x, approximate=approximate, grad_input=grad)
    return grad
