"""Output projection and cross entropy as one layer, which never holds the whole logits.

For ``n`` tokens and a vocabulary of ``v`` the logits, their float32 copy and their gradient are
``n v`` numbers each: at 8192 tokens and 128256 words 10 GB, more than the rest of a small model.
Yet they are needed only between the hidden states ``[n, h]`` and one loss per token. So the layer
takes some tokens at a time (as Liger Kernel, arXiv 2410.10989, and Cut Cross-Entropy, arXiv
2411.09009, do):

    forward    for each chunk: logits = x W^T; keep of them lse, logit[target] (and sum): n numbers
    backward   for each chunk: logits again; d = softmax - target; dx = d W; dW += d^T x

These are four products in place of three, a third more time in the head; live logits fall from
``n v`` to ``chunk v``. The gradients are computed in the backward (as in Cut Cross-Entropy), not
stored in the forward: a pipeline has many microbatches between the two, and each would hold a
gradient of the weight. With several chunks the weight's gradient is added up in float32.

Over tp each rank has a part of the vocabulary. The numbers of all chunks are gathered by one
collective, as small as that of `layers.loss`, whose formulas these are, and ``dx`` is summed once.
A zero-bubble backward computes everything in its input part: the weight part would have to compute
the logits a third time.

In FP8 (`layers.gemm`) each chunk is a product of its own, with scales of its own, which are at
least as fine as those of the whole and the same on all tp ranks (their chunks have the same
tokens).

Legend: n positions, v this rank's part of the vocabulary, h hidden size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.comm.collectives import start_gather, start_sum, start_sum_scatter
from lightning_megatron.errors import raise_if_any
from lightning_megatron.layers.delayed_wgrad import (
    compute_dtype,
    input_gradient,
    output,
    prepare_gradient,
    rows,
)
from lightning_megatron.layers.gemm import GemmBackend
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.linear_functions import SEQUENCE_DIM, regathers
from lightning_megatron.layers.loss import loss_problems
from lightning_megatron.layers.size_checks import vocabulary_problems
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.whole.context_loss import (
    loss_rows,
    own_loss_targets,
    place_in_trunk,
    reduced_over_context,
)
from lightning_megatron.whole.memory import on_memory, saved_tensors
from lightning_megatron.whole.splits import part_of
from lightning_megatron.whole.vocab_loss import (
    check_targets,
    logits_gradient,
    loss_of_terms,
    own_targets,
    position_terms,
    reduced,
)


class LinearCrossEntropy(ColumnParallelLinear):
    """Head that returns the loss, and never holds the logits of more than a few tokens.

    Called with hidden states ``[..., in_features]`` (``[b, s / tp, in_features]`` under sequence
    parallelism) and ``targets`` ``[...]``, it returns the cross entropy; without targets it
    returns the logits, as a column-parallel layer does. As the last item of a `PipelineSequential`
    it gets its targets from the call: ``loss = self.trunk(tokens, targets=labels)``. Parameters
    have the names of a plain head's, and may be tied to an embedding.

    Args:
        in_features: size of the hidden states.
        vocab_size: size of the whole vocabulary.
        bias: whether logits have a learned bias.
        chunk_size: number of tokens whose logits are held at a time.
        num_tokens: size of the vocabulary without padding at its end, which is never predicted.
        ignore_index: target of positions that do not count.
        label_smoothing: probability mass spread over the vocabulary.
        z_loss: weight of the squared log-sum-exp, which keeps logits from drifting.
        reduction: ``mean`` over the positions that count, their ``sum``, or ``none``.
        init_std: standard deviation of a normal initialisation with zero bias; that of
            ``nn.Linear`` when None.

    Raises:
        ConfigError: an option lies outside its range.

    Example:
        >>> head = LinearCrossEntropy(8, 100, chunk_size=4)
        >>> head(torch.zeros(2, 5, 8), torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([])
        >>> head(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 100])
    """

    def __init__(
        self,
        in_features: int,
        vocab_size: int,
        bias: bool = False,
        *,
        chunk_size: int = 1024,
        num_tokens: int | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: Literal["mean", "sum", "none"] = "mean",
        init_std: float | None = None,
    ) -> None:
        super().__init__(in_features, vocab_size, bias, init_std=init_std)
        self.num_tokens = vocab_size if num_tokens is None else num_tokens
        problems = loss_problems(label_smoothing, z_loss, reduction)
        if chunk_size < 1:
            problems.append(
                f"chunk_size={chunk_size}: must be at least 1; nearest valid: chunk_size=1"
            )
        if not 0 < self.num_tokens <= vocab_size:
            problems.append(
                f"num_tokens={num_tokens}, vocab_size={vocab_size}: must lie in [1, vocab_size]; "
                f"nearest valid: num_tokens={min(max(self.num_tokens, 1), vocab_size)}"
            )
        elif self.num_tokens < vocab_size and label_smoothing:
            problems.append(
                f"label_smoothing={label_smoothing}, num_tokens={num_tokens}: smoothing would "
                "predict padding; nearest valid: label_smoothing=0.0"
            )
        raise_if_any(problems)
        self.chunk_size = chunk_size
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.reduction = reduction

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        return vocabulary_problems(self.out_features, degrees)

    @override
    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute the loss, or without targets the logits, of which tp ranks hold parts.

        Raises:
            IndexError: a target lies outside the vocabulary (found on CPU only).
        """
        outside = part_of(x) is not None
        if targets is None and outside:
            return self._of_context(x)
        padding = self._padding_starts()
        if targets is None:
            return super().marked_output(_without_padding(self.own_output(x), padding))
        x, place = loss_rows(x, targets, None) if outside else (x, None)
        topology, x = self.topology, self.entering(x)
        axis = topology.tp if topology is not None and topology.tp.size > 1 else None
        sequence = topology is not None and topology.sequence_parallel and not outside
        sequence, context = sequence and axis is not None, self.context
        if context is not None and not outside:
            local = x.shape[1] * (self.tp_size if sequence else 1)
            place = place_in_trunk(context, local, targets)
        plan = _Plan(
            axis=axis,
            sequence=sequence,
            vocabulary=self.out_features,
            chunk=self.chunk_size,
            padding=padding,
            smoothing=self.label_smoothing,
            z=self.z_loss,
            gemm=self.gemm,
        )
        ignored = targets == self.ignore_index
        check_targets(targets.reshape(-1), ignored.reshape(-1), self.num_tokens)
        if place is None:
            loss_n = self._losses(x, targets, plan)
            return reduced(loss_n, targets, self.ignore_index, self.reduction)
        own = own_loss_targets(targets, place)
        held = x.shape[1] * (self.tp_size if plan.sequence else 1)
        filled = F.pad(own, (0, held - own.shape[1]), value=self.ignore_index)
        loss = self._losses(x, filled, plan).view(filled.shape)[:, : own.shape[1]]
        return reduced_over_context(loss, ignored, place, self.reduction)

    def _losses(self, x: Tensor, targets: Tensor, plan: "_Plan") -> Tensor:
        """Loss of each position; 0 where it is ignored."""
        targets_n = targets.reshape(-1)
        ignored_n = targets_n == self.ignore_index
        loss_n: Tensor = _apply(x, self.weight, self.bias, targets_n, ignored_n, plan)
        return loss_n

    @override
    def marked_output(self, y: Tensor) -> Tensor:
        """Return logits as a `SplitTensor`; a loss is whole."""
        return super().marked_output(y) if y.dim() and self.reduction != "none" else y

    def _padding_starts(self) -> int | None:
        """First of this rank's columns that stands for no token; None if all stand for one."""
        if self.num_tokens == self.out_features:
            return None
        width = self.out_features // self.tp_size
        first = 0 if self.topology is None else width * self.topology.tp.rank
        return max(self.num_tokens - first, 0) if self.num_tokens < first + width else None

    @override
    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, chunk_size={self.chunk_size}"


