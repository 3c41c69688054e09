"""Kernels of causal attention: one formula, several implementations.

Every position ``i`` takes the mean of the values of the positions ``j`` that it sees, weighted by

    softmax over j of  q_i . k_j / sqrt(d)

and sees itself and all positions before it, or only the last ``window`` of these. Kernels differ in
how much of the ``s`` times ``s`` scores is in memory at a time, and in their limits:

=============  ============================================  ==================================
backend        what it is                                    limits
=============  ============================================  ==================================
``reference``  the formula, softmax in at least float32      holds all scores
``sdpa``       ``scaled_dot_product_attention`` of torch     a window makes a mask, for which
                                                             torch has slower kernels
``flash``      flash-attn (arXiv 2307.08691), extra ``gpu``  CUDA, float16 or bfloat16, no mask,
                                                             heads of at most 256
``flex``       ``flex_attention`` of torch, compiled         training on CUDA only; no mask,
                                                             no dropout
``te``         Transformer Engine, extra ``gpu``             CUDA, float16 or bfloat16, no mask
=============  ============================================  ==================================

``auto`` uses flash where it is installed and the call is within its limits, else sdpa, and logs the
name once. A backend that was chosen by name raises an error for a call beyond its limits: no
backend silently replaces another. A window costs ``s window`` operations in flash, flex and te, and
``s^2`` in the others.

Legend: b batch, s query positions, t key positions, n heads, d head dim.
"""

import importlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.size_checks import AttentionBackend

log = logging.getLogger(__name__)

