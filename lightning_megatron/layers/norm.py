"""Normalisation over the last dim.

A norm's parameters are whole on every tp rank. Without sequence parallelism all ranks normalise the
same activation and compute the same gradient. With it each rank normalises its own part of the
sequence, so the gradients of weight and bias are parts of a sum, which is taken over tp once after
backward (``TensorShard.sum_gradients``), not by a collective per norm.

Weight and bias follow the activation's dtype; statistics are computed in float32 at least.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.mesh import Topology


class _Norm(ParallelLayer):
    """Base of norms of the last dim: ones for the weight, zeros for a bias."""

    bias: nn.Parameter | None

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        return frozenset({"weight", "bias"} if topology.sequence_parallel else ())

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        nn.init.constant_(full, 1.0 if name == "weight" else 0.0)

    @override
    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"


class RMSNorm(_Norm):
    """Root-mean-square norm (Zhang and Sennrich, arXiv 1910.07467): ``x / rms(x) * weight``.

    Args:
        dim: size of the last dim.
        eps: number added to the mean square.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)
        self.reset_parameters()

    @override
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,), self.weight.to(x.dtype), self.eps)


class HeadNorm(RMSNorm):
    """RMS norm of each head's queries or keys (Henry et al., arXiv 2010.04245; Qwen3).

    All heads share the weight. A tp rank normalises only its own heads, so its gradient is always a
    part of a sum.

    Args:
        dim: size of a head.
        eps: number added to the mean square.
    """

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        return frozenset({"weight"} if topology.tp.size > 1 else ())


class LayerNorm(_Norm):
    """Layer norm (Ba et al., arXiv 1607.06450): ``(x - mean) / std * weight + bias``.

    Args:
        dim: size of the last dim.
        eps: number added to the variance.
        bias: whether to add a learned bias.
    """

    def __init__(self, dim: int, eps: float = 1e-5, *, bias: bool = True) -> None:
        super().__init__(dim, eps)
        if bias:
            self.bias = nn.Parameter(torch.empty(dim))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @override
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, (self.dim,), self.weight.to(x.dtype), bias, self.eps)
