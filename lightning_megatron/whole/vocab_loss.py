"""Cross entropy of logits that are split over the vocabulary.

The logits of a large vocabulary are the largest activation of a language model; gathering them
would undo the split. Each rank computes, from its own part, the log-sum-exp, the logit of the
target (zero when another rank owns it) and, for label smoothing, the sum of the logits: three
numbers per position. One all-gather of these gives

    lse  = logsumexp over ranks of the partial lse
    loss = (1 - e) (lse - logit[target]) + e (lse - mean of logits) + z lse^2

and the gradient needs nothing more: ``softmax = exp(logits - lse)`` on every rank's own part.
(Separate collectives for the maximum and the sum of exponentials, as in Megatron-LM, cost two
more.) ``e`` is the label smoothing, ``z`` the weight of the z-loss (PaLM, arXiv 2204.02311,
section 5).

Under context parallelism each cp rank has the logits of its part of the sequences, and the whole
targets. It takes its own targets, and the loss is that of whole sequences on every rank: one sum
over cp of one number.

Arithmetic is float32 for lower precisions and float64 for float64. Every tp rank computes the same
loss to the last bit, since all combine the same numbers in the same order.

Legend: n positions, v this rank's part of the vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lightning_megatron._torch.devices import on_host
from lightning_megatron._torch.graphs import differentiates_again
from lightning_megatron.comm.collectives import start_gather
from lightning_megatron.comm.functional import gather_from
from lightning_megatron.topology.axis import Axis


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_nv: Tensor,
        targets_n: Tensor,
        axis: Axis,
        ignore_index: int,
        smoothing: float,
        z: float,
    ) -> Tensor:
        size = logits_nv.shape[-1]
        ignored_n = targets_n == ignore_index
        check_targets(targets_n, ignored_n, size * axis.size)
        index_n, foreign_n = own_targets(targets_n, ignored_n, size, axis)
        terms_tn = position_terms(logits_nv, index_n, foreign_n, smoothing)
        loss_n, lse_n = loss_of_terms(terms_tn, axis, size * axis.size, smoothing, z)
        ctx.axis = axis
        ctx.options = (smoothing, z, size * axis.size)
        ctx.save_for_backward(logits_nv, lse_n, index_n, foreign_n, ignored_n)
        return loss_n.masked_fill(ignored_n, 0)

    @staticmethod
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor | None, ...]:
        logits_nv, lse_n, index_n, foreign_n, ignored_n = ctx.saved_tensors
        if differentiates_again():
            return _twice(ctx, grad_n), None, None, None, None, None
        smoothing, z, vocabulary = ctx.options
        grad_n = grad_n.masked_fill(ignored_n, 0)
        grad_nv = logits_gradient(
            logits_nv, lse_n, index_n, foreign_n, grad_n, vocabulary, smoothing, z
        )
        return grad_nv.to(logits_nv.dtype), None, None, None, None, None


def _twice(ctx: Any, grad_n: Tensor) -> Tensor:
    """Gradient of the logits that can be differentiated, by those of torch's functions."""
    logits_nv, _, index_n, foreign_n, ignored_n = ctx.saved_tensors
    smoothing, z, vocabulary = ctx.options
    with torch.enable_grad():
        terms_tn = position_terms(logits_nv, index_n, foreign_n, smoothing)
        of_all = gather_from(terms_tn.unsqueeze(0), ctx.axis, 0)
        loss_n, _ = _loss_of_all(of_all, vocabulary, smoothing, z)
        loss_n = loss_n.masked_fill(ignored_n, 0)
        found: Tensor = torch.autograd.grad(loss_n, logits_nv, grad_n, create_graph=True)[0]
    return found


vocab_parallel_cross_entropy: Callable[..., Tensor] = _VocabParallelCrossEntropy.apply
"""``(logits_nv, targets_n, axis, ignore_index, smoothing, z) -> loss_n``, of split logits."""


def own_targets(
    targets_n: Tensor, ignored_n: Tensor, size: int, axis: Axis | None
) -> tuple[Tensor, Tensor]:
    """Position of each target in this rank's ``size`` logits, and whether another rank has it."""
    index_n = targets_n if axis is None else targets_n - size * axis.rank
    foreign_n = (index_n < 0) | (index_n >= size) | ignored_n
    return index_n.masked_fill(foreign_n, 0), foreign_n


def position_terms(
    logits_nv: Tensor, index_n: Tensor, foreign_n: Tensor, smoothing: float
) -> Tensor:
    """Numbers ``[2 or 3, n]`` of this rank's logits that the loss needs (see the module)."""
    x_nv = at_least_float32(logits_nv)
    target_n = x_nv.gather(-1, index_n.unsqueeze(-1)).squeeze(-1)
    own = [x_nv.logsumexp(-1), target_n.masked_fill(foreign_n, 0)]
    if smoothing:
        own.append(x_nv.sum(-1))
    return torch.stack(own)


def loss_of_terms(
    terms_tn: Tensor, axis: Axis | None, vocabulary: int, smoothing: float, z: float
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp of every position, from all ranks' `position_terms`."""
    of_all = terms_tn.unsqueeze(0)
    if axis is not None:
        of_all = start_gather(of_all, axis, 0).wait()
    return _loss_of_all(of_all, vocabulary, smoothing, z)


def _loss_of_all(
    of_all: Tensor, vocabulary: int, smoothing: float, z: float
) -> tuple[Tensor, Tensor]:
    """Loss and log-sum-exp from `position_terms` of all ranks, ``[ranks, 2 or 3, n]``."""
    lse_n = of_all[:, 0].logsumexp(0)
    loss_n = lse_n - of_all[:, 1].sum(0)
    if smoothing:
        mean_n = of_all[:, 2].sum(0) / vocabulary
        loss_n = torch.lerp(loss_n, lse_n - mean_n, smoothing)
    if z:
        loss_n = loss_n + z * lse_n.square()
    return loss_n, lse_n


def logits_gradient(
    logits_nv: Tensor,
    lse_n: Tensor,
    index_n: Tensor,
    foreign_n: Tensor,
    grad_n: Tensor,
    vocabulary: int,
    smoothing: float,
    z: float,
) -> Tensor:
    """Gradient ``[n, v]`` of this rank's logits, for a gradient ``grad_n`` of the losses."""
    grad_nv = (at_least_float32(logits_nv) - lse_n.unsqueeze(-1)).exp_()
    if z:
        grad_nv.mul_((1 + 2 * z * lse_n).unsqueeze(-1))
    if smoothing:
        grad_nv.sub_(smoothing / vocabulary)
    grad_nv.mul_(grad_n.unsqueeze(-1))
    at_target_n = (-(1 - smoothing) * grad_n).masked_fill(foreign_n, 0)
    return grad_nv.scatter_add_(-1, index_n.unsqueeze(-1), at_target_n.unsqueeze(-1))


def reduced(loss_n: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Reduce the losses of all positions; those of ignored positions are 0."""
    if reduction == "none":
        return loss_n.view(targets.shape)
    if reduction == "sum":
        return loss_n.sum()
    return loss_n.sum() / (targets != ignore_index).sum()


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in the format of the loss."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def check_targets(targets_n: Tensor, ignored_n: Tensor, vocabulary: int) -> None:
    """Check targets as ``F.cross_entropy`` does, on CPU; a GPU would have to wait for this."""
    if not on_host(targets_n.device):
        return
    outside = ((targets_n < 0) | (targets_n >= vocabulary)) & ~ignored_n
    if bool(outside.any()):
        raise IndexError(f"Target {int(targets_n[outside][0])} is out of bounds for {vocabulary}")
