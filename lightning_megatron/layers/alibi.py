"""Attention with linear biases (ALiBi; Press et al., arXiv 2108.12409).

There is no position embedding. Each head lowers the score of a query at ``i`` and a key at ``j`` by
``slope * |i - j|``, and each has its own slope: ``2^(-8 (i + 1) / n)`` for head ``i`` of ``n``,
where ``n`` is a power of two. For another number the paper's code takes the slopes of the largest
power of two ``c`` below it, and for the rest every second slope of ``2 c`` heads. A tp rank has the
slopes of its own heads.

Legend: n heads, s query positions, t key positions.
"""

import torch
from torch import Tensor


class Alibi:
    """Choice of linear biases in the place of a `Rotary` of an attention layer."""


def alibi_slopes(
    num_heads: int,
    first: int = 0,
    count: int | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Slopes ``[count]`` of some of ``num_heads`` heads.

    Args:
        num_heads: number of all heads.
        first: first head.
        count: number of heads; all from ``first`` on when None.
        dtype: number format of the slopes.
        device: device of the slopes.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    last = num_heads if count is None else first + count
    power = 1 << (num_heads.bit_length() - 1)
    head = torch.arange(first, last, device=device)
    exponent = torch.where(head < power, 8 * (head + 1), 4 * (2 * (head - power) + 1))
    return torch.exp2(-exponent.to(dtype) / power)


def alibi_bias(slopes: Tensor, s: int, t: int) -> Tensor:
    """Addend of the scores, ``[1, n, s, t]``; the last query is where the last key is."""
    query = torch.arange(t - s, t, device=slopes.device)
    key = torch.arange(t, device=slopes.device)
    distance = (query.unsqueeze(1) - key).abs().to(slopes.dtype)
    return (-slopes.view(-1, 1, 1) * distance).unsqueeze(0)
