"""Attention of models of transformers, over sequences that are split over cp.

Models of transformers ask a registry for the function that computes attention, and for the one that
makes its mask, under the name in ``config._attn_implementation``. Under context parallelism that
name is `NAME`, and what it stands for exchanges keys and values between the cp ranks
(`layers.attention_exchange`). In one process it is ``scaled_dot_product_attention``.

A mask is whole, ``[b, 1, s, s]``, as ``sdpa`` gets it. One that says no more than causal, a sliding
window and packed documents is not made: a tensor of its shape without memory stands for it, which
knows the rule (`RuleMask`).

Legend: b batch, s sequence, n heads, d head dim.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.adoption.block_trial import TRIAL, attention_to_itself
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention_backends import attend
from lightning_megatron.layers.attention_call import AttentionCall
from lightning_megatron.layers.attention_exchange import attend_over_ranks, layout_of
from lightning_megatron.layers.packed_documents import numbered
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.whole.context_rows import join, own_positions

NAME = "lightning_megatron"
"""Name of the attention in the registries of transformers."""
SEQUENCES = "_block_sequences"
"""Attribute of attention modules that holds what splits their sequences."""
_OF_MASK = "_attention_rule"
_REFUSED = ("position_bias", "sinks", "cache", "block_mask", "score_mod")


class Sequences(Protocol):
    """Splitter of the sequences of blocks."""

    attended: int
    """Number of calls of attention."""

    @property
    def context(self) -> Context | None:
        """Split of the sequences at present; None if they are whole."""
        ...


@dataclass(frozen=True)
class RuleMask:
    """Rule of a mask that hides by causality, a window and documents only."""

    window: int | None
    """Positions that each one sees, itself included; None: all before it."""
    documents: Tensor | None
    """Number of the document of each position, ``[b, s]``; None: one in each row."""


def register() -> None:
    """Tell transformers the functions; again does nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionInterface.register(TRIAL, attention_to_itself)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' signature.

    Args:
        module: attention module.
        query: ``[b, n, s, d]``; under cp of this rank's positions, as keys and values.
        key: the number of their heads divides that of the queries.
        value: heads may be smaller than those of keys.
        attention_mask: whole mask (see the module's text); None: causal or all, as the module is.
        dropout: probability of a weight to be zeroed.
        scaling: factor of the scores; ``1 / sqrt(d)`` when None.
        is_causal: whether a position sees no later one; as the module says when None.
        softcap: bound that a ``tanh`` puts on the scores (Gemma 2, arXiv 2408.00118).
        s_aux: score ``[n]`` of a key without a value (attention sinks, gpt-oss).
        **kwargs: what only other implementations look at, as the window, which the mask tells.

    Returns:
        Means ``[b, s, n, d]``, and None for the weights.

    Raises:
        ConfigError: the module asks for what this attention does not compute.
    """
    name = type(module).__name__
    for option in _REFUSED:
        if kwargs.get(option) is not None:
            raise ConfigError(
                f"cp > 1: {name} calls attention with {option}, which attention of split sequences "
                "does not have; nearest valid: cp=1"
            )
    sequences: Sequences = getattr(module, SEQUENCES)
    sequences.attended += 1
    context = sequences.context
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if getattr(module, "is_cross_attention", False) or query.shape[2] != key.shape[2]:
        if context is not None:
            raise ConfigError(
                f"cp={context.cp.size}: {name} attends to another sequence or to a cache, which is "
                "not split like its own; nearest valid: cp=1"
            )
        causal = False
    rule: RuleMask | None = getattr(attention_mask, _OF_MASK, None)
    if rule is not None:
        attention_mask, causal = None, True
    elif attention_mask is not None and (
        attention_mask.dim() != 4 or attention_mask.stride()[-2:] == (0, 0)
    ):
        raise ConfigError(
            f"cp > 1: {name} got a mask of shape {tuple(attention_mask.shape)} that is not the one "
            "that transformers made; nearest valid: a mask [b, 1, s, s] in the model's call, or "
            "cp=1"
        )
    width = query.shape[-1]
    if scaling is not None and scaling != width**-0.5:
        query = query * (scaling * width**0.5)
    narrow = width - value.shape[-1]
    call = AttentionCall(
        query.transpose(1, 2),
        key.transpose(1, 2),
        (F.pad(value, (0, narrow)) if narrow else value).transpose(1, 2),
        attention_mask,
        None if rule is None else rule.window,
        dropout,
        causal=causal,
        documents=None if rule is None else rule.documents,
    )
    if softcap is None and s_aux is None:
        y = _attended(call, context)
    else:
        y = _by_formula(call, context, softcap, s_aux)
    return (y[..., : value.shape[-1]] if narrow else y), None


def _attended(call: AttentionCall, context: Context | None) -> Tensor:
    if context is None:
        return attend("sdpa", call)
    return attend_over_ranks(context, _layout(call, context), "sdpa", call)


def _layout(call: AttentionCall, context: Context) -> ContextLayout:
    told = ((call.documents, -1), (call.mask, -1))
    return layout_of(context, call.q_bsnd.shape[1], exact=not call.causal, told=told)


def _by_formula(
    call: AttentionCall, context: Context | None, softcap: float | None, sinks_n: Tensor | None
) -> Tensor:
    """Attention as transformers writes it out, of this rank's queries to all keys.

    No kernel bounds scores, or has sinks. It holds the scores of all keys, as ``eager`` does.
    """
    q, k, v = call.q_bsnd, call.k_btnd, call.v_btnd
    rows = None
    if context is not None:
        layout = _layout(call, context)
        k, v = (join(x, layout, context.cp) for x in (k, v))
        rows = own_positions(layout, context.cp.rank, q.device).clamp(max=layout.length - 1)
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("bsnd,btnd->bnst", q.to(wide), k.to(wide)) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = _hidden(scores, call, rows)
    if sinks_n is not None:
        sink = sinks_n.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = F.dropout(weights, call.dropout)
    return torch.einsum("bnst,btnd->bsnd", weights, v.to(wide)).to(q.dtype)


def _hidden(scores_bnst: Tensor, call: AttentionCall, rows: Tensor | None) -> Tensor:
    """Scores with those of keys that are not seen at the lowest number.

    Args:
        scores_bnst: scores.
        call: what hides keys, whole.
        rows: positions of the queries; None: all.
    """
    keys = torch.arange(scores_bnst.shape[-1], device=scores_bnst.device)
    rows = keys if rows is None else rows
    if call.mask is not None:
        mask = call.mask.index_select(-2, rows) if call.mask.shape[-2] > 1 else call.mask
        if mask.dtype != torch.bool:
            return scores_bnst + mask
        return scores_bnst.masked_fill(mask.logical_not(), torch.finfo(scores_bnst.dtype).min)
    seen = torch.ones(len(rows), len(keys), dtype=torch.bool, device=keys.device)
    if call.causal:
        seen = keys <= rows.unsqueeze(1)
    if call.window is not None:
        seen = seen & (keys > rows.unsqueeze(1) - call.window)
    if call.documents is not None:
        ids = numbered(call.documents)
        seen = (seen & (ids[:, rows].unsqueeze(2) == ids.unsqueeze(1))).unsqueeze(1)
    return scores_bnst.masked_fill(seen.logical_not(), torch.finfo(scores_bnst.dtype).min)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Mask of transformers' signature: as ``sdpa_mask`` makes it, or a stand-in for a rule."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    plain = attention_mask is None and q_length == kv_length and not q_offset and not kv_offset
    rule = _rule_of(function) if plain else None
    if rule is not None:
        if rule.documents is None and rule.window is None:
            return None
        # Where somebody takes it for a mask after all, it hides everything.
        hidden = torch.zeros((), dtype=torch.bool, device=kwargs.get("device", "cpu"))
        stand_in = hidden.expand(batch_size, 1, q_length, kv_length)
        setattr(stand_in, _OF_MASK, rule)
        return stand_in
    made: Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        function,
        attention_mask,
        **kwargs,
    )
    return made


def _rule_of(function: Callable[..., Any]) -> RuleMask | None:
    """Rule that a mask function of transformers is; None if it is more."""
    from transformers import masking_utils

    if function is masking_utils.causal_mask_function:
        return RuleMask(None, None)
    held = inspect.getclosurevars(function).nonlocals
    kind = getattr(function, "__qualname__", "").partition(".")[0]
    if kind == "remap_positions_for_packed_sequence":  # in a document, positions are neighbours
        return _rule_of(held["mask_function"])
    if kind != "and_masks":
        return None
    found = RuleMask(None, None)
    is_causal = False
    for part in held["mask_functions"]:
        inner = inspect.getclosurevars(part).nonlocals
        part_kind = getattr(part, "__qualname__", "").partition(".")[0]
        if part_kind == "sliding_window_overlay":
            found = RuleMask(inner["sliding_window"], found.documents)
        elif part_kind == "packed_sequence_mask_function":
            found = RuleMask(found.window, inner["packed_sequence_mask"])
        elif (rule := _rule_of(part)) is not None and rule.documents is None:
            is_causal = True
            found = RuleMask(rule.window or found.window, found.documents)
        else:
            return None
    return found if is_causal else None
