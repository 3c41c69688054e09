"""Attention by torch's ``flex_attention``: rules are functions of positions.

``mask_mod`` tells whether a query sees a key, ``score_mod`` what is added to the score. Blocks of
scores that nobody sees are not computed: those above the diagonal, outside of a window, between
documents. On a GPU the kernel is made from these functions by the compiler. Not compiled, as on
CPUs, all scores are held.

Legend: b batch, s query positions, t key positions, n heads, d head dim.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lightning_megatron.layers.attention_call import AttentionCall
from lightning_megatron.layers.packed_documents import numbered, remembered

Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of batch, head, query and key: whether the query sees the key."""


def flex(call: AttentionCall) -> Tensor:
    """Attention by ``flex_attention``."""
    q, k, v = (x.transpose(1, 2) for x in (call.q_bsnd, call.k_btnd, call.v_btnd))
    run: Any = flex_attention
    if q.is_cuda:
        run = _compiled()
    y_bnsd: Tensor = run(
        q,
        k,
        v,
        score_mod=_score(call),
        block_mask=_blocks(call),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y_bnsd.transpose(1, 2)


@lru_cache
def _compiled() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


def _blocks(call: AttentionCall) -> BlockMask | None:
    """Blocks of scores that are computed; None: all."""
    s, t, device = call.q_bsnd.shape[1], call.k_btnd.shape[1], call.q_bsnd.device
    if call.mask is None and call.documents is None and call.key_lengths is None:
        if not call.causal and call.narrow is None:
            return None
        return _blocks_by_rule(s, t, call.causal, call.narrow, device)
    masked = call.mask is not None and call.mask.dtype == torch.bool
    parts = [_by_mask(call) if masked else None, _by_documents(call), _by_lengths(call)]
    if call.mask is None:
        parts.append(_by_rule(s, t, call.causal, call.narrow))
    rules = [part for part in parts if part is not None]
    if not rules:
        return None

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = rules[0](batch, head, query, key)
        for rule in rules[1:]:
            found = found & rule(batch, head, query, key)
        return found

    b, n = call.q_bsnd.shape[0], call.q_bsnd.shape[2]

    def make() -> BlockMask:
        return create_block_mask(seen, b, n if masked else None, s, t, device=device)

    if call.documents is None or call.mask is not None or call.key_lengths is not None:
        return make()
    return remembered(call.documents, (call.causal, call.narrow), make)


@lru_cache(maxsize=8)
def _blocks_by_rule(
    s: int, t: int, causal: bool, window: int | None, device: torch.device
) -> BlockMask:
    """Blocks of a rule by position, made once for every length."""
    return create_block_mask(_by_rule(s, t, causal, window), None, None, s, t, device=device)


def _by_rule(s: int, t: int, causal: bool, window: int | None) -> Seen:
    behind = t if window is None else window - 1
    ahead = 0 if causal else behind

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + (t - s) - key
        return (distance >= -ahead) & (distance <= behind)

    return seen


def _by_mask(call: AttentionCall) -> Seen:
    assert call.mask is not None
    mask = _four_dims(call.mask, call)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask[batch, head, query, key]

    return seen


def _by_documents(call: AttentionCall) -> Seen | None:
    if call.documents is None:
        return None
    ids = numbered(call.documents)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ids[batch, query] == ids[batch, key]

    return seen


def _by_lengths(call: AttentionCall) -> Seen | None:
    lengths = call.key_lengths
    if lengths is None:
        return None

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < lengths[batch]

    return seen


def _score(call: AttentionCall) -> Callable[..., Tensor] | None:
    """Addend of the scores; None: nothing."""
    slopes, mask = call.alibi, call.mask
    added = None if mask is None or mask.dtype == torch.bool else _four_dims(mask, call)
    if slopes is None and added is None:
        return None
    offset = call.k_btnd.shape[1] - call.q_bsnd.shape[1]

    def score(value: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if added is not None:
            value = value + added[batch, head, query, key]
        if slopes is not None:
            value = value - slopes[head] * (query + offset - key).abs()
        return value

    return score


def _four_dims(mask: Tensor, call: AttentionCall) -> Tensor:
    b, s, n = call.q_bsnd.shape[:3]
    return mask.expand(b, n, s, call.k_btnd.shape[1])
