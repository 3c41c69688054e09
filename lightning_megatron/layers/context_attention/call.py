"""One call of attention over a split sequence: its options, and what no kind can do.

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

A ring sees one block of keys at a time and knows their positions and documents, not a mask of all
of them. ``ring`` over groups that exchange heads (``ContextConfig.ulysses``) has the limits of both.

Legend: b batch, s sequence of this rank, n heads of this rank, d head dim.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.topology.degrees import nearest_divisors

Kind = Literal["ring", "gather", "ulysses"]
KernelName = Literal["auto", "reference"]


@dataclass(frozen=True, kw_only=True)
class ContextCall:
    """What one call needs besides its tensors."""

    layout: ContextLayout
    """Places of the queries' sequence."""
    kind: Kind
    """Way in which ranks exchange what they hold."""
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


def refusal(
    kind: Kind,
    *,
    heads: int,
    cp: int,
    ulysses: int | None = None,
    dropout: float = 0.0,
    mask: bool = False,
) -> str | None:
    """Reason why a kind cannot do a call, with the nearest valid choice; None if it can.

    Args:
        kind: the kind.
        heads: query heads of a tp rank.
        cp: ranks over which the sequence is split.
        ulysses: ranks of a ring that exchange heads among themselves.
        dropout: probability of a weight to be zeroed.
        mask: whether there is a mask beside ``causal``, ``window`` and documents.

    >>> print(refusal("ulysses", heads=6, cp=4))
    kind='ulysses', heads of a tp rank=6, cp=4: heads must be divisible by cp; nearest valid: cp=3 or 6, or kind='ring'
    """  # noqa: E501 (the doctest shows the whole sentence)
    if kind == "ring" and dropout:
        return (
            f"kind='ring', attention dropout={dropout}: a ring draws no masks of weights; "
            "nearest valid: kind='gather' or 'ulysses', or no dropout of attention"
        )
    if kind == "ring" and mask:
        return (
            "kind='ring', a mask: a ring sees one block of keys at a time; "
            "nearest valid: kind='gather' or 'ulysses', or documents in place of the mask"
        )
    name, ranks = ("cp", cp) if kind == "ulysses" else ("ulysses", ulysses or 1)
    if kind == "gather" or heads % ranks == 0:
        return None
    valid = " or ".join(str(d) for d in nearest_divisors(heads, ranks))
    other = "kind='ring'" if kind == "ulysses" else "ulysses=None"
    return (
        f"kind={kind!r}, heads of a tp rank={heads}, {name}={ranks}: heads must be divisible by "
        f"{name}; nearest valid: {name}={valid}, or {other}"
    )


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
    problem = refusal(call.kind, heads=q_bsnd.shape[2], cp=context.cp.size)
    if problem:
        raise ConfigError(problem)
    raise NotImplementedError
