"""Part of the sequence and all heads, exchanged for the whole sequence and part of the heads.

One all-to-all brings each of ``u`` ranks the queries, keys and values of ``1/u`` of the heads over
the positions of all, and another one brings the outputs back (Jacobs et al., DeepSpeed-Ulysses,
arXiv 2309.14509). Where the number ``K`` of key-value heads is not divisible by ``u`` they are
repeated up to ``K'``, the least common multiple of both, and the gradients of copies are added up.

With the letters of `ring` and ``H`` query heads, a rank sends ``2 b n d e (H + K') (u - 1) / u``
bytes forward, and as many backward: what was exchanged is kept for it.

In zig-zag order rank ``r`` holds chunks ``r`` and ``2p - 1 - r``. Those of neighbouring ranks make
one ascending run of low chunks and one of high ones, so that after the exchange ``u`` ranks are to
a ring as a single rank with larger chunks would be.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context_layout import ContextLayout, ContextOrder


def layout_of_group(layout: ContextLayout, ulysses: int) -> ContextLayout:
    """Places of a sequence over groups of ``ulysses`` ranks, each of which holds the sum."""
    groups = layout.cp // ulysses
    return ContextLayout(layout.length, groups, layout.order, layout.tp * ulysses)


def exchanged_heads(kv_heads: int, ulysses: int) -> int:
    """Key-value heads that are exchanged: ``kv_heads``, repeated until ``ulysses`` divides them."""
    return math.lcm(kv_heads, ulysses)


def to_sequence(
    axis: Axis, order: ContextOrder, xs_bsnd: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Exchange tensors of this rank's positions for whole ones of its heads; one message.

    Args:
        axis: ranks that exchange.
        order: order of the chunks.
        xs_bsnd: tensors with all heads, whose numbers the size of the axis divides.

    Returns:
        The memory of all tensors, and the tensors.
    """
    u, like = axis.size, xs_bsnd[0]
    parts = [torch.unflatten(x, 2, (u, -1)).movedim(2, 0) for x in xs_bsnd]
    flat = like.new_empty(sum(x.numel() for x in xs_bsnd))
    shapes = [(x.shape[0], x.shape[1] * u, x.shape[2] // u, x.shape[3]) for x in xs_bsnd]
    numels = [x.numel() for x in xs_bsnd]
    whole = [y.view(shape) for y, shape in zip(torch.split(flat, numels), shapes, strict=True)]
    messages = _Messages(axis, like, [part.shape for part in parts])
    for place, part in zip(messages.sent, parts, strict=True):
        place.copy_(part)
    messages.exchange()
    for y, arrived in zip(whole, messages.received, strict=True):
        for own, theirs in _chunks(y, arrived, order):
            own.copy_(theirs)
    return flat, whole


def to_heads(axis: Axis, order: ContextOrder, xs_bsnd: Sequence[Tensor]) -> list[Tensor]:
    """Inverse of `to_sequence`; results have memory of their own."""
    u, like = axis.size, xs_bsnd[0]
    shapes = [(u, x.shape[0], x.shape[1] // u, *x.shape[2:]) for x in xs_bsnd]
    results = []
    messages = _Messages(axis, like, shapes)
    for x, place in zip(xs_bsnd, messages.sent, strict=True):
        for own, theirs in _chunks(x, place, order):
            theirs.copy_(own)
    messages.exchange()
    for arrived in messages.received:
        _, b, s, n, d = arrived.shape
        y = arrived.new_empty((b, s, u, n, d))
        results.append(y.copy_(arrived.movedim(0, 2)).flatten(2, 3))
    return results


def repeated(x_bsnd: Tensor, heads: int) -> Tensor:
    """Keys or values with more heads."""
    times = heads // x_bsnd.shape[2]
    return x_bsnd if times == 1 else x_bsnd.repeat_interleave(times, 2)


def summed(gradient: Tensor, heads: int) -> Tensor:
    """Gradient of the heads that `repeated` repeated, added up in float32 at least."""
    if gradient.shape[2] == heads:
        return gradient
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return torch.unflatten(gradient, 2, (heads, -1)).sum(3, dtype=wide).to(gradient.dtype)


class _Messages:
    """Memory of an all-to-all, by tensor and rank, and the exchange.

    Args:
        axis: ranks that exchange.
        like: tensor of the same format and device.
        shapes: shapes of the tensors, ``[u, ...]``: one part for each rank.
    """

    def __init__(self, axis: Axis, like: Tensor, shapes: Sequence[Sequence[int]]) -> None:
        self._axis = axis
        rows = [math.prod(shape[1:]) for shape in shapes]
        size = axis.size * sum(rows)
        self._memory = [like.new_empty(size) for _ in range(2)]
        self.sent, self.received = (
            [
                torch.unflatten(part, 1, tuple(shape[1:]))
                for part, shape in zip(
                    torch.split(memory.view(axis.size, -1), rows, 1), shapes, strict=True
                )
            ]
            for memory in self._memory
        )

    def exchange(self) -> None:
        """Send part ``r`` of all tensors to rank ``r``, and wait for what others send."""
        sent, received = self._memory
        axis = self._axis
        share = sent.numel() * sent.element_size() * (axis.size - 1) / axis.size
        axis.meter.exchange(share, axis.group)
        work = dist.all_to_all_single(received, sent, group=axis.group, async_op=True)
        assert work is not None
        axis.meter.started(work)
        axis.meter.wait(work)


def _chunks(
    whole_bsnd: Tensor, by_rank_ubsnd: Tensor, order: ContextOrder
) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of a sequence in ascending order, each beside itself where the ranks hold it."""
    u, _, s, _, _ = by_rank_ubsnd.shape
    c = s // 2
    for rank in range(u):
        numbers = (rank, 2 * u - 1 - rank) if order == "zigzag" else (2 * rank, 2 * rank + 1)
        for half, number in enumerate(numbers):
            own = whole_bsnd.narrow(1, number * c, c)
            yield own, by_rank_ubsnd[rank].narrow(1, half * c, c)
