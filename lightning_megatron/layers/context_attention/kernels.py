"""Kernels of one product: scores, softmax and weighted sum of a rectangle, with log-sum-exp.

A product returns the output as if its keys were all, and for every row the logarithm of the sum of
the exponentials of its scores, by which `partial_sums` weighs products. Backward takes the output
and log-sum-exp of *all* keys and returns the gradients that this product adds.

===============  ================================================  ==============================
kernel           runs                                              limits
===============  ================================================  ==============================
``cpu``          CPUs                                              no dropout
``flash``        CUDA, float16 and bfloat16, heads of 8 to 256     no mask, no dropout
``efficient``    CUDA, float32, float16, bfloat16                  no dropout
``reference``    anywhere, in float32 at least                     holds all scores
===============  ================================================  ==============================

The first that can do a product does it. On CUDA a kernel adds up in the same order in every run
only where ``torch.use_deterministic_algorithms`` says so.

Legend: b batch, n heads, s queries, t keys, d head dim.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lightning_megatron._torch.devices import in_host_memory, is_cuda
from lightning_megatron._torch.kernels import (
    cpu_attention,
    cpu_attention_backward,
    efficient_attention,
    efficient_attention_backward,
    flash_attention,
    flash_attention_backward,
)

_LARGEST_FLASH_HEAD = 256


@dataclass(frozen=True)
class Scores:
    """Rule that makes weights of the products of queries and keys."""

    scale: float
    """Factor of the products."""
    causal: bool = False
    """Whether query ``i`` sees keys up to ``i``."""
    bias: Tensor | None = None
    """Addend ``[b | 1, n | 1, s, t]`` in the format of the queries, minus infinity for hidden."""
    kept: Tensor | None = None
    """Factors ``[b, n, s, t]`` of the weights: 0 for dropped ones."""


Three = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """Kernel of tensors ``[b, n, s, d]``; keys and values may have fewer heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output ``[b, n, s, d]`` and log-sum-exp ``[b, n, s]``."""
        ...

    def backward(
        self, grad: Tensor, inputs: Three, out: Tensor, lse: Tensor, scores: Scores
    ) -> Three:
        """Gradients of queries, keys and values that this product adds."""
        ...


class CpuKernel:
    """torch's fused kernel of CPUs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        return cpu_attention(q, k, v, scores.causal, scores.bias, scores.scale)

    def backward(
        self, grad: Tensor, inputs: Three, out: Tensor, lse: Tensor, scores: Scores
    ) -> Three:
        """Gradients."""
        return cpu_attention_backward(
            grad, inputs, out, lse, scores.causal, scores.bias, scores.scale
        )


class FlashKernel:
    """Flash attention as torch has it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        return flash_attention(q, k, v, scores.causal, scores.scale)

    def backward(
        self, grad: Tensor, inputs: Three, out: Tensor, lse: Tensor, scores: Scores
    ) -> Three:
        """Gradients."""
        return flash_attention_backward(grad, inputs, out, lse, scores.causal, scores.scale)


class EfficientKernel:
    """Memory-efficient attention as torch has it; it knows no groups of heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        return efficient_attention(q, k, v, scores.causal, scores.bias, scores.scale)

    def backward(
        self, grad: Tensor, inputs: Three, out: Tensor, lse: Tensor, scores: Scores
    ) -> Three:
        """Gradients."""
        q, k, v = inputs
        heads = k.shape[1]
        wide = q, _repeated(k, q.shape[1]), _repeated(v, q.shape[1])
        dq, dk, dv = efficient_attention_backward(
            grad, wide, out, lse, scores.causal, scores.bias, scores.scale
        )
        return dq, _summed(dk, heads), _summed(dv, heads)


class ReferenceKernel:
    """Plain products."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp."""
        values = self._scores(q, k, scores)
        lse = values.logsumexp(-1)
        weights = torch.exp(values - _finite(lse).unsqueeze(-1))
        if scores.kept is not None:
            weights = weights * scores.kept
        out = weights @ _repeated(v, q.shape[1]).to(weights.dtype)
        return out.to(q.dtype), lse

    def backward(
        self, grad: Tensor, inputs: Three, out: Tensor, lse: Tensor, scores: Scores
    ) -> Three:
        """Gradients."""
        q, k, v = inputs
        values = self._scores(q, k, scores)
        weights = torch.exp(values - _finite(lse).unsqueeze(-1))
        wide, heads = weights.dtype, k.shape[1]
        q, k, v = q.to(wide), _repeated(k, q.shape[1]).to(wide), _repeated(v, q.shape[1]).to(wide)
        grad = grad.to(wide)
        used = weights if scores.kept is None else weights * scores.kept
        dv = used.transpose(-1, -2) @ grad
        d_used = grad @ v.transpose(-1, -2)
        if scores.kept is not None:
            d_used = d_used * scores.kept
        delta = (grad * out.to(wide)).sum(-1, keepdim=True)
        ds = weights * (d_used - delta) * scores.scale
        return ds @ k, _summed(ds.transpose(-1, -2) @ q, heads), _summed(dv, heads)

    def _scores(self, q: Tensor, k: Tensor, scores: Scores) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        values = q.to(wide) @ _repeated(k, q.shape[1]).to(wide).transpose(-1, -2) * scores.scale
        if scores.bias is not None:
            values = values + scores.bias
        if scores.causal:
            shape = values.shape[-2:]
            hidden = torch.ones(shape, dtype=torch.bool, device=q.device).triu(1)
            values = values.masked_fill(hidden, -torch.inf)
        return values


def choose(q: Tensor, *, bias: bool, dropout: bool) -> Kernel:
    """Fastest kernel that can do products of such queries.

    Args:
        q: queries ``[b, n, s, d]``.
        bias: whether scores get an addend.
        dropout: whether weights are dropped.
    """
    if dropout:
        return ReferenceKernel()
    if in_host_memory(q.device):
        return CpuKernel()
    if not is_cuda(q.device) or q.dtype == torch.float64:
        return ReferenceKernel()
    head = q.shape[-1]
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and not bias and head % 8 == 0 and head <= _LARGEST_FLASH_HEAD:
        return FlashKernel()
    return EfficientKernel()


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values with as many heads as the queries have."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """Gradient of the ``heads`` that `_repeated` repeated."""
    if gradient.shape[1] == heads:
        return gradient
    return torch.unflatten(gradient, 1, (heads, -1)).sum(2)


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -torch.inf, 0.0)