@dataclass(frozen=True, kw_only=True)
class _Plan:
    axis: Axis | None
    sequence: bool
    vocabulary: int
    chunk: int
    padding: int | None
    smoothing: float
    z: float
    gemm: GemmBackend | None

    def whole(self, x: Tensor) -> Tensor:
        """Gather the hidden states of the whole sequence."""
        if self.axis is None or not self.sequence:
            return x
        return start_gather(x, self.axis, SEQUENCE_DIM).wait()

    def chunks(self, count: int) -> Iterator[slice]:
        """Positions of every chunk."""
        starts = range(0, max(count, 1), self.chunk)  # a cp rank may have no positions
        return (slice(i, min(i + self.chunk, count)) for i in starts)

    def logits(self, x_nh: Tensor, weight_vh: Tensor, bias_v: Tensor | None) -> tuple[Tensor, Any]:
        """Compute the logits of one chunk, and what `prepare_gradient` needs of them."""
        logits, kept = output(x_nh, weight_vh, self.gemm, bias_v)
        return _without_padding(logits, self.padding), kept


def _without_padding(logits: Tensor, padding: int | None) -> Tensor:
    if padding is None:
        return logits
    column = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(column >= padding, torch.finfo(logits.dtype).min)


class _LinearCrossEntropy(Function):
    """``x, weight, bias, targets, ignored -> loss`` of every position (see the module's text)."""

    @staticmethod
    @on_memory
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets_n: Tensor,
        ignored_n: Tensor,
        plan: _Plan,
    ) -> Tensor:
        ctx.plan = plan
        ctx.dtype = compute_dtype(x)
        ctx.regather = plan.sequence and regathers(x)
        whole = plan.whole(x.to(ctx.dtype))
        x_nh, weight_vh = rows(whole), weight.to(ctx.dtype)
        bias_v = None if bias is None else bias.to(ctx.dtype)
        index_n, foreign_n = own_targets(targets_n, ignored_n, weight.shape[0], plan.axis)
        terms = [
            position_terms(
                plan.logits(x_nh[i], weight_vh, bias_v)[0],
                index_n[i],
                foreign_n[i],
                plan.smoothing,
            )
            for i in plan.chunks(len(x_nh))
        ]
        loss_n, lse_n = loss_of_terms(
            torch.cat(terms, 1), plan.axis, plan.vocabulary, plan.smoothing, plan.z
        )
        kept = x if ctx.regather else whole
        ctx.save_for_backward(kept, weight, bias, lse_n, index_n, foreign_n, ignored_n)
        ctx.input_dtype = x.dtype
        return loss_n.masked_fill(ignored_n, 0)

    @staticmethod
    @once_differentiable
    @on_memory
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, lse_n, index_n, foreign_n, ignored_n = saved_tensors(ctx)
        plan, needs = ctx.plan, ctx.needs_input_grad
        whole = plan.whole(x.to(ctx.dtype)) if ctx.regather else x
        x_nh, weight_vh = rows(whole), weight.to(ctx.dtype)
        bias_v = None if bias is None else bias.to(ctx.dtype)
        grad_n = grad_n.masked_fill(ignored_n, 0)
        sums = _Sums(weight, bias, needs[1:3], plan.gemm)
        grad_x = torch.empty_like(x_nh) if needs[0] else None
        for i in plan.chunks(len(x_nh)):
            logits, kept = plan.logits(x_nh[i], weight_vh, bias_v)
            d_nv = logits_gradient(
                logits,
                lse_n[i],
                index_n[i],
                foreign_n[i],
                grad_n[i],
                plan.vocabulary,
                plan.smoothing,
                plan.z,
            )
            d_nv = d_nv.to(ctx.dtype)
            gradient = prepare_gradient(d_nv, kept, plan.gemm)
            if grad_x is not None and plan.gemm is None:
                torch.mm(d_nv, weight_vh, out=grad_x[i])
            elif grad_x is not None:
                grad_x[i] = input_gradient(gradient, weight_vh, ctx.dtype, plan.gemm)
            sums.add(d_nv, x_nh[i], gradient)
        if grad_x is not None:
            grad_x = _summed(grad_x.view(whole.shape), plan).to(ctx.input_dtype)
        return grad_x, *sums.finished(), None, None, None


