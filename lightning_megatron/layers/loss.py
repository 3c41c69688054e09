"""Cross entropy of logits that are whole, or split over the vocabulary, or over the sequence.

`whole.vocab_loss` has the arithmetic of split logits. Under context parallelism each cp rank has
the logits of its part of the sequences, and the whole targets. It takes its own targets, and the
loss is that of whole sequences on every rank: one sum over cp of one number.

Legend: n positions, v this rank's part of the vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.comm.collectives import start_gather
from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.axis import Axis
from lightning_megatron.whole.context_loss import (
    loss_rows,
    own_loss_targets,
    reduced_over_context,
)
from lightning_megatron.whole.splits import Split, own_part, split_of, whole
from lightning_megatron.whole.vocab_loss import (
    at_least_float32,
    check_targets,
    reduced,
    vocab_parallel_cross_entropy,
)

_SAMPLE, _FEWEST = 256, 16
"""Logits that ranks compare one by one, and how few say nothing."""
_ROUNDING = 0.02
"""Largest difference that is taken for rounding, as a share of an ordinary logit: some steps of
bfloat16."""


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
            ranks. Nearly equal ones are refused.

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
            sample = x.new_zeros(_SAMPLE)
            sample[: x.numel()] = x.flatten()[:_SAMPLE]
            sums = torch.stack((x.sum(), x.square().sum(), x.amin(), x.amax()))
            of_all = start_gather(torch.cat((sums, sample)).unsqueeze(0), axis, 0).wait()
            if bool((of_all[:, 2] == of_all[:, 3]).all()):
                return False
            self._whole = bool((of_all == of_all[0]).all())
            if not self._whole and _differ_by_rounding(of_all[:, 4:][:, : x.numel()]):
                size = logits_nv.shape[-1]
                raise ConfigError(
                    "VocabParallelCrossEntropy: the logits of tp ranks are nearly the same, as "
                    "whole ones from a kernel that is not deterministic, and without vocab_size "
                    "only equal ones count as whole; nearest valid: "
                    f"vocab_size={size} if they are whole, vocab_size={size * axis.size} if not"
                )
        return self._whole


def _differ_by_rounding(samples: Tensor) -> bool:
    """Whether the same logits of all ranks ``[ranks, logits]`` are nearly equal."""
    if samples.shape[1] < _FEWEST:
        return False
    apart = (samples - samples[0]).abs().nan_to_num(nan=0.0)  # of -inf on all ranks
    ordinary = samples[0].abs().median()
    return bool((ordinary > 0) & (apart.max() <= _ROUNDING * ordinary))


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
