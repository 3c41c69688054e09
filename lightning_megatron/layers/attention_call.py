"""One call of attention: tensors, and all that hides a key from a query or changes its score.

A call has a rule by position (causal, a window), a ``mask`` in the place of that rule, documents,
lengths of the keys and slopes of ALiBi. Kernels that know a rule apply it without a mask. For the
others `dense_mask` makes one mask of all of them: True where a query sees a key, or a number to add
to the score.

Legend: b batch, s query positions, t key positions, n heads, d head dim.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.alibi import alibi_bias
from lightning_megatron.layers.packed_documents import check_documents, numbered


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
    """Number of positions that each one sees, itself included: those before it, and without
    ``causal`` as many behind it; all of them when None."""
    dropout: float = 0.0
    """Probability of a weight to be zeroed."""
    causal: bool = True
    """Whether a position sees itself and those before it only."""
    documents: Tensor | None = None
    """Document of each position, ``[b, s]`` (`layers.packed_documents`)."""
    key_lengths: Tensor | None = None
    """Number of keys that may be seen in each sample, ``[b]``."""
    alibi: Tensor | None = None
    """Slopes ``[n]`` of the heads (`layers.alibi`)."""

    @property
    def narrow(self) -> int | None:
        """Window, if it is shorter than the sequence."""
        window, length = self.window, self.k_btnd.shape[1]
        return window if window is not None and window < length else None

    @property
    def by_rule(self) -> bool:
        """Whether nothing but the causal rule tells what is seen."""
        return (
            self.mask is None
            and self.documents is None
            and self.alibi is None
            and self.key_lengths is None
            and self.narrow is None
        )

    @property
    def is_square(self) -> bool:
        """Whether there are as many queries as keys."""
        return self.q_bsnd.shape[1] == self.k_btnd.shape[1]

    def check(self) -> None:
        """Raise a `ConfigError` if documents do not fit the tensors."""
        if self.documents is None:
            return
        if not self.is_square:
            raise ConfigError(
                f"documents, {self.q_bsnd.shape[1]} queries and {self.k_btnd.shape[1]} keys: "
                "both must be of one sequence; nearest valid: a mask"
            )
        check_documents(self.documents, *self.q_bsnd.shape[:2])


def window_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Mask ``[s, s]`` of ``length`` positions, True within the window before each one."""
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return seen if window is None else seen.triu(1 - window)


def dense_mask(call: AttentionCall) -> Tensor | None:
    """One mask of everything that a call hides or adds; None if it does neither."""
    seen, bias = _seen(call), _bias(call)
    if bias is None or seen is None:
        return seen if bias is None else bias
    return bias.masked_fill(seen.logical_not(), -math.inf)


def _seen(call: AttentionCall) -> Tensor | None:
    """True where a query sees a key, as far as that is not told by adding numbers."""
    parts = [_seen_by_rule(call) if call.mask is None else call.mask]
    if call.documents is not None:
        ids = numbered(call.documents)
        parts.append((ids.unsqueeze(2) == ids.unsqueeze(1)).unsqueeze(1))
    if call.key_lengths is not None:
        keys = torch.arange(call.k_btnd.shape[1], device=call.key_lengths.device)
        parts.append(keys < call.key_lengths.view(-1, 1, 1, 1))
    seen = None
    for part in parts:
        if part is not None and part.dtype == torch.bool:
            seen = part if seen is None else seen & part
    return seen


def _seen_by_rule(call: AttentionCall) -> Tensor | None:
    window = call.narrow
    if not call.causal and window is None:
        return None
    s, t = call.q_bsnd.shape[1], call.k_btnd.shape[1]
    seen = torch.ones(s, t, dtype=torch.bool, device=call.q_bsnd.device)
    ahead = 0 if call.causal or window is None else window - 1
    seen = seen.tril(t - s + ahead)
    return seen if window is None else seen.triu(t - s + 1 - window)


def _bias(call: AttentionCall) -> Tensor | None:
    """Numbers to add to the scores, in the dtype of the queries."""
    q, mask = call.q_bsnd, call.mask
    bias = None if mask is None or mask.dtype == torch.bool else mask
    if call.alibi is not None:
        slopes = alibi_bias(call.alibi, q.shape[1], call.k_btnd.shape[1])
        bias = slopes if bias is None else bias + slopes
    return None if bias is None else bias.to(q.dtype)
