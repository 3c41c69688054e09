"""One call of attention over a split sequence: its options and its limits.

======================  ========  ==========  ===========
option                  ``ring``  ``gather``  ``ulysses``
======================  ========  ==========  ===========
causal, window          yes       yes         yes
documents               yes       yes         yes
ALiBi                   yes       yes         yes
mask                    no        yes         yes
dropout                 no        yes         yes
any number of heads     yes       yes         no
======================  ========  ==========  ===========

What ``gather`` can do, ``whole`` can, for which the caller has gathered (`LatentAttention`).

A ring sees one block of keys at a time and knows their positions and documents, not a mask of all
of them. ``ring`` over groups that exchange heads (``ContextConfig.ulysses``) has the limits of
both. Documents are of one sequence: between two of them (cross-attention) there are none.

Legend: b batch, s sequence of this rank, n heads of this rank, d head dim.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.context_attention.operator import Options, attend
from lightning_megatron.layers.context_choice import Kind, refusal
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.topology.degrees import nearest_divisors

KernelName = Literal["auto", "reference"]


@dataclass(frozen=True, kw_only=True)
class ContextCall:
    """Options of one call, besides its tensors."""

    layout: ContextLayout
    """Places of the queries' sequence."""
    kind: Kind | Literal["whole"]
    """Way in which ranks exchange what they hold; ``whole``: not at all, as this one has the keys
    and values of the whole sequence, filled up."""
    causal: bool = True
    """Whether a position sees itself and those before it only."""
    window: int | None = None
    """Number of positions that each one sees, itself included; without ``causal``, those less than
    ``window`` away on both sides."""
    dropout: float = 0.0
    """Probability of a weight to be zeroed."""
    scale: float | None = None
    """Factor of the scores; ``1 / sqrt(d)`` when None."""
    key_layout: ContextLayout | None = None
    """Places of the keys' sequence, if that is another one (cross-attention)."""
    kernel: KernelName = "auto"
    """``reference`` computes with plain products, for checks; ``auto`` by a fused kernel."""


def context_attend(
    context: Context,
    call: ContextCall,
    q_bsnd: Tensor,
    k_bsnd: Tensor,
    v_bsnd: Tensor,
    *,
    documents: Tensor | None = None,
    mask: Tensor | None = None,
    alibi: Tensor | None = None,
) -> Tensor:
    """Attend from this rank's queries to the keys of all cp ranks; ``[b, s, n, d]``.

    Args:
        context: split of the sequences.
        call: options.
        q_bsnd: queries of this rank.
        k_bsnd: keys of this rank; the number of their heads divides that of the queries.
        v_bsnd: values of this rank.
        documents: whole ids ``[b, length]``; positions with different ids do not see each other.
        mask: whole, ``[b | 1, n | 1, length, length]``; boolean (True is seen) or added to scores.
            It comes on top of ``causal``, ``window`` and ``documents``.
        alibi: slopes ``[n]`` of this rank's heads: a score loses slope times distance.

    Raises:
        ConfigError: the kind cannot do this, or the tensors do not fit.
    """
    _check(context, call, (q_bsnd, k_bsnd, v_bsnd), mask, alibi)
    if torch.is_autocast_enabled(q_bsnd.device.type) and q_bsnd.dtype != torch.float64:
        narrow = torch.get_autocast_dtype(q_bsnd.device.type)
        q_bsnd, k_bsnd, v_bsnd = (x.to(narrow) for x in (q_bsnd, k_bsnd, v_bsnd))
    key_layout = call.layout if call.key_layout is None else call.key_layout
    options = Options(
        context=context.key,
        kind=call.kind,
        order=call.layout.order,
        length=call.layout.length,
        key_length=key_layout.length,
        tp=call.layout.tp,
        causal=call.causal,
        window=call.window or 0,
        dropout=call.dropout,
        scale=1 / math.sqrt(q_bsnd.shape[-1]) if call.scale is None else call.scale,
        reference=call.kernel == "reference",
    )
    seed = None
    if call.dropout:
        # Drawn outside, so that whoever repeats a call with the same generator gets equal masks.
        seed = torch.randint(2**62, (), device=q_bsnd.device)
    return attend(options, q_bsnd, k_bsnd, v_bsnd, documents, mask, alibi, seed)


def _check(
    context: Context,
    call: ContextCall,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    alibi: Tensor | None,
) -> None:
    q, k, v = qkv
    key_layout = call.layout if call.key_layout is None else call.key_layout
    if call.kind != "whole":
        problem = refusal(
            call.kind,
            heads=q.shape[2],
            cp=context.cp.size,
            ulysses=None if context.ulysses is None else context.ulysses.size,
            dropout=call.dropout,
            mask=mask is not None,
        )
        if problem:
            raise ConfigError(problem)
    if q.shape[2] % k.shape[2] or k.shape != v.shape:
        raise ConfigError(
            f"heads of queries={q.shape[2]}, keys {tuple(k.shape)}, values {tuple(v.shape)}: keys "
            "and values must have equal shapes, and the number of their heads must divide that of "
            f"the queries; nearest valid: {nearest_divisors(q.shape[2], k.shape[2])[0]} heads"
        )
    keys = key_layout.padded if call.kind == "whole" else key_layout.local
    if q.shape[1] != call.layout.local or k.shape[1] != keys:
        raise ConfigError(
            f"positions of queries={q.shape[1]}, of keys={k.shape[1]}: a cp rank holds "
            f"{call.layout.local} and {keys} of sequences of {call.layout.length} and "
            f"{key_layout.length}; nearest valid: these"
        )
    if call.key_layout is not None and call.key_layout.length != call.layout.length and call.causal:
        raise ConfigError(
            f"causal attention of {call.layout.length} queries to {call.key_layout.length} keys: "
            "positions of two sequences have no order; nearest valid: causal=False"
        )
    for name, given in (("mask", mask), ("alibi", alibi)):
        if given is not None and given.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                f"{name} requires a gradient, which attention over a split sequence does not "
                "compute; nearest valid: cp=1, or a constant"
            )
