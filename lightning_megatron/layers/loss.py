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
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.comm.collectives import start_gather
from lightning_megatron.errors import raise_if_any
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.context_loss import (
    loss_rows,
    own_loss_targets,
    reduced_over_context,
)
from lightning_megatron.layers.splits import Split, own_part, split_of, whole
from lightning_megatron.topology.axis import Axis


class VocabParallelCrossEntropy(ParallelLayer):
    """Cross entropy of logits that are split over tp, or whole.

    Called with ``logits`` ``[..., vocabulary]`` and integer ``targets`` ``[...]``, it returns what
    ``F.cross_entropy`` returns (positions may have any number of dims). Logits may be the output of
    a column-parallel head, or plain tensors ``[..., vocabulary / tp]`` with each rank's part. When
    the logits are whole on every rank (not distributed, tp of 1, a plain ``nn.Linear`` as head) it
    calls ``F.cross_entropy`` itself.

    Args:
        ignore_index: target of positions that do not count.
        label_smoothing: probability mass spread over the vocabulary.
        z_loss: weight of the squared log-sum-exp, which keeps logits from drifting.
        reduction: ``mean`` over the positions that count, their ``sum``, or ``none``.
        vocab_size: size of the whole vocabulary, to tell plain tensors that are whole from parts.
            When None, they count as parts under tp unless the first call finds them equal on all
            ranks.

    Raises:
        ConfigError: an option lies outside its range.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        raise_if_any(loss_problems(label_smoothing, z_loss, reduction))
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.reduction = reduction
        self.vocab_size = vocab_size
        self._whole: bool | None = None

    @override
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss: a scalar, or with ``reduction="none"`` one value per position.

        Raises:
            IndexError: a target lies outside the vocabulary (found on CPU only).
        """
        logits, place = loss_rows(logits, targets, self.context)
        split = split_of(logits)
        if split is not None and split.dim != logits.dim() - 1:
            logits, split = whole(logits), None
        logits = own_part(logits)
        if place is None:
            return self._reduced(logits, targets, split)
        own, ignored = own_loss_targets(targets, place), targets == self.ignore_index
        check_targets(targets.reshape(-1), ignored.reshape(-1), self._vocabulary(logits, split))
        loss_n = self._position_losses(logits.flatten(0, 1), own.reshape(-1), split)
        return reduced_over_context(loss_n.view(own.shape), ignored, place, self.reduction)

    def _reduced(self, logits: Tensor, targets: Tensor, split: Split | None) -> Tensor:
        """Loss of logits whose sequences this rank has whole."""
        logits_nv, targets_n = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        if self.z_loss == 0.0 and split is None and self._split_axis(logits_nv) is None:
            loss = self._cross_entropy(logits_nv, targets_n, self.reduction)
            return loss.view(targets.shape) if self.reduction == "none" else loss
        loss_n = self._position_losses(logits_nv, targets_n, split)
        return reduced(loss_n, targets, self.ignore_index, self.reduction)

    def _position_losses(self, logits_nv: Tensor, targets_n: Tensor, split: Split | None) -> Tensor:
        """Loss of each position; 0 where it is ignored."""
        axis = self._split_axis(logits_nv) if split is None else split.axis
        if axis is not None:
            return vocab_parallel_cross_entropy(
                logits_nv, targets_n, axis, self.ignore_index, self.label_smoothing, self.z_loss
            )
        if self.z_loss == 0.0:
            return self._cross_entropy(logits_nv, targets_n, "none")
        return self._whole_loss(logits_nv, targets_n)

    def _vocabulary(self, logits: Tensor, split: Split | None) -> int:
        """Size of the whole vocabulary."""
        axis = self._split_axis(logits.flatten(0, 1)) if split is None else split.axis
        return int(logits.shape[-1]) * (1 if axis is None else axis.size)

    def _cross_entropy(self, logits_nv: Tensor, targets_n: Tensor, reduction: str) -> Tensor:
        return F.cross_entropy(
            at_least_float32(logits_nv),
            targets_n,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=reduction,
        )

    def _whole_loss(self, logits_nv: Tensor, targets_n: Tensor) -> Tensor:
        loss_n = self._cross_entropy(logits_nv, targets_n, "none")
        penalty_n = self.z_loss * at_least_float32(logits_nv).logsumexp(-1).square()
        return loss_n + penalty_n.masked_fill(targets_n == self.ignore_index, 0)

    def _split_axis(self, logits_nv: Tensor) -> Axis | None:
        """Axis over which the logits are split; None when they are whole."""
        if self.topology is None or self.topology.tp.size == 1:
            return None
        axis = self.topology.tp
        if self.vocab_size is not None:
            whole = logits_nv.shape[-1] == self.vocab_size
        else:
            whole = self._found_whole(logits_nv, axis)
        return None if whole else axis

    def _found_whole(self, logits_nv: Tensor, axis: Axis) -> bool:
        """Whether logits are equal on all ranks: only whole ones are (see ``vocab_size``).

        Decided once, on the first logits that are not all equal (as those of a zeroed head are).
        """
        if self._whole is None and not logits_nv.numel():
            return False  # a rank without positions, as all of its tp peers are
        if self._whole is None:
            x = logits_nv.detach().to(torch.float64)
            fingerprint = torch.stack((x.sum(), x.square().sum(), x.amin(), x.amax())).unsqueeze(0)
            of_all = start_gather(fingerprint, axis, 0).wait()
            if bool((of_all[:, 2] == of_all[:, 3]).all()):
                return False
            self._whole = bool((of_all == of_all[0]).all())
        return self._whole


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
        ctx.options = (smoothing, z, size * axis.size)
        ctx.save_for_backward(logits_nv, lse_n, index_n, foreign_n, ignored_n)
        return loss_n.masked_fill(ignored_n, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor | None, ...]:
        logits_nv, lse_n, index_n, foreign_n, ignored_n = ctx.saved_tensors
        smoothing, z, vocabulary = ctx.options
        grad_n = grad_n.masked_fill(ignored_n, 0)
        grad_nv = logits_gradient(
            logits_nv, lse_n, index_n, foreign_n, grad_n, vocabulary, smoothing, z
        )
        return grad_nv.to(logits_nv.dtype), None, None, None, None, None


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
    if targets_n.device.type != "cpu":
        return
    outside = ((targets_n < 0) | (targets_n >= vocabulary)) & ~ignored_n
    if bool(outside.any()):
        raise IndexError(f"Target {int(targets_n[outside][0])} is out of bounds for {vocabulary}")


def loss_problems(label_smoothing: float, z_loss: float, reduction: str) -> list[str]:
    """Problems of the options of a loss."""
    problems = []
    if not 0.0 <= label_smoothing <= 1.0:
        problems.append(
            f"label_smoothing={label_smoothing}: must lie in [0, 1]; "
            f"nearest valid: label_smoothing={float(label_smoothing > 1)}"
        )
    if z_loss < 0.0:
        problems.append(f"z_loss={z_loss}: must not be negative; nearest valid: z_loss=0.0")
    if reduction not in ("mean", "sum", "none"):
        problems.append(
            f"reduction={reduction}: must be mean, sum or none; nearest valid: reduction=mean"
        )
    return problems