_apply: Callable[..., Tensor] = _LinearCrossEntropy.apply


def _summed(grad_x: Tensor, plan: _Plan) -> Tensor:
    """Sum ``dx`` over the ranks, each of which has the share of its part of the vocabulary."""
    if plan.axis is None:
        return grad_x
    if plan.sequence:
        return start_sum_scatter(grad_x, plan.axis, SEQUENCE_DIM).wait()
    return start_sum(grad_x, plan.axis).wait()


class _Sums:
    """Gradients of weight and bias, added up over the chunks, in at least float32."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool],
        gemm: GemmBackend | None,
    ) -> None:
        self._like = (weight, bias)
        self._needs = needs
        self._gemm = gemm
        self._found: list[Tensor | None] = [None, None]

    def add(self, d_nv: Tensor, x_nh: Tensor, gradient: Any) -> None:
        """Add a chunk; ``gradient`` is the result of ``prepare_gradient(d_nv)``."""
        if self._needs[0]:
            total = self._found[0]
            if self._gemm is not None:
                self._take(0, self._gemm.weight_gradient(gradient, x_nh))
            elif total is not None and total.dtype == d_nv.dtype:
                total.addmm_(d_nv.t(), x_nh)
            else:
                self._take(0, d_nv.t().mm(x_nh))
        if self._needs[1]:
            self._take(1, d_nv.sum(0, dtype=_sum_dtype(d_nv)))

    def _take(self, which: int, part: Tensor) -> None:
        total = self._found[which]
        if total is None:
            self._found[which] = part.to(_sum_dtype(part))
        else:
            total.add_(part)

    def finished(self) -> tuple[Tensor | None, ...]:
        """Return the sums in the formats of the parameters."""
        return tuple(
            None if total is None or like is None else total.to(like.dtype)
            for total, like in zip(self._found, self._like, strict=True)
        )


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
