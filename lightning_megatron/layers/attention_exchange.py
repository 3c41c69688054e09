"""Attention of layers whose sequence is split over cp.

A layer has the queries, keys and values of its own positions. Which positions these are it asks of
`topology.context` (`layout_of`). The kind of the exchange is the user's, or chosen by arithmetic
(`layers.context_choice`), and one operator computes the attention
(`layers.context_attention`). Masks, documents and positions are whole, and are cut there.

A causal position never sees the padding behind the end. Without the causal rule the length of the
sequence must be known exactly. It is where one length only fits the part of this rank, or where a
mask, ``documents``, ``positions`` or ``length`` tells.

Legend: b batch, s sequence, n heads, d head dim.
"""

import logging
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention_call import AttentionCall
from lightning_megatron.layers.context_attention.call import ContextCall, context_attend
from lightning_megatron.layers.context_choice import (
    AttentionSizes,
    Hardware,
    Kind,
    choose,
    refusal,
)
from lightning_megatron.layers.packed_documents import check_documents, numbered
from lightning_megatron.layers.size_checks import AttentionBackend
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.topology.degrees import nearest_divisors

log = logging.getLogger(__name__)


def layout_of(
    context: Context,
    local: int,
    *,
    exact: bool,
    length: int | None = None,
    told: tuple[tuple[Tensor | None, int], ...] = (),
) -> ContextLayout:
    """Split of the sequence of which this rank has ``local`` positions.

    Args:
        context: split of the sequences.
        local: positions of this cp rank.
        exact: whether padding must be told from the end of the sequence.
        length: positions of the whole sequence, where the caller knows.
        told: whole tensors, and the dim of the sequence in each.

    Raises:
        ConfigError: no sequence was cut into such parts, or it is not known which of several.
    """
    sizes = [tensor.shape[dim] for tensor, dim in told if tensor is not None]
    known = [size for size in sizes if size > 1]  # 1 is broadcast
    found = length if length is not None or not known else known[0]
    layout = context.layout(local, found)
    if layout.local != local:
        raise ConfigError(
            f"cp={layout.cp}: a mask, documents or positions of {found} positions meet "
            f"{local} positions on each cp rank, which are those of a longer or shorter sequence; "
            "nearest valid: whole tensors, which the layers cut themselves"
        )
    lengths = sorted(context.lengths(local))
    if exact and found is None and len(lengths) > 1:
        raise ConfigError(
            f"cp={layout.cp}: sequences of {', '.join(map(str, lengths))} positions are cut into "
            f"parts of {local}, and without a causal mask attention must know where the one at "
            f"hand ends; nearest valid: length={lengths[-1]}, or documents, in the layer's call"
        )
    return layout


def attend_over_ranks(
    context: Context,
    layout: ContextLayout,
    backend: AttentionBackend,
    call: AttentionCall,
    key_layout: ContextLayout | None = None,
    *,
    whole_keys: bool = False,
) -> Tensor:
    """Attention ``[b, s, n, d]`` of this rank's queries over the keys of all cp ranks.

    Args:
        context: split of the sequences.
        layout: split of the queries' sequence.
        backend: kernel that the layer names.
        call: this rank's queries, keys and values; masks and documents are whole.
        key_layout: split of the keys' sequence, if it is another one.
        whole_keys: whether ``call`` has keys and values of the whole sequence, filled up to
            ``layout.padded``, so that nothing is exchanged.

    Raises:
        ConfigError: the kind cannot do this call, or its tensors do not fit.
    """
    problem = backend_problem(backend, layout.cp) or _learning_problem(call, layout.cp)
    if problem:
        raise ConfigError(problem)
    if call.documents is not None:
        check_documents(call.documents, call.q_bsnd.shape[0], layout.length)
    mask = _whole_mask(call, layout, key_layout or layout)
    kind: Kind | Literal["whole"] = "whole"
    if not whole_keys:
        kind = _kind(context, layout, call, key_layout, mask is not None)
    ruled = call.mask is None
    options = ContextCall(
        layout=layout,
        kind=kind,
        causal=call.causal and ruled,
        window=call.window if ruled else None,
        dropout=call.dropout,
        key_layout=key_layout,
        kernel="reference" if backend == "reference" else "auto",
    )
    ids = None if call.documents is None else numbered(call.documents)
    tensors = (call.q_bsnd, call.k_btnd, call.v_btnd)
    return context_attend(context, options, *tensors, documents=ids, mask=mask, alibi=call.alibi)


