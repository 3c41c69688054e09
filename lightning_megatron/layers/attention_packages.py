"""Attention by kernels of other packages: flash-attn and Transformer Engine.

Both are imported when they are first used. flash-attn takes documents as sequences of many lengths
in one row (``flash_attn_varlen_func``), so that no score between two of them is computed.
"""

import importlib
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from lightning_megatron.layers.attention_call import AttentionCall
from lightning_megatron.layers.packed_documents import bounds

log = logging.getLogger(__name__)

PACKAGES: Mapping[str, str] = {"flash": "flash_attn", "te": "transformer_engine.pytorch"}
"""Package of each backend."""


@lru_cache
def imported(package: str) -> Any:
    """Import a package; None if that fails."""
    try:
        return importlib.import_module(package)
    except Exception as error:  # without its binaries Transformer Engine raises RuntimeError
        log.debug("%s: %s", package, error)
        return None


def flash(call: AttentionCall) -> Tensor:
    """Attention by flash-attn."""
    package = imported(PACKAGES["flash"])
    options = {
        "dropout_p": call.dropout,
        "causal": call.causal,
        "window_size": _band(call),
        "alibi_slopes": None if call.alibi is None else call.alibi.float(),
    }
    if call.documents is None:
        y_bsnd: Tensor = package.flash_attn_func(call.q_bsnd, call.k_btnd, call.v_btnd, **options)
        return y_bsnd
    found = bounds(call.documents)
    q, k, v = (x.flatten(0, 1) for x in (call.q_bsnd, call.k_btnd, call.v_btnd))
    ends, longest = (found.starts, found.starts), (found.longest, found.longest)
    y: Tensor = package.flash_attn_varlen_func(q, k, v, *ends, *longest, **options)
    return y.view(call.q_bsnd.shape)


def transformer_engine(call: AttentionCall) -> Tensor:
    """Attention by Transformer Engine."""
    n, d = call.q_bsnd.shape[2:]
    before, behind = _band(call)
    causal = "causal" if call.causal else "no_mask"
    if call.causal:
        behind = 0
    module = te_module(n, d, call.k_btnd.shape[2], call.dropout, causal, (before, behind))
    y_bsh: Tensor = module(call.q_bsnd, call.k_btnd, call.v_btnd)
    return y_bsh.view(call.q_bsnd.shape)


def _band(call: AttentionCall) -> tuple[int, int]:
    """Positions before and behind each one that it sees; -1 is no bound."""
    if call.narrow is None:
        return -1, -1
    return call.narrow - 1, 0 if call.causal else call.narrow - 1


@lru_cache(maxsize=32)
def te_module(
    n: int, d: int, kv_heads: int, dropout: float, mask: str, band: tuple[int, int]
) -> Any:
    """Transformer Engine's attention module, which has no parameters."""
    return imported(PACKAGES["te"]).DotProductAttention(
        n,
        d,
        num_gqa_groups=kv_heads,
        attention_dropout=dropout,
        qkv_format="bshd",
        attn_mask_type=mask,
        window_size=band,
    )
