"""Kernels of attention: one formula, several implementations.

Every position ``i`` takes the mean of the values of the positions ``j`` that it sees, weighted by

    softmax over j of  q_i . k_j / sqrt(d)

and sees all positions, or itself and those before it (causal), or of these a window only, and
nothing of another document. Kernels differ in how much of the ``s`` times ``s`` scores is in memory
at a time, and in their limits:

=============  ============================================  ==================================
backend        what it is                                    limits
=============  ============================================  ==================================
``reference``  the formula, softmax in at least float32      holds all scores
``sdpa``       ``scaled_dot_product_attention`` of torch     a window and ALiBi make a mask, for
                                                             which torch has slower kernels
``flash``      flash-attn (arXiv 2307.08691), extra ``gpu``  CUDA, float16 or bfloat16, no mask,
                                                             heads of at most 256
``flex``       ``flex_attention`` of torch, compiled         training on CUDA only; no dropout
``te``         Transformer Engine, extra ``gpu``             CUDA, float16 or bfloat16, no mask,
                                                             no documents, no ALiBi
=============  ============================================  ==================================

``auto`` uses flash where it is installed and the call is within its limits, else sdpa, and logs the
name once. A backend that was chosen by name raises an error for a call beyond its limits: no
backend silently replaces another. A window costs ``s window`` operations in flash, flex and te, and
``s^2`` in the others.

*Documents.* flash and flex compute no score between two documents. sdpa calls the kernel once for
each document where that takes less time than the ``s^2`` scores of a mask, so for all but very
short documents.

*flex.* Rules are functions of positions: ``mask_mod`` tells whether a query sees a key,
``score_mod`` what is added to the score. Blocks of scores that nobody sees are not computed: those
above the diagonal, outside of a window, between documents. On a GPU the kernel is made from these
functions by the compiler. Not compiled, as on CPUs, all scores are held.

Legend: b batch, s query positions, t key positions, n heads, d head dim.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lightning_megatron._torch.devices import is_cuda, on_host
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers import attention_packages
from lightning_megatron.layers.attention_call import AttentionCall, dense_mask
from lightning_megatron.layers.attention_packages import PACKAGES, flash, transformer_engine
from lightning_megatron.layers.packed_documents import bounds, numbered, remembered
from lightning_megatron.layers.size_checks import AttentionBackend

log = logging.getLogger(__name__)

_LARGEST_FLASH_HEAD = 256
_SCORES_PER_CALL: Mapping[str, int] = {"cpu": 10_000, "cuda": 5_000_000}
"""Masked scores, forward and backward, that take as long as one more call of the kernel."""


def attend(backend: AttentionBackend, call: AttentionCall) -> Tensor:
    """Compute attention ``[b, s, n, d]`` by the backend of that name.

    Raises:
        ConfigError: the backend is not installed, or cannot do this call.
    """
    name = _automatic(call) if backend == "auto" else backend
    call.check()
    problem = missing(name) or _limit(name, call)
    if problem:
        raise ConfigError(f"attention_backend={name}: {problem}; nearest valid: sdpa")
    return _BACKENDS[name](call)


def missing(backend: AttentionBackend) -> str | None:
    """Reason why the backend cannot be imported; None if it can."""
    package = PACKAGES.get(backend)
    if package is None or attention_packages.imported(package) is not None:
        return None
    return (
        f"{package} cannot be imported; pip install --no-build-isolation 'lightning-megatron[gpu]'"
    )


def _automatic(call: AttentionCall) -> AttentionBackend:
    fits = missing("flash") is None and _limit("flash", call) is None
    name: AttentionBackend = "flash" if fits else "sdpa"
    _say(name)
    return name


@lru_cache
def _say(name: str) -> None:
    log.info("attention_backend=auto: %s", name)


def _limit(backend: AttentionBackend, call: AttentionCall) -> str | None:
    """Reason why the backend cannot do the call; None if it can."""
    if backend in ("reference", "sdpa"):
        return None
    q = call.q_bsnd
    if call.causal and not call.is_square:
        return f"{q.shape[1]} queries, {call.k_btnd.shape[1]} keys: their numbers must be equal"
    if backend == "flex":
        if call.dropout:
            return f"dropout={call.dropout}: this backend has no dropout"
        if not is_cuda(q.device) and torch.is_grad_enabled() and _any_gradient(call):
            return f"device={q.device.type}: this backend trains on CUDA only"
        return None
    if call.mask is not None:
        return "takes no mask"
    if call.key_lengths is not None:
        return "takes no lengths of keys"
    if backend == "te" and (call.documents is not None or call.alibi is not None):
        return "takes no documents" if call.documents is not None else "has no ALiBi"
    if not is_cuda(q.device) or q.dtype not in (torch.float16, torch.bfloat16):
        return f"device={q.device.type}, {q.dtype}: needs CUDA and float16 or bfloat16"
    if backend == "flash" and q.shape[-1] > _LARGEST_FLASH_HEAD:
        return f"head_dim={q.shape[-1]}: must be at most {_LARGEST_FLASH_HEAD}"
    return None


def _any_gradient(call: AttentionCall) -> bool:
    return any(x.requires_grad for x in (call.q_bsnd, call.k_btnd, call.v_btnd))


def reference(call: AttentionCall) -> Tensor:
    """Attention by the formula."""
    q, k, v = (x.transpose(1, 2) for x in (call.q_bsnd, call.k_btnd, call.v_btnd))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) / math.sqrt(q.shape[-1])
    mask = dense_mask(call)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(mask.logical_not(), -math.inf)
    elif mask is not None:
        scores = scores + mask
    weights = F.dropout(scores.softmax(-1), call.dropout)
    return (weights @ v.to(wide)).to(q.dtype).transpose(1, 2)


def sdpa(call: AttentionCall) -> Tensor:
    """Attention by ``scaled_dot_product_attention``."""
    if call.documents is not None and _each_apart(call, call.documents):
        return _document_by_document(call, call.documents)
    q, k, v = (x.transpose(1, 2) for x in (call.q_bsnd, call.k_btnd, call.v_btnd))
    is_causal = call.causal and call.by_rule and call.is_square
    mask = None if is_causal else dense_mask(call)
    if mask is not None and not on_host(q.device):
        # The only fused kernel of GPUs that takes a mask takes no groups: all scores would be held.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    y_bnsd = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=is_causal,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y_bnsd.transpose(1, 2)


def _each_apart(call: AttentionCall, documents: Tensor) -> bool:
    """Whether one call for each document takes less time than one with a mask."""
    scores = _SCORES_PER_CALL.get(documents.device.type)
    if scores is None or call.mask is not None or call.key_lengths is not None:
        return False
    if torch.compiler.is_compiling():  # a graph cannot depend on where documents end
        return False
    b, s, n = call.q_bsnd.shape[:3]
    return len(bounds(documents).sizes) * scores < b * s * s * n


def _document_by_document(call: AttentionCall, documents: Tensor) -> Tensor:
    sizes = bounds(documents).sizes
    tensors = (call.q_bsnd, call.k_btnd, call.v_btnd)
    parts = zip(*(torch.split(x.flatten(0, 1), sizes) for x in tensors), strict=True)
    found = []
    for part in parts:
        q, k, v = (x.unsqueeze(0) for x in part)
        found.append(sdpa(replace(call, q_bsnd=q, k_btnd=k, v_btnd=v, documents=None))[0])
    return torch.cat(found).view(call.q_bsnd.shape)


Seen = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of batch, head, query and key: whether the query sees the key."""


