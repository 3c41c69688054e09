"""Router: which experts each token goes to, and how experts are kept in balance.

Logits, scores and losses are computed in float32 (float64 where the input is), also under autocast:
in bfloat16 half of all tokens with 64 experts have two that score alike.

Auxiliary losses are one number a sequence. With ``T`` tokens of a sequence that count, ``c_e`` of
their choices for expert ``e`` and ``s_te`` the scores of a token, divided by their sum:

    balance = E / (k T^2)  sum_e c_e sum_t s_te          z = 1 / T  sum_t logsumexp(logits_t)^2

``c`` has no gradient. It is summed over the ranks that hold other tokens of the sequence (cp, tp),
one message of ``b E`` numbers; then each rank's part of the sum over ``t`` needs its own tokens
only, and so does its gradient. ``balance="batch"`` takes ``c`` and ``T`` of the whole microbatch,
that of all ranks.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_megatron.comm.collectives import start_sum
from lightning_megatron.errors import raise_if_any
from lightning_megatron.layers.base import ParallelLayer, has_hooks_of_user
from lightning_megatron.layers.dropout import random_stream
from lightning_megatron.layers.experts.auxiliary import inject, keep
from lightning_megatron.layers.experts.bias import follow_steps
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.decisions import Count, counts_now, keeps_company, kept
from lightning_megatron.layers.experts.routing import (
    LEAST_SUM,
    Routes,
    choose,
    counts_by_sequence,
    counts_of,
    scores_of,
    weights_of,
    within_capacity,
)
from lightning_megatron.layers.experts.tokens import Tokens
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.memory import on_memory, saved_tensors


@dataclass
class RouterStatistics:
    """Sums over the tokens that this rank has routed in training.

    Each holds a float64 tensor on the device of the router; None before the first token. Sums over
    the ranks of ``loss`` and of tp are those of all tokens.
    """

    counts_e: Tensor | None = field(default=None, repr=False)
    """Choices of each expert that were not dropped, ``[E]``."""
    totals: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """Scalars: ``tokens``, ``dropped`` (choices), ``entropy`` (of the scores, summed over tokens,
    in nats), ``balance_loss`` and ``z_loss`` (this rank's parts, summed over sequences, without
    their factors), ``sequences`` (this rank's shares of them)."""

    def now(self) -> "RouterStatistics":
        """Return the sums so far; they grow until the end, so that several may read them."""
        return RouterStatistics(self.counts_e, dict(self.totals))

    def since(self, earlier: "RouterStatistics") -> "RouterStatistics":
        """Return what was added after `now` had returned ``earlier``."""
        counts = self.counts_e
        if counts is not None and earlier.counts_e is not None:
            counts = counts - earlier.counts_e.to(counts.device)
        totals = {
            name: value - earlier.totals[name].to(value.device) if name in earlier.totals else value
            for name, value in self.totals.items()
        }
        return RouterStatistics(counts, totals)

    def add(self, counts_e: Tensor, totals: Mapping[str, Tensor]) -> None:
        """Add what a forward has counted."""
        self.counts_e = counts_e if self.counts_e is None else self.counts_e + counts_e
        for name, value in totals.items():
            before = self.totals.get(name)
            self.totals[name] = value if before is None else before + value


class _Decision(NamedTuple):
    """Decision of a forward, which its recomputation takes over."""

    chosen_tk: Tensor
    """Experts of each token, ``[t, k]`` int32."""
    taken_tk: Tensor | None
    """Which of them count, ``[t, k]`` booleans; all if None."""
    counts_be: Tensor | None
    """Choices of the experts by the tokens of whole sequences, or in each row of the microbatch,
    ``[b, E]`` float64; None if nobody asks."""
    tokens_b: Tensor
    """Number of tokens that these choices are of, ``[b]`` float64."""


class _Losses(NamedTuple):
    """Auxiliary losses of each sequence, without their factors, as this rank's parts of sums."""

    balance_b: Tensor | None
    z_b: Tensor | None


class Router(ParallelLayer):
    """Scores experts for each token and chooses ``top_k`` of them.

    Args:
        hidden_size: size of the residual stream.
        num_experts: experts to choose from.
        top_k: experts of a token.
        config: how they are chosen and kept in balance.
        init_std: standard deviation of the initial weights.

    Attributes:
        bias: bias of the choice, ``[E]`` float32, where ``config.bias_update`` is not 0.
        statistics: sums for monitors.
        step_counts_e: choices of each expert by this rank's tokens since the last optimizer step,
            dropped ones included, ``[E]`` float64, where there is a bias to update; None before the
            first.
        kept_losses: means over sequences that `auxiliary_loss` has not taken, where
            ``config.inject`` is False.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        config: RouterConfig,
        *,
        init_std: float | None = None,
    ) -> None:
        super().__init__()
        raise_if_any(config.problems(num_experts, top_k))
        self.num_experts = num_experts
        self.top_k = top_k
        self.config = config
        self.init_std = 0.02 if init_std is None else init_std
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        bias = torch.zeros(num_experts, dtype=torch.float32) if config.bias_update else None
        self.register_buffer("bias", bias)
        self.statistics = RouterStatistics()
        self._count_of_forwards = Count()
        self.step_counts_e: Tensor | None = None
        self.kept_losses: list[Tensor] = []
        self._has_told = False
        self.reset_parameters()

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        if name == "bias":
            nn.init.zeros_(full)
        else:
            nn.init.normal_(full, std=self.init_std, generator=generator)

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        # Each tp rank routes a part of the tokens.
        return frozenset({"weight"}) if topology.tp.size > 1 else frozenset()

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """Apply a change of format or device; the bias, of small steps, stays float32 or wider."""
        before = self.bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.bias is not None and self.bias.dtype.itemsize < 4:
            self.bias = before.to(device=self.bias.device, dtype=torch.float32)
        return self

    @property
    def needs_sequences(self) -> bool:
        """Whether something here is defined by the tokens of a sequence."""
        balances = self._balances and self.config.balance == "sequence"
        return self.training and (balances or self.config.capacity_factor is not None)

    @property
    def gives_losses(self) -> bool:
        """Whether a forward has auxiliary losses now."""
        return self._learns and (self._balances or self.config.z_loss > 0)

    @property
    def _learns(self) -> bool:
        """Whether this is training that changes the router."""
        return self.training and self.weight.requires_grad

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        if self.config.inject or degrees.pp == 1 or not (self._balances or self.config.z_loss):
            return []
        return [
            f"router.inject=False, pp={degrees.pp}: training_step has the auxiliary losses of the "
            "last stage's layers only; nearest valid: inject=True, or pp=1"
        ]

    @override
    def forward(self, x_th: Tensor, tokens: Tokens) -> tuple[Routes, Tensor, Tensor]:
        """Route tokens.

        Args:
            x_th: ``[t, h]``.
            tokens: which they are.

        Returns:
            Experts of each token; auxiliary loss of each sequence, ``[b]``: its gradient is that of
            this rank's tokens; number of tokens of each sequence that count, ``[b]``.
        """
        if tokens.axes and not self._has_told:
            self._tell_of_hooks(tokens)
        with _without_autocast(x_th):
            logits = self._logits(x_th)
            scores = scores_of(logits, self.config)
            decision = kept(lambda: self._decide(scores, tokens))
            routes = self._routes(scores, decision)
            losses = self._losses(logits, scores, decision, tokens)
            if self._learns and not logits.is_meta and self._count_of_forwards.is_due():
                self._count(logits, scores, routes, decision, losses, tokens)
            return routes, self._loss(losses, decision, tokens), self._loss_tokens(decision, tokens)

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the losses that `auxiliary_loss` has not taken: they are of this one."""
        return {**self.__dict__, "kept_losses": []}

    def _tell_of_hooks(self, tokens: Tokens) -> None:
        """Warn, once, of hooks of the user's that see a part of the tokens."""
        self._has_told = True
        if not has_hooks_of_user(self):
            return
        ranks = " ".join(f"{axis.name}={axis.size}" for axis in tokens.axes)
        warnings.warn(
            f"a forward hook of a router gets the tokens of this rank, a part of those of {ranks}: "
            "what it counts is not what one process would count. ExpertMonitor counts the tokens "
            "of all ranks",
            stacklevel=2,
        )

    def attach_losses(self, y: Tensor, loss_b: Tensor, tokens_b: Tensor, parts: int) -> Tensor:
        """Let auxiliary losses reach the gradient behind ``y``, in training."""
        if not (self.training and loss_b.requires_grad):
            return y
        if not self.config.inject:
            return keep(y, loss_b, parts, self.kept_losses) if counts_now() else y
        seeds = None if self.topology is None else self.topology.auxiliary_seeds
        return inject(y, loss_b, tokens_b, parts, seeds)

    def counts(self, routes: Routes) -> Tensor:
        """Number of choices of each expert, ``[E]``."""
        return counts_of(routes.experts_tk, self.num_experts)

    @override
    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}"

    def _logits(self, x_th: Tensor) -> Tensor:
        wide = torch.promote_types(x_th.dtype, torch.float32)
        if x_th.dtype == wide:
            logits = x_th @ self.weight.to(wide).T
        else:
            logits = _WideLogits.apply(x_th, self.weight, wide)  # type: ignore[no-untyped-call]
        if not (self.training and self.config.noise):
            return logits
        # Each tp rank has other tokens.
        with random_stream(self.topology, sharded=True):
            return logits + self.config.noise * torch.randn_like(logits)

    @torch.no_grad()
    def _decide(self, scores_te: Tensor, tokens: Tokens) -> _Decision:
        experts, config = self.num_experts, self.config
        chosen = choose(scores_te, self.bias, config, self.top_k)
        wanted = self._wanted(chosen, tokens)
        taken = None if wanted is chosen else wanted < experts
        if self.training and config.capacity_factor is not None:
            taken = self._taken(wanted, weights_of(scores_te, chosen, config), tokens)
        counts, tokens_b = None, tokens.tokens_b
        if self._learns and self._balances:
            counts, tokens_b = self._shared_counts(wanted, tokens)
        return _Decision(chosen.to(torch.int32), taken, counts, tokens_b)

    @property
    def _balances(self) -> bool:
        return self.config.balance != "none" and self.config.balance_weight > 0

    def _taken(self, wanted_tk: Tensor, weights_tk: Tensor, tokens: Tokens) -> Tensor:
        """Which choices their experts take; every rank of a sequence decides for all of it."""
        b, k, experts = tokens.num_sequences, self.top_k, self.num_experts
        size = b * tokens.length
        rows = tokens.sequence_t * tokens.length + tokens.position_t
        if tokens.counted_t is not None:
            rows = rows.clamp(max=max(size - 1, 0))  # of padding, which adds zeros
        # An expert counts from the end, so that 0 is none and ranks without a token add nothing.
        own = torch.cat([(experts - wanted_tk).to(weights_tk.dtype), weights_tk], -1)
        own.masked_fill_((wanted_tk == experts).repeat(1, 2), 0)
        whole = _sum(own.new_zeros(size, 2 * k).index_add_(0, rows, own), tokens.axes)
        taken = within_capacity(
            (experts - whole[:, :k].long()).view(b, -1, k),
            whole[:, k:].reshape(b, -1, k),
            self._capacity(tokens),
            experts,
            by_weight=self.config.drop == "probability",
        )
        return taken.view(-1, k)[rows] & (wanted_tk < experts)

    def _capacity(self, tokens: Tokens) -> Tensor:
        """Number of tokens of each sequence that an expert takes, ``[b]``."""
        assert self.config.capacity_factor is not None
        factor = self.config.capacity_factor * self.top_k / self.num_experts
        # 1.1 * 2 / 8 * 40 is 11 and a rounding.
        return (tokens.tokens_b * factor * (1 - 1e-12)).ceil()

    def _shared_counts(self, wanted_tk: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Choices and tokens of what is balanced, over all ranks that hold some of it."""
        own = counts_by_sequence(
            wanted_tk, tokens.sequence_t, tokens.num_sequences, self.num_experts
        ).double()
        if self.config.balance == "sequence":
            return _sum(own, tokens.axes), tokens.tokens_b
        counted = (wanted_tk[:, :1] < self.num_experts).sum().double().view(1)
        mine = torch.cat([own.sum(0), counted])
        # A rank without a batch runs a microbatch again, to take part.
        whole = _sum(mine * (not keeps_company()), tokens.everyone)
        b = tokens.num_sequences
        return whole[:-1].expand(b, -1), whole[-1:].expand(b)

    def _routes(self, scores_te: Tensor, decision: _Decision) -> Routes:
        experts = decision.chosen_tk.long()
        weights = weights_of(scores_te, experts, self.config)
        if decision.taken_tk is not None:
            experts = experts.masked_fill(~decision.taken_tk, self.num_experts)
            weights = weights.masked_fill(~decision.taken_tk, 0)
        return Routes(experts, weights)

    def _losses(
        self, logits_te: Tensor, scores_te: Tensor, decision: _Decision, tokens: Tokens
    ) -> _Losses:
        if not self._learns:
            return _Losses(None, None)
        counts, total = decision.counts_be, decision.tokens_b.clamp(min=1)
        by_batch = self.config.balance == "batch" and counts is not None
        balance = z = None
        if counts is not None:
            shares = scores_te
            if self.config.score == "sigmoid":
                shares = scores_te / (scores_te.sum(-1, keepdim=True) + LEAST_SUM)
            summed = _by_sequence(shares, tokens)
            factor = counts * (self.num_experts / self.top_k / total.square()).unsqueeze(-1)
            balance = (factor.to(summed.dtype) * summed).sum(-1)
        if self.config.z_loss:
            squares = logits_te.logsumexp(-1, keepdim=True).square()
            z = _by_sequence(squares, tokens).squeeze(-1) / total.to(squares.dtype)
        # The gradient is a mean over sequences, and over the ranks that read them.
        factor_b = tokens.readers * tokens.num_sequences if by_batch else 1
        found = (None if loss is None else loss * factor_b for loss in (balance, z))
        return _Losses(*found)

    def _loss(self, losses: _Losses, decision: _Decision, tokens: Tokens) -> Tensor:
        """Auxiliary loss of each sequence."""
        weights = (self.config.balance_weight, self.config.z_loss)
        pairs = zip(weights, losses, strict=True)
        weighted = [weight * loss for weight, loss in pairs if loss is not None]
        if not weighted:
            return decision.tokens_b.new_zeros(tokens.num_sequences)
        loss: Tensor = sum(weighted[1:], weighted[0])
        if self.config.inject:
            return loss
        # Who adds the loss by himself is to see that of whole sequences.
        own = loss.detach()
        return loss + (kept(lambda: self._whole(own, tokens)) - own)

    def _whole(self, loss_b: Tensor, tokens: Tokens) -> Tensor:
        if self.config.balance == "batch" and self._balances:
            return _sum(loss_b.mean(0, keepdim=True) / tokens.readers, tokens.everyone)
        return _sum(loss_b.clone(), tokens.axes)

    def _loss_tokens(self, decision: _Decision, tokens: Tokens) -> Tensor:
        """Number of tokens that each sequence's loss stands for.

        Those of a batch are shared alike, so that the sequences of all ranks weigh it as one.
        """
        if self.config.balance == "batch" and decision.counts_be is not None:
            return decision.tokens_b / (tokens.readers * max(tokens.num_sequences, 1))
        return tokens.tokens_b

    @torch.no_grad()
    def _count(
        self,
        logits_te: Tensor,
        scores_te: Tensor,
        routes: Routes,
        decision: _Decision,
        losses: _Losses,
        tokens: Tokens,
    ) -> None:
        """Add to the statistics, once for each token; zeros where another rank counts it."""
        counts = wanted = self.counts(routes).double()
        if decision.taken_tk is not None:
            wanted = counts_of(self._wanted(decision.chosen_tk, tokens), self.num_experts).double()
        if self.bias is not None:
            if self.topology is None:
                follow_steps(self)
            before, more = self.step_counts_e, wanted * (not tokens.repeats)
            self.step_counts_e = more if before is None else before + more
        entropy = _entropy(logits_te, scores_te, self.config)
        if tokens.counted_t is not None:
            entropy = entropy.masked_fill(~tokens.counted_t, 0)
        totals = {
            "tokens": wanted.sum() / self.top_k,
            "dropped": wanted.sum() - counts.sum(),
            "entropy": entropy.sum(dtype=torch.float64),
            "sequences": _shares(tokens),
        }
        for name, loss in (("balance_loss", losses.balance_b), ("z_loss", losses.z_b)):
            if loss is not None:
                totals[name] = loss.sum(dtype=torch.float64)
        if tokens.repeats:
            counts, totals = counts * 0, {name: value * 0 for name, value in totals.items()}
        self.statistics.add(counts, totals)

    def _wanted(self, chosen_tk: Tensor, tokens: Tokens) -> Tensor:
        """The choices, ``[t, k]`` int64; none of tokens that do not count."""
        chosen_tk = chosen_tk.long()
        if tokens.counted_t is None:
            return chosen_tk
        return chosen_tk.masked_fill(~tokens.counted_t.unsqueeze(-1), self.num_experts)


def _without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):  # autocast has not heard of meta
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def _sum(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    """Sum a contiguous tensor in place over axes."""
    for axis in axes:
        if axis.size > 1:
            x = start_sum(x, axis).wait()
    return x


def _by_sequence(x_tn: Tensor, tokens: Tokens) -> Tensor:
    """Sum rows that count over the tokens of each sequence, ``[b, n]``."""
    if tokens.counted_t is not None:
        x_tn = x_tn.masked_fill(~tokens.counted_t.unsqueeze(-1), 0)
    total = x_tn.new_zeros(tokens.num_sequences, x_tn.shape[-1])
    return total.index_add(0, tokens.sequence_t, x_tn)


def _shares(tokens: Tokens) -> Tensor:
    """Number of sequences that the rows are, a part of one as such; of what counts in them."""
    share_b = 1 / tokens.tokens_b.clamp(min=1)
    if tokens.counted_t is None:
        return share_b[:1].sum() * len(tokens.sequence_t)
    return share_b[tokens.sequence_t].masked_fill(~tokens.counted_t, 0).sum()


def _entropy(logits_te: Tensor, scores_te: Tensor, config: RouterConfig) -> Tensor:
    """Entropy of each token's scores, divided by their sum, in nats, ``[t]``."""
    if config.score == "softmax":
        return logits_te.logsumexp(-1) - (scores_te * logits_te).sum(-1)
    total = scores_te.sum(-1) + LEAST_SUM
    logs = torch.nn.functional.logsigmoid(logits_te)
    return total.log() - (scores_te * logs).sum(-1) / total


class _WideLogits(Function):
    """``x @ w.T`` in a wider format; of ``x`` the narrow one is saved."""

    @staticmethod
    @on_memory
    def forward(ctx: Any, x_th: Tensor, weight_eh: Tensor, wide: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_th, weight_eh)
        ctx.wide = wide
        return x_th.to(wide) @ weight_eh.to(wide).T

    @staticmethod
    @once_differentiable
    @on_memory
    def backward(ctx: Any, grad_te: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = saved_tensors(ctx)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        grad_x = (grad_te @ weight.to(ctx.wide)).to(x.dtype) if needs_x else None
        grad_weight = (grad_te.T @ x.to(ctx.wide)).to(weight.dtype) if needs_weight else None
        return grad_x, grad_weight, None
