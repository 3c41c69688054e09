"""Softmax over a dim that tp splits.

Each of ``p`` ranks has a part of the numbers, and computes the log-sum-exp of its own. One
all-gather of these, one number a row, gives that of the whole row, and the rank's part of the
result:

    lse = logsumexp over ranks of the partial lse
    y   = exp(x - lse)

(A maximum and then a sum of exponentials would be two messages.) The gradient needs one sum of one
number a row: ``dx = y (dy - sum(dy y))``. Only ``y`` is kept for it.

The output of a column-parallel layer is a `SplitTensor`, whose own ``x.softmax(-1)`` returns the
same numbers. This layer keeps fewer activations, knows plain parts, and stays split in a compiled
graph, where there are no split tensors.

Arithmetic is float32 for lower precisions and float64 for float64.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron._torch.devices import is_cuda
from lightning_megatron.comm.collectives import start_gather, start_sum
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.degrees import Degrees, divisibility_problem
from lightning_megatron.whole.splits import marked, own_part, split_of
from lightning_megatron.whole.vocab_loss import at_least_float32


class ParallelSoftmax(ParallelLayer):
    """Softmax over a dim that tp splits.

    Input: a split tensor, as a column-parallel layer returns it, or a plain tensor with this rank's
    ``size / tp`` numbers along the dim. A plain tensor with all ``size`` of them, and a tensor that
    is split along another dim, need no exchange. The output is split as the input is. A layer that
    is not distributed is ``nn.Softmax``.

    Args:
        size: numbers along the dim of all ranks together.
        dim: dim over which the results add up to 1.
    """

    def __init__(self, size: int, dim: int = -1) -> None:
        super().__init__()
        self.size = size
        self.dim = dim

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        problem = divisibility_problem("size", self.size, "tp", degrees.tp)
        return [problem] if problem else []

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Compute the softmax.

        Raises:
            ConfigError: the dim has neither all numbers nor those of this rank.
        """
        split, dim = split_of(x), self.dim % x.dim()
        if x.shape[dim] == self.size and (split is None or split.dim != dim):
            return F.softmax(x, dim)
        if self.topology is None or x.shape[dim] not in (self.size, self.size // self.tp_size):
            raise ConfigError(
                f"ParallelSoftmax({self.size}, dim={self.dim}), tp={self.tp_size}: the input has "
                f"{x.shape[dim]} numbers along the dim; "
                f"nearest valid: ParallelSoftmax({x.shape[dim]}, dim={self.dim})"
            )
        y: Tensor = _SplitSoftmax.apply(own_part(x), self.topology.tp, dim)  # type: ignore[no-untyped-call]
        return y if split is None else marked(y, type(x), split.topology, dim)

    @override
    def extra_repr(self) -> str:
        return f"{self.size}, dim={self.dim}, {super().extra_repr()}"


class _SplitSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        wide = at_least_float32(x)
        own = wide.logsumexp(dim, keepdim=True)
        lse = start_gather(own.unsqueeze(0), axis, 0).wait().logsumexp(0)
        ctx.axis, ctx.dim, ctx.dtype = axis, dim, x.dtype
        y = (wide - lse).exp_().to(_result_dtype(x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        y, grad = at_least_float32(y), at_least_float32(grad)
        total = start_sum((grad * y).sum(ctx.dim, keepdim=True), ctx.axis).wait()
        return (grad - total).mul_(y).to(ctx.dtype), None, None


def _result_dtype(x: Tensor) -> torch.dtype:
    """Format of ``F.softmax`` of ``x``: float32 under autocast on a GPU."""
    wide = is_cuda(x.device) and torch.is_autocast_enabled("cuda")
    return torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
