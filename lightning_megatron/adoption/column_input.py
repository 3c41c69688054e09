"""Input of column-parallel layers, which an adopted model calls one by one (q, k and v; gate, up).

Those that take the same tensor share one sum of its gradient over tp, and of a sequence that is
split over tp one gather (`entered`).

Under sequence parallelism such a layer multiplies the whole sequence. Kept for the gradient of its
weight, that would be what the split was to save (arXiv 2205.05198, section 4.2.2). So autograd
keeps the part, and the backward gathers once more, for all these layers together. On CPU the
gathered tensor is kept, as in `layers.linear_functions`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.weak import TensorWeakRef

from lightning_megatron.comm.collectives import start_gather
from lightning_megatron.comm.functional import all_gather, copy_to
from lightning_megatron.layers import linear_functions
from lightning_megatron.layers.delayed_wgrad import (
    WgradFactors,
    WgradQueue,
    can_defer,
    compute_dtype,
    input_gradient,
    linear,
    linear_gradients,
    output,
    prepare_gradient,
    rows,
    unquantized_gradient,
)
from lightning_megatron.layers.gemm import GemmBackend
from lightning_megatron.topology.axis import Axis
from lightning_megatron.whole.memory import on_memory, saved_tensors
from lightning_megatron.whole.splits import own_part, split_of, whole

_ENTERED = "_entered_tp"
_IS_ENTERED = "_is_entered_tp"
_SOURCE = "_gathered_from"


def entered(x: Tensor, tp: Axis) -> Tensor:
    """Return the whole of ``x`` with gradients that are summed over tp.

    A second call with the same tensor gets the result of the first.
    """
    if getattr(x, _IS_ENTERED, None) is tp:
        return x
    # A parameter outlives its step. The reference is weak: the result is a view of x, so that the
    # two would keep each other. What learns keeps the result for the backward.
    shares = torch.is_grad_enabled() and x.requires_grad and not x.is_leaf
    known = _known(x, tp) if shares else None
    if known is None:
        split = split_of(x)
        if split is None or split.dim == x.dim() - 1:
            known = copy_to(whole(x), tp)
        else:
            known = _gathered(own_part(x), tp, split.dim)
        if shares:
            # A compiler sees through a plain attribute, and keeps none of it.
            traced = torch.compiler.is_compiling()
            found = known if traced else (TensorWeakRef(known), tp, x._version)
            setattr(x, _ENTERED, found)
    return known


def _known(x: Tensor, tp: Axis) -> Tensor | None:
    """Result of `entered` for ``x``, which has not changed since."""
    found = getattr(x, _ENTERED, None)
    if found is None or torch.compiler.is_compiling():
        return found
    reference, axis, version = found
    known: Tensor | None = reference()
    return known if axis is tp and version == x._version else None


def entered_once(x: Tensor, tp: Axis) -> Tensor:
    """Return `entered` of ``x`` such that column-parallel layers take it as it is."""
    x = entered(x, tp)
    setattr(x, _IS_ENTERED, tp)
    return x


class _Source:
    """Part of which a tensor was gathered.

    Args:
        part: this rank's part.
        axis: ranks that have the parts.
        dim: dim of the parts.

    Attributes:
        uses: layers that need the whole for the gradient of their weight.
    """

    def __init__(self, part: Tensor, axis: Axis, dim: int) -> None:
        self.part = part.detach()
        self.axis = axis
        self.dim = dim
        self.uses = 0
        self._left = 0
        self._held: Tensor | None = None

    def again(self, part: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather ``part``, as autograd has kept it; the last user lets go of the result."""
        if self._held is None:
            self._held = start_gather(part.to(dtype), self.axis, self.dim).wait()
            self._left = self.uses
        found, self._left = self._held, self._left - 1
        if self._left == 0:
            self._held = None
        return found


def _gathered(part: Tensor, axis: Axis, dim: int) -> Tensor:
    """Gather a tensor for `linear_of_gathered`; its gradient is a sum over the ranks."""
    whole = all_gather(part, axis, dim)
    if (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and linear_functions.regathers(part)
    ):
        setattr(whole, _SOURCE, _Source(part, axis, dim))
    return whole


def linear_of_gathered(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    wgrad_queue: WgradQueue | None,
    gemm: GemmBackend | None = None,
) -> Tensor:
    """`layers.delayed_wgrad.linear` of a tensor, perhaps a gathered one, which is not kept."""
    source: _Source | None = getattr(x, _SOURCE, None)
    if source is None:
        return linear(x, weight, bias, wgrad_queue, gemm)
    if wgrad_queue is not None and not (wgrad_queue.enabled and can_defer((weight, bias))):
        wgrad_queue = None
    y: Tensor = _LinearOfGathered.apply(  # type: ignore[no-untyped-call]
        x, source.part, weight, bias, source, wgrad_queue, gemm
    )
    return y


class _LinearOfGathered(Function):
    """``x, part, weight, bias -> y``."""

    @staticmethod
    @on_memory
    def forward(
        ctx: Any,
        x: Tensor,
        part: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        source: _Source,
        wgrad_queue: WgradQueue | None,
        gemm: GemmBackend | None,
    ) -> Tensor:
        x = x.to(compute_dtype(x))
        ctx.source = source
        ctx.dtype = x.dtype
        ctx.shape = x.shape
        ctx.wgrad_queue = wgrad_queue
        ctx.parameters = weight, bias
        ctx.gemm = gemm
        ctx.save_for_backward(part, weight)
        source.uses += any(ctx.needs_input_grad[2:4])
        y, ctx.kept = output(x, weight, gemm, bias)
        return y

    @staticmethod
    @once_differentiable
    @on_memory
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = saved_tensors(ctx)
        needs, gemm = ctx.needs_input_grad, ctx.gemm
        gradient = prepare_gradient(rows(grad), ctx.kept, gemm)
        grad_x = None
        if needs[0]:
            grad_x = input_gradient(gradient, weight, ctx.dtype, gemm).view(ctx.shape)
        wide_no = unquantized_gradient(rows(grad), ctx.parameters[1], gemm)
        source, dtype = ctx.source, ctx.dtype

        def factors() -> list[WgradFactors]:
            x_ni = rows(source.again(part, dtype))
            return [WgradFactors(wide_no, x_ni, gradient, gemm)]

        gradients = linear_gradients(ctx.parameters, needs[2:4], factors, ctx.wgrad_queue)
        return grad_x, None, *gradients, None, None, None
