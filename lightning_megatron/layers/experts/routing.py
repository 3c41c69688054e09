"""Choice of experts: pure functions of the scores.

Scores are made of logits, a bias that counts in the choice alone is added, and each token takes the
``k`` experts that score highest. Everything is the same for the same logits, whatever the layout:

- *Ties* go to the lowest index. A router of zeros, or one that upcycling has made, scores all
  experts alike, and torch's ``topk`` then takes whichever its kernel meets first, which depends on
  the number of experts and on the device.
- *Groups* (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): experts of one node stand together, and a
  token goes to at most ``top_groups`` of them: those whose two highest scores add up to most.
- *Capacity* belongs to a sequence: an expert takes ``ceil(factor k T / E)`` of its ``T`` tokens
  that count (`within_capacity`). GShard (arXiv 2006.16668) fills experts in the order of the
  tokens that a device happens to hold, so its losses depend on the layout.

Legend: t tokens, E experts, k experts of a token, b sequences.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_megatron._torch.devices import on_host
from lightning_megatron.layers.experts.config import RouterConfig

LEAST_SUM = 1e-20
"""Added to the sum of a token's scores, all of which a sigmoid may have rounded to 0."""


class Routes(NamedTuple):
    """Experts of each token, and how much each of them counts."""

    experts_tk: Tensor
    """Indices of the experts, ``[t, k]`` int64, the highest score first. ``num_experts``, one past
    the last, stands for none: the token does not count, or the choice was dropped."""
    weights_tk: Tensor
    """Factors of the experts' outputs, ``[t, k]`` in the format of the scores; 0 for none."""


def scores_of(logits_te: Tensor, config: RouterConfig) -> Tensor:
    """Scores of the experts, ``[t, E]``."""
    return logits_te.softmax(-1) if config.score == "softmax" else logits_te.sigmoid()


@torch.no_grad()
def choose(scores_te: Tensor, bias_e: Tensor | None, config: RouterConfig, top_k: int) -> Tensor:
    """Indices of the experts of each token, ``[t, k]`` int64, the highest score first."""
    by = scores_te if bias_e is None else scores_te + bias_e.to(scores_te.dtype)
    if config.groups > 1:
        grouped = by.view(len(by), config.groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        taken = highest(best, config.top_groups)
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(-1, taken, False)
        lowest = torch.finfo(by.dtype).min
        by = grouped.masked_fill(outside.unsqueeze(-1), lowest).flatten(-2)
    return highest(by, top_k)


def weights_of(scores_te: Tensor, chosen_tk: Tensor, config: RouterConfig) -> Tensor:
    """Factors of the chosen experts' outputs, ``[t, k]``."""
    weights = scores_te.gather(-1, chosen_tk)
    if config.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return weights if config.scale == 1.0 else weights * config.scale


def highest(x_tn: Tensor, k: int) -> Tensor:
    """Indices of the ``k`` highest numbers of each row, highest first, ties to the lowest index.

    No number is ``-inf``.

    On CPU ``topk`` is asked for one more, and rows in which two of these are equal are sorted: 1.09
    times ``topk`` alone (4096 rows of 128), where sorting all takes 3.6 times as long. Elsewhere
    that question would wait for the device; ``k`` maxima, whose index is the first by definition,
    do not.
    """
    if not on_host(x_tn.device):
        return _maxima(x_tn, k)
    values, found = x_tn.topk(min(k + 1, x_tn.shape[-1]), dim=-1)
    tied = (values[:, 1:] == values[:, :-1]).any(-1)
    if tied.any():
        rows = tied.nonzero().squeeze(-1)
        order = x_tn[rows].sort(dim=-1, descending=True, stable=True).indices
        found[rows] = order[:, : found.shape[-1]]
    return found[:, :k]


def _maxima(x_tn: Tensor, k: int) -> Tensor:
    left, found = x_tn.clone(), []
    for _ in range(k):
        found.append(left.argmax(-1, keepdim=True))
        left.scatter_(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


@torch.no_grad()
def within_capacity(
    experts_bsk: Tensor,
    weights_bsk: Tensor,
    capacity_b: Tensor,
    num_experts: int,
    *,
    by_weight: bool,
) -> Tensor:
    """Which choices their experts take, ``[b, s, k]`` booleans.

    Args:
        experts_bsk: choices of the tokens of whole sequences; ``num_experts`` for none.
        weights_bsk: their weights.
        capacity_b: number of tokens of each sequence that each expert takes.
        num_experts: number of experts.
        by_weight: whether an expert takes those of the highest weight, the first of equal ones;
            else the first in the sequence.
    """
    b, s, k = experts_bsk.shape
    per_sequence = num_experts + 1
    first = torch.arange(b, device=experts_bsk.device).view(b, 1, 1) * per_sequence
    bucket = (experts_bsk + first).flatten()
    order = torch.arange(len(bucket), device=bucket.device)
    if by_weight:
        order = weights_bsk.flatten().sort(descending=True, stable=True).indices
    order = order[bucket[order].sort(stable=True).indices]
    sorted_bucket = bucket[order]
    sizes = _occurrences(bucket, b * per_sequence)
    place = torch.arange(len(bucket), device=bucket.device)
    place = place - (sizes.cumsum(0) - sizes)[sorted_bucket]
    taken = torch.empty_like(bucket, dtype=torch.bool)
    taken[order] = place < capacity_b[sorted_bucket // per_sequence]
    return taken.view(b, s, k) & (experts_bsk < num_experts)


def counts_of(experts_tk: Tensor, num_experts: int) -> Tensor:
    """Number of choices of each expert, ``[E]`` int64."""
    return _occurrences(experts_tk.reshape(-1), num_experts + 1)[:num_experts]


def counts_by_sequence(
    experts_tk: Tensor, sequence_t: Tensor, num_sequences: int, num_experts: int
) -> Tensor:
    """Number of choices of each expert by the tokens of each sequence, ``[b, E]`` int64."""
    bucket = experts_tk + sequence_t.unsqueeze(-1) * (num_experts + 1)
    counts = _occurrences(bucket.reshape(-1), num_sequences * (num_experts + 1))
    return counts.view(num_sequences, num_experts + 1)[:, :num_experts]


def _occurrences(x: Tensor, size: int) -> Tensor:
    """Number of times that each number below ``size`` occurs; on GPUs ``bincount`` would wait."""
    return x.new_zeros(size).scatter_add_(0, x, torch.ones_like(x))
