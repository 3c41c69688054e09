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
from collections.abc import Sequence

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


def to_sequence(axis: Axis, order: ContextOrder, xs_bsnd: Sequence[Tensor]) -> list[Tensor]:
    """Exchange tensors of this rank's positions for whole ones of its heads; one message.

    Args:
        axis: ranks that exchange.
        order: order of the chunks.
        xs_bsnd: tensors with all heads, whose numbers the size of the axis divides.
    """
    u = axis.size
    parts = [torch.unflatten(x, 2, (u, -1)).movedim(2, 0) for x in xs_bsnd]
    arrived = _all_to_all(axis, parts)
    return [_ascending(x, order) for x in arrived]


def to_heads(axis: Axis, order: ContextOrder, xs_bsnd: Sequence[Tensor]) -> list[Tensor]:
    """Inverse of `to_sequence`."""
    parts = [_by_rank(x, axis.size, order) for x in xs_bsnd]
    return [_joined(x) for x in _all_to_all(axis, parts)]


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


def _all_to_all(axis: Axis, parts: Sequence[Tensor]) -> list[Tensor]:
    """Send ``part[r]`` of every tensor to rank ``r``; what arrives, by sender."""
    rows = [part.numel() // axis.size for part in parts]
    sent = parts[0].new_empty((axis.size, sum(rows)))
    received = torch.empty_like(sent)
    for part, place in zip(parts, torch.split(sent, rows, 1), strict=True):
        _shaped(place, part.shape).copy_(part)
    axis.meter.exchange(
        sent.numel() * sent.element_size() * (axis.size - 1) / axis.size, axis.group
    )
    work = dist.all_to_all_single(received, sent, group=axis.group, async_op=True)
    assert work is not None
    axis.meter.started(work)
    axis.meter.wait(work)
    arrived = torch.split(received, rows, 1)
    return [_shaped(a, part.shape) for a, part in zip(arrived, parts, strict=True)]


def _joined(x_ubsnd: Tensor) -> Tensor:
    """Heads of all ranks side by side, in memory of their own."""
    u, b, s, n, d = x_ubsnd.shape
    y = x_ubsnd.new_empty((b, s, u, n, d))
    return y.copy_(x_ubsnd.movedim(0, 2)).flatten(2, 3)


def _shaped(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Rows ``[u, numel]`` of a wider matrix as ``[u, *shape]``, without a copy."""
    return torch.unflatten(rows, 1, tuple(shape[1:]))


def _ascending(x_ubsnd: Tensor, order: ContextOrder) -> Tensor:
    """Positions of all ranks in ascending order, ``[b, u s, n, d]``."""
    u, b, s, n, d = x_ubsnd.shape
    if order == "contiguous":
        return x_ubsnd.transpose(0, 1).reshape(b, u * s, n, d)
    y = x_ubsnd.new_empty((b, 2 * u, s // 2, n, d))
    halves = torch.unflatten(x_ubsnd, 2, (2, s // 2))
    y[:, :u] = halves[:, :, 0].transpose(0, 1)
    y[:, u:] = halves[:, :, 1].flip(0).transpose(0, 1)
    return y.view(b, u * s, n, d)


def _by_rank(x_bsnd: Tensor, u: int, order: ContextOrder) -> Tensor:
    """Inverse of `_ascending`."""
    b, s, n, d = x_bsnd.shape
    if order == "contiguous":
        return torch.unflatten(x_bsnd, 1, (u, s // u)).transpose(0, 1)
    chunks = torch.unflatten(x_bsnd, 1, (2 * u, -1))
    pairs = torch.stack((chunks[:, :u], chunks[:, u:].flip(1)), 2)  # [b, u, 2, ...]
    return pairs.flatten(2, 3).transpose(0, 1)