_PACKAGES = {"flash": "flash_attn", "te": "transformer_engine.pytorch"}
_LARGEST_FLASH_HEAD = 256


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one call of attention."""

    q_bsnd: Tensor
    """Queries."""
    k_btnd: Tensor
    """Keys; the number of their heads divides that of the queries."""
    v_btnd: Tensor
    """Values."""
    mask: Tensor | None = None
    """Mask of ``scaled_dot_product_attention``, in place of the causal mask and the window."""
    window: int | None = None
    """Number of positions that each one sees; all before it when None."""
    dropout: float = 0.0
    """Probability of a weight to be zeroed."""

    @property
    def narrow(self) -> int | None:
        """Window, if it is shorter than the sequence."""
        window, length = self.window, self.k_btnd.shape[1]
        return window if window is not None and window < length else None


def attend(backend: AttentionBackend, call: AttentionCall) -> Tensor:
    """Compute attention ``[b, s, n, d]`` by the backend of that name.

    Raises:
        ConfigError: the backend is not installed, or cannot do this call.
    """
    name = _automatic(call) if backend == "auto" else backend
    problem = missing(name) or _limit(name, call)
    if problem:
        raise ConfigError(f"attention_backend={name}: {problem}; nearest valid: sdpa")
    return _BACKENDS[name](call)


def missing(backend: AttentionBackend) -> str | None:
    """Reason why the backend cannot be imported; None if it can."""
    package = _PACKAGES.get(backend)
    if package is None or _imported(package) is not None:
        return None
    return (
        f"{package} cannot be imported; pip install --no-build-isolation 'lightning-megatron[gpu]'"
    )


@lru_cache
def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except Exception as error:  # without its binaries Transformer Engine raises RuntimeError
        log.debug("%s: %s", package, error)
        return None


def _automatic(call: AttentionCall) -> AttentionBackend:
    flash = missing("flash") is None and _limit("flash", call) is None
    name: AttentionBackend = "flash" if flash else "sdpa"
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
    if call.mask is not None:
        return "takes no mask"
    if q.shape[1] != call.k_btnd.shape[1]:
        return f"{q.shape[1]} queries, {call.k_btnd.shape[1]} keys: their numbers must be equal"
    if backend == "flex":
        if call.dropout:
            return f"dropout={call.dropout}: this backend has no dropout"
        if not q.is_cuda and torch.is_grad_enabled() and _any_gradient(call):
            return f"device={q.device.type}: this backend trains on CUDA only"
        return None
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return f"device={q.device.type}, {q.dtype}: needs CUDA and float16 or bfloat16"
    if backend == "flash" and q.shape[-1] > _LARGEST_FLASH_HEAD:
        return f"head_dim={q.shape[-1]}: must be at most {_LARGEST_FLASH_HEAD}"
    return None


def _any_gradient(call: AttentionCall) -> bool:
    return any(x.requires_grad for x in (call.q_bsnd, call.k_btnd, call.v_btnd))


def window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Mask ``[s, s]`` of ``length`` positions, True within the window before each one."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def _reference(call: AttentionCall) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (call.q_bsnd, call.k_btnd, call.v_btnd))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) / math.sqrt(q.shape[-1])
    mask = call.mask
    if mask is None:
        mask = window_mask(k.shape[2], call.narrow, q.device)
    hidden = mask.logical_not() if mask.dtype == torch.bool else None
    scores = scores + mask if hidden is None else scores.masked_fill(hidden, -math.inf)
    weights = F.dropout(scores.softmax(-1), call.dropout)
    return (weights @ v.to(wide)).to(q.dtype).transpose(1, 2)


def _sdpa(call: AttentionCall) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (call.q_bsnd, call.k_btnd, call.v_btnd))
    mask = call.mask
    if mask is None and call.narrow is not None:
        mask = window_mask(k.shape[2], call.narrow, q.device)
    if mask is not None and not q.is_cpu:
        # The only fused kernel of GPUs that takes a mask takes no groups: all scores would be held.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    y_bnsd = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=call.dropout,
        is_causal=mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y_bnsd.transpose(1, 2)


def _flash(call: AttentionCall) -> Tensor:
    before = -1 if call.narrow is None else call.narrow - 1
    y_bsnd: Tensor = _imported("flash_attn").flash_attn_func(
        call.q_bsnd,
        call.k_btnd,
        call.v_btnd,
        dropout_p=call.dropout,
        causal=True,
        window_size=(before, 0 if before >= 0 else -1),
    )
    return y_bsnd


def _flex(call: AttentionCall) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (call.q_bsnd, call.k_btnd, call.v_btnd))
    run: Any = flex_attention
    if q.is_cuda:
        run = _compiled_flex()
    y_bnsd: Tensor = run(
        q,
        k,
        v,
        block_mask=_block_mask(q.shape[2], call.narrow, q.device),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y_bnsd.transpose(1, 2)


@lru_cache
def _compiled_flex() -> Callable[..., Tensor]:
    # Not compiled it holds all scores.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled


@lru_cache(maxsize=8)
def _block_mask(length: int, window: int | None, device: torch.device) -> BlockMask:
    """Blocks of scores that are computed; made once for every length."""
    width = length if window is None else window

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < width)

    return create_block_mask(seen, None, None, length, length, device=device)


def _te(call: AttentionCall) -> Tensor:
    n, d = call.q_bsnd.shape[2:]
    before = -1 if call.narrow is None else call.narrow - 1
    module = _te_module(n, d, call.k_btnd.shape[2], call.dropout, before)
    y_bsh: Tensor = module(call.q_bsnd, call.k_btnd, call.v_btnd)
    return y_bsh.view(call.q_bsnd.shape)


@lru_cache(maxsize=32)
def _te_module(n: int, d: int, kv_heads: int, dropout: float, before: int) -> Any:
    """Transformer Engine's attention module, which has no parameters."""
    return _imported(_PACKAGES["te"]).DotProductAttention(
        n,
        d,
        num_gqa_groups=kv_heads,
        attention_dropout=dropout,
        qkv_format="bshd",
        attn_mask_type="causal",
        window_size=(before, 0),
    )


_BACKENDS: dict[str, Callable[[AttentionCall], Tensor]] = {
    "reference": _reference,
    "sdpa": _sdpa,
    "flash": _flash,
    "flex": _flex,
    "te": _te,
}