def backend_problem(backend: AttentionBackend, cp: int) -> str | None:
    """Reason why a backend does not compute attention over cp; None if it does."""
    if backend in ("auto", "sdpa", "flash", "reference"):
        return None
    return (
        f"attention_backend={backend}, cp={cp}: attention of a split sequence needs a kernel that "
        "returns its normaliser, which this backend does not; nearest valid: auto"
    )


def kind_problems(
    kind: str, *, cp: int, tp: int, num_heads: int, dropout: float, ulysses: int | None = None
) -> list[str]:
    """Problems of a kind that was chosen by name.

    >>> kind_problems("ulysses", cp=4, tp=1, num_heads=6, dropout=0.0)[0]  # doctest: +ELLIPSIS
    "cp=4, kind='ulysses', num_heads=6, tp=1: heads of a tp rank must be divisible by cp; ..."
    """
    own = max(num_heads // tp, 1)
    if kind == "ring" and dropout:
        return [
            f"kind='ring', attention_dropout={dropout}: a ring draws no masks of weights; "
            "nearest valid: kind='gather'"
        ]
    if kind == "auto" or kind == "gather":
        return []
    ranks, name = (cp, "cp") if kind == "ulysses" else (ulysses or 1, "ulysses")
    if own % ranks == 0:
        return []
    valid = " or ".join(str(d) for d in nearest_divisors(own, ranks))
    other = "kind='ring'" if kind == "ulysses" else "ulysses=None"
    return [
        f"cp={cp}, kind={kind!r}, num_heads={num_heads}, tp={tp}: heads of a tp rank must be "
        f"divisible by {name}; nearest valid: {name}={valid}, or {other}"
    ]


def _kind(
    context: Context,
    layout: ContextLayout,
    call: AttentionCall,
    key_layout: ContextLayout | None,
    masked: bool,
) -> Kind:
    config, (b, _, heads, d) = context.config, call.q_bsnd.shape
    if config.kind != "auto":
        problem = refusal(
            config.kind,
            heads=heads,
            cp=layout.cp,
            ulysses=config.ulysses,
            dropout=call.dropout,
            mask=masked,
        )
        if problem:
            raise ConfigError(f"cp={layout.cp}, {problem}")
        return config.kind
    sizes = AttentionSizes(
        cp=layout.cp,
        heads=heads,
        kv_heads=call.k_btnd.shape[2],
        head_dim=d,
        length=layout.length,
        batch=b,
        key_length=None if key_layout is None else key_layout.length,
        element_bytes=call.q_bsnd.element_size(),
        causal=call.causal,
        window=call.window,
        order=layout.order,
    )
    how: dict[str, Any] = {
        "device": call.q_bsnd.device.type,
        "hardware": Hardware(ranks_per_node=context.ranks_per_node),
        "mask": masked,
        "dropout": call.dropout,
    }
    if torch.compiler.is_compiling():  # which neither looks into a cache nor writes to a log
        return choose(sizes, **how).kind
    return _chosen(sizes, **how)


@lru_cache(maxsize=256)
def _chosen(
    sizes: AttentionSizes, *, device: str, hardware: Hardware, mask: bool, dropout: float
) -> Kind:
    choice = choose(sizes, device=device, hardware=hardware, mask=mask, dropout=dropout)
    _say(choice.reason)
    return choice.kind


@lru_cache
def _say(reason: str) -> None:
    log.info(reason)


def _learning_problem(call: AttentionCall, cp: int) -> str | None:
    if call.mask is None or not call.mask.requires_grad or not torch.is_grad_enabled():
        return None
    return (
        f"cp={cp}, a mask that learns: attention of a split sequence returns no gradient for it; "
        "nearest valid: rotary=Alibi(), a Rotary, or cp=1"
    )


def _whole_mask(
    call: AttentionCall, layout: ContextLayout, key_layout: ContextLayout
) -> Tensor | None:
    """Mask ``[b | 1, n | 1, s, t]`` of whole sequences, of what is no rule by position."""
    mask, shape = call.mask, (layout.length, key_layout.length)
    if mask is not None:
        mask = mask.view(*(1,) * (4 - mask.dim()), *mask.shape).expand(-1, -1, *shape)
    if call.key_lengths is None:
        return mask
    keys = torch.arange(shape[1], device=call.key_lengths.device)
    seen = (keys < call.key_lengths.view(-1, 1, 1, 1)).expand(-1, 1, *shape)
    if mask is None:
        return seen
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(seen.logical_not(), -torch.inf)