def flex(call: AttentionCall) -> Tensor:
    """Attention by ``flex_attention``."""
    q, k, v = (x.transpose(1, 2) for x in (call.q_bsnd, call.k_btnd, call.v_btnd))
    run: Any = flex_attention
    if is_cuda(q.device):
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


@lru_cache
def _compiled_block_mask() -> Callable[..., BlockMask]:
    compiled: Callable[..., BlockMask] = torch.compile(create_block_mask)
    return compiled


def _block_mask(device: torch.device) -> Callable[..., BlockMask]:
    """Function that finds the blocks; compiled it holds blocks alone, else all ``s t`` scores."""
    return _compiled_block_mask() if is_cuda(device) else create_block_mask


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
        return _block_mask(device)(seen, b, n if masked else None, s, t, device=device)

    if call.documents is None or call.mask is not None or call.key_lengths is not None:
        return make()
    return remembered(call.documents, (call.causal, call.narrow), make)


@lru_cache(maxsize=8)
def _blocks_by_rule(
    s: int, t: int, causal: bool, window: int | None, device: torch.device
) -> BlockMask:
    """Blocks of a rule by position, made once for every length."""
    rule = _by_rule(s, t, causal, window)
    return _block_mask(device)(rule, None, None, s, t, device=device)


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


_BACKENDS: dict[str, Callable[[AttentionCall], Tensor]] = {
    "reference": reference,
    "sdpa": sdpa,
    "flash": flash,
    "flex": flex,
    "te": transformer_engine,
}
