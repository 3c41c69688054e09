"""A mixture of experts as its definition reads: one token, one expert at a time."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def dense(moe, x_bsh, mask_bs=None, *, training=True):
    """Output ``[b, s, h]`` and the auxiliary loss, a mean over sequences."""
    config, b = moe.router.config, x_bsh.shape[0]
    logits = x_bsh.flatten(0, -2) @ moe.router.weight.T
    logits = logits.view(*x_bsh.shape[:-1], -1)
    counted = torch.ones(x_bsh.shape[:2], dtype=torch.bool) if mask_bs is None else mask_bs
    chosen = [[_chosen(moe.router, logits[i, t]) for t in range(x_bsh.shape[1])] for i in range(b)]
    rows, losses = [], []
    for i in range(b):
        real = [t for t in range(x_bsh.shape[1]) if counted[i, t]]
        weights = {(t, e): w for t in real for e, w in chosen[i][t].items()}
        kept = _kept(moe.router, weights, len(real)) if training else set(weights)
        for t in range(x_bsh.shape[1]):
            row = torch.zeros_like(x_bsh[i, t])
            for e, weight in chosen[i][t].items():
                if (t, e) in kept:
                    row = row + weight * _expert(moe.experts, e, x_bsh[i, t])
            if moe.shared is not None:
                row = row + _shared(moe, x_bsh[i, t])
            rows.append(row)
        losses.append(_loss(moe.router, [logits[i, t] for t in real], [chosen[i][t] for t in real]))
    if config.balance == "batch":
        real = [(i, t) for i in range(b) for t in range(x_bsh.shape[1]) if counted[i, t]]
        losses = [_loss(moe.router, [logits[p] for p in real], [chosen[i][t] for i, t in real])]
    return torch.stack(rows).view(x_bsh.shape), torch.stack(losses).mean()


def _scores(router, logits: Tensor) -> Tensor:
    return logits.softmax(0) if router.config.score == "softmax" else logits.sigmoid()


def _chosen(router, logits: Tensor) -> dict[int, Tensor]:
    """Weights of a token's experts."""
    config, scores = router.config, _scores(router, logits)
    by = [float(s) for s in scores.detach()]
    if router.bias is not None:
        by = [s + float(c) for s, c in zip(by, router.bias, strict=True)]
    size = len(by) // config.groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.groups)]
    groups.sort(key=lambda g: -sum(sorted((by[e] for e in g), reverse=True)[:2]))
    able = sorted(e for g in groups[: config.top_groups] for e in g)
    found = sorted(able, key=lambda e: -by[e])[: router.top_k]  # stable: ties to the lowest
    total = sum(scores[e] for e in found) if config.normalize else 1.0
    return {e: config.scale * scores[e] / total for e in found}


def _kept(router, weights, length):
    config = router.config
    if config.capacity_factor is None:
        return set(weights)
    capacity = math.ceil(
        round(config.capacity_factor * router.top_k * length, 9) / router.num_experts
    )
    kept = set()
    for e in range(router.num_experts):
        mine = sorted(t for t, expert in weights if expert == e)
        if config.drop == "probability":
            mine.sort(key=lambda t: -weights[t, e].item())
        kept |= {(t, e) for t in mine[:capacity]}
    return kept


def _loss(router, logits, chosen):
    config, total = router.config, router.weight.new_zeros(())
    n, experts = len(logits), router.num_experts
    if not n:
        return total
    if config.balance != "none":
        for e in range(experts):
            count = sum(e in found for found in chosen)
            mean = sum(_scores(router, z)[e] / _scores(router, z).sum() for z in logits) / n
            total = total + config.balance_weight * experts / router.top_k * count / n * mean
    return total + config.z_loss * sum(z.logsumexp(0) ** 2 for z in logits) / n


def _expert(experts, e: int, x_h: Tensor) -> Tensor:
    y = F.silu(experts.gate[e] @ x_h) * (experts.up[e] @ x_h)
    return experts.down[e] @ y


def _shared(moe, x_h: Tensor) -> Tensor:
    y = moe.shared(x_h.view(1, 1, -1)).view(-1)
    if moe.shared_gate is not None:
        y = y * (moe.shared_gate.weight @ x_h).sigmoid()
    return y
