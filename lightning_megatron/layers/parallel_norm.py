"""Normalisation over a feature dim that tp splits.

Behind a column-parallel layer each of ``p`` tp ranks has ``h / p`` of the features of every
position. A norm over all ``h`` needs the statistics of the others, not their features: one
all-gather of one or two numbers a position, and in backward one sum of as many.

Each rank computes mean ``m_r`` and variance ``v_r`` of its own ``h / p`` features. Of all ranks
together these are (Chan, Golub and LeVeque 1983, for parts of one size)

    mean     = sum of m_r / p
    variance = sum of (v_r + (m_r - mean)^2) / p

which subtracts no large numbers from each other, as ``mean(x^2) - mean^2`` would. With
``y = (x - mean) / std``, gradient ``g`` of ``y`` and sums over all ranks

    dx = (g - sum(g) / h - y sum(g y) / h) / std

An RMS norm has no mean, so one number each way. Weight and bias are split as the features are, and
their gradients are complete on their rank: while the sums travel, they are computed. Per position
and rank both ways move ``8 (p - 1)`` bytes forward and ``16 (p - 1) / p`` backward in float32,
however many features there are; gathering them would move ``e h (p - 1) / p``.

Under sequence parallelism a column-parallel layer returns the whole sequence, so the same holds
between it and the row-parallel layer. The residual stream is another matter: there a rank has all
features of a part of the sequence, which `LayerNorm` and `RMSNorm` normalise alone. Statistics are
float32 for lower precisions and float64 for float64.

Legend: n positions, k features of this rank.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_megatron._torch.devices import is_cuda
from lightning_megatron.comm.collectives import start_gather, start_sum
from lightning_megatron.comm.functional import split_to
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.degrees import Degrees, divisibility_problem
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.split_tensor import split_output
from lightning_megatron.whole.splits import own_part, split_of, whole
from lightning_megatron.whole.vocab_loss import at_least_float32


class ParallelLayerNorm(LayerNorm):
    """Layer norm over a feature dim that tp splits; weight and bias are split, too.

    Input: the output of a column-parallel layer, or this rank's features ``[..., dim / tp]`` as a
    plain tensor; a whole tensor ``[..., dim]`` that is equal on all tp ranks is split here. The
    output is split as the input is. A layer that is not distributed is ``nn.LayerNorm``.

    Args:
        dim: number of features of all ranks.
        eps: number added to the variance.
        bias: whether to add a learned bias.
    """

    @override
    def shard_dims(self) -> dict[str, int]:
        return {"weight": 0, "bias": 0}

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        return frozenset()

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        return _problems(self.dim, degrees)

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.topology is None or self.topology.tp.size == 1:
            return super().forward(x)
        return _normalised(self, x, self.topology, self.bias, centre=True)


class ParallelRMSNorm(RMSNorm):
    """RMS norm over a feature dim that tp splits; the weight is split, too.

    Input: the output of a column-parallel layer, or this rank's features ``[..., dim / tp]`` as a
    plain tensor; a whole tensor ``[..., dim]`` that is equal on all tp ranks is split here. The
    output is split as the input is. A layer that is not distributed is ``nn.RMSNorm``.

    Args:
        dim: number of features of all ranks.
        eps: number added to the mean square.
    """

    @override
    def shard_dims(self) -> dict[str, int]:
        return {"weight": 0}

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        return frozenset()

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        return _problems(self.dim, degrees)

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.topology is None or self.topology.tp.size == 1:
            return super().forward(x)
        return _normalised(self, x, self.topology, None, centre=False)


def _problems(dim: int, degrees: Degrees) -> list[str]:
    problem = divisibility_problem("dim", dim, "tp", degrees.tp)
    return [problem] if problem else []


def _normalised(
    layer: LayerNorm | RMSNorm, x: Tensor, topology: Topology, bias: Tensor | None, *, centre: bool
) -> Tensor:
    """Normalise a part of the features, or split a whole tensor first."""
    plain_part = split_of(x) is None and x.shape[-1] == layer.dim // topology.tp.size
    part = _entering(x, layer, topology)
    y: Tensor = _SplitNorm.apply(part, layer.weight, bias, topology.tp, layer.eps, centre)  # type: ignore[no-untyped-call]
    return y if plain_part else split_output(y, topology)


def _entering(x: Tensor, layer: LayerNorm | RMSNorm, topology: Topology) -> Tensor:
    """Return this rank's features of ``x`` as a plain tensor.

    Raises:
        ConfigError: the last dim has another size, or holds all features of a part of the sequence.
    """
    name, split = type(layer).__name__, split_of(x)
    if x.shape[-1] not in (layer.dim, layer.dim // topology.tp.size):
        raise ConfigError(
            f"{name}({layer.dim}), tp={topology.tp.size}: the input has {x.shape[-1]} features; "
            f"nearest valid: {layer.dim // topology.tp.size} of this rank, or {layer.dim}"
        )
    if split is not None and split.dim == x.dim() - 1:
        return own_part(x)
    if split is None and x.shape[-1] != layer.dim:
        return x
    if split is None and topology.sequence_parallel:
        plain = name.removeprefix("Parallel")
        raise ConfigError(
            f"{name}({layer.dim}), sequence_parallel=True: the input holds all features of a part "
            f"of the sequence, which needs no exchange; nearest valid: {plain}({layer.dim})"
        )
    return split_to(whole(x), topology.tp, -1)


class _SplitNorm(Function):
    """Both norms in one node: one message forward, one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_k: Tensor,
        bias_k: Tensor | None,
        axis: Axis,
        eps: float,
        centre: bool,
    ) -> Tensor:
        x_nk = at_least_float32(x.reshape(-1, x.shape[-1]))
        mean_n, rstd_n = _statistics(x_nk, axis, eps, centre=centre)
        ctx.axis, ctx.centre, ctx.has_bias = axis, centre, bias_k is not None
        ctx.save_for_backward(x, weight_k, mean_n, rstd_n)
        y_nk = _standardised(x_nk, mean_n, rstd_n).mul_(weight_k)
        if bias_k is not None:
            y_nk.add_(bias_k)
        return y_nk.view(x.shape).to(_result_dtype(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_k, mean_n, rstd_n = ctx.saved_tensors
        size = x.shape[-1]
        y_nk = _standardised(at_least_float32(x.reshape(-1, size)), mean_n, rstd_n)
        grad_nk = grad.reshape(-1, size).to(y_nk.dtype)
        scaled_nk = grad_nk * weight_k
        sums = [(scaled_nk * y_nk).sum(-1)] + ([scaled_nk.sum(-1)] if ctx.centre else [])
        pending = start_sum(torch.stack(sums), ctx.axis)
        weight_grad_k = (grad_nk * y_nk).sum(0).to(weight_k.dtype)
        bias_grad_k = grad_nk.sum(0).to(weight_k.dtype) if ctx.has_bias else None
        means_tn = pending.wait(weight_grad_k) / (size * ctx.axis.size)
        scaled_nk.addcmul_(y_nk, means_tn[0].unsqueeze(-1), value=-1)
        if ctx.centre:
            scaled_nk.sub_(means_tn[1].unsqueeze(-1))
        x_grad = scaled_nk.mul_(rstd_n.unsqueeze(-1)).view(x.shape).to(x.dtype)
        return x_grad, weight_grad_k, bias_grad_k, None, None, None


def _statistics(
    x_nk: Tensor, axis: Axis, eps: float, *, centre: bool
) -> tuple[Tensor | None, Tensor]:
    """Mean (None without ``centre``) and reciprocal deviation over the features of all ranks."""
    if not centre:
        of_all_pn = start_gather(x_nk.square().mean(-1).unsqueeze(0), axis, 0).wait()
        return None, (of_all_pn.mean(0) + eps).rsqrt()
    own_variance_n, own_mean_n = torch.var_mean(x_nk, -1, correction=0)
    of_all_p2n = start_gather(
        torch.stack((own_mean_n, own_variance_n)).unsqueeze(0), axis, 0
    ).wait()
    mean_n = of_all_p2n[:, 0].mean(0)
    variance_n = (of_all_p2n[:, 1] + (of_all_p2n[:, 0] - mean_n).square()).mean(0)
    return mean_n, (variance_n + eps).rsqrt()


def _standardised(x_nk: Tensor, mean_n: Tensor | None, rstd_n: Tensor) -> Tensor:
    if mean_n is None:
        return x_nk * rstd_n.unsqueeze(-1)
    return (x_nk - mean_n.unsqueeze(-1)).mul_(rstd_n.unsqueeze(-1))


def _result_dtype(x: Tensor) -> torch.dtype:
    """Format of ``F.layer_norm`` of ``x``: float32 under autocast on a GPU."""
    wide = is_cuda(x.device) and torch.is_autocast_enabled("cuda")
    return torch.promote_types(x.dtype, torch.float32) if wide else x.dtype
