"""Which tokens of which sequences a rank routes.

Balance, capacity and counts belong to whole sequences, whatever part of one a rank holds: cp cuts
it and fills it up, sequence parallelism cuts that part over tp, and without it each tp rank takes
some of the rows. `Tokens` says of every row where it lies, so that nothing behind depends on the
layout.

Legend: b sequences, t rows of this rank.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.decisions import kept
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.context_rows import only_layout, own_positions


@dataclass(frozen=True)
class Tokens:
    """Tokens that a rank routes, as rows, and how they lie in whole sequences."""

    sequence_t: Tensor
    """Row of the batch that each token belongs to, ``[t]``."""
    num_sequences: int
    """Rows of the batch."""
    length: int
    """Positions of a whole sequence."""
    position_t: Tensor
    """Position of each token in its whole sequence, ``[t]``."""
    counted_t: Tensor | None = None
    """Whether each token counts, ``[t]`` booleans; all if None. Others (padding, masked ones) go to
    no expert and into no count."""
    axes: tuple[Axis, ...] = ()
    """Axes whose ranks hold other tokens of the same sequences: cp, tp."""
    parts: int = 1
    """Number of cp parts of the sequences, whose gradients are averaged."""
    counted_b: Tensor | None = None
    """Number of tokens of each whole sequence that count, ``[b]`` float64; all if None."""
    everyone: tuple[Axis, ...] = ()
    """Axes whose ranks hold other tokens of the same microbatch: those of the data, cp, tp."""
    readers: int = 1
    """Number of ranks that read different sequences."""
    repeats: bool = False
    """Whether another rank routes the same tokens, and counts them."""

    @cached_property
    def tokens_b(self) -> Tensor:
        """Number of tokens of each whole sequence that count, ``[b]`` float64."""
        if self.counted_b is not None:
            return self.counted_b
        device, size = self.sequence_t.device, (self.num_sequences,)
        return torch.full(size, self.length, dtype=torch.float64, device=device)

    def rows(self, start: int, stop: int) -> "Tokens":
        """Return the tokens of rows ``[start, stop)``, of a tp rank that takes these alone."""
        counted = self.counted_t
        return dataclasses.replace(
            self,
            sequence_t=self.sequence_t[start:stop],
            position_t=self.position_t[start:stop],
            counted_t=None if counted is None else counted[start:stop],
        )


def tokens_of(
    x: Tensor,
    topology: Topology | None = None,
    context: Context | None = None,
    token_mask: Tensor | None = None,
) -> Tokens:
    """Tokens of an activation, one for each row of ``x.reshape(-1, h)``.

    Args:
        x: activation of this cp rank ``[b, s, ..., h]``, under sequence parallelism this tp rank's
            part of it along dim 1. Dims between ``b`` and ``h`` are positions of a sequence;
            ``[n, h]`` is ``n`` sequences of one token.
        topology: layout; None for a process alone.
        context: split of sequences over cp; None where they are whole.
        token_mask: which tokens of the *whole* sequences count, ``[b, s, ...]`` booleans.

    Raises:
        ConfigError: the mask is that of other sequences.
    """
    b, s, *inner = x.shape[:-1] if x.dim() > 2 else (x.shape[0], 1)
    tp = None if topology is None or topology.tp.size == 1 else topology.tp
    split_tp = tp if topology is not None and topology.sequence_parallel else None
    local = s if split_tp is None else s * split_tp.size
    layout = None
    if context is not None:
        # Later calls of the trunk, of other lengths, come before a recomputation of this one.
        whole = kept(lambda: _whole_length(context, local, token_mask))
        layout = None if whole is None else context.layout(local, whole)
    if layout is None or context is None:
        places, length = torch.arange(local, device=x.device), local
    else:
        places, length = own_positions(layout, context.cp.rank, x.device), layout.length
    if split_tp is not None:
        places = places[split_tp.rank * s : (split_tp.rank + 1) * s]
    mask = None if token_mask is None else _whole_mask(token_mask, x, (b, length, *inner))
    width = math.prod(inner)
    axes = [axis for axis in (None if layout is None else topology and topology.cp, tp) if axis]
    return Tokens(
        sequence_t=torch.arange(b, device=x.device).repeat_interleave(s * width),
        num_sequences=b,
        length=length * width,
        position_t=_by_token(places, width).repeat(b),
        counted_t=_counted(places, length, mask, b, width, padded=layout is not None),
        axes=tuple(axes),
        parts=1 if layout is None else layout.cp,
        counted_b=None if mask is None else mask.flatten(1).sum(1, dtype=torch.float64),
        everyone=_everyone(topology, whole=layout is None),
        readers=1 if topology is None else topology.batch.size,
        repeats=layout is None and topology is not None and topology.cp.rank > 0,
    )


def _whole_length(context: Context, local: int, token_mask: Tensor | None) -> int | None:
    """Positions of the sequences of which ranks have ``local``; None where they are joined."""
    if context.is_joined:
        return None
    if token_mask is not None and token_mask.dim() > 1:
        length = token_mask.shape[1]
        if length in context.lengths(local):
            return length
    return only_layout(context, local, "a mixture of experts").length


def _whole_mask(mask: Tensor, x: Tensor, shape: Sequence[int]) -> Tensor:
    """The mask with a shape of two dims or more.

    Raises:
        ConfigError: it has another shape than the whole sequences.
    """
    expected = tuple(shape) if x.dim() > 2 else (x.shape[0],)
    if mask.dtype is not torch.bool or tuple(mask.shape) != expected:
        raise ConfigError(
            f"token_mask of shape {tuple(mask.shape)} and {mask.dtype} for tokens of shape "
            f"{expected}: it must say of each token of the whole sequences whether it counts; "
            f"nearest valid: booleans of shape {expected}"
        )
    return mask.to(x.device).view(tuple(shape))


def _by_token(places: Tensor, width: int) -> Tensor:
    """Positions in a sequence of ``width`` tokens at each place."""
    if width == 1:
        return places
    return (places[:, None] * width + torch.arange(width, device=places.device)).flatten()


def _counted(
    places: Tensor, length: int, mask: Tensor | None, b: int, width: int, *, padded: bool
) -> Tensor | None:
    """Which rows count; None if all do."""
    if mask is None and not padded:
        return None
    real = places < length
    if mask is None:
        return real.repeat_interleave(width).repeat(b)
    own = mask.index_select(1, places.clamp(max=length - 1)).reshape(b, len(places), width)
    return (own & real[:, None]).flatten()


def _everyone(topology: Topology | None, *, whole: bool) -> tuple[Axis, ...]:
    if topology is None:
        return ()
    data = topology.batch if whole else topology.loss
    return tuple(axis for axis in (data, topology.tp) if axis.size > 1)
