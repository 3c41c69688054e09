"""Sum of the outputs of products, weighed by their log-sum-exps.

Of two products with outputs ``a``, ``b`` and log-sum-exps ``l``, ``m``, the attention to the keys
of both is ``a + sigmoid(m - l) (b - a)``, with the log-sum-exp ``logaddexp(l, m)``: neither can
overflow. Sums of bfloat16 outputs are taken in float32. A row that sees no key of a product has the
log-sum-exp minus infinity there; one that sees none at all has the output 0.

Legend: b batch, s queries, n heads, d head dim.
"""

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Format of sums of tensors of a format."""
    return torch.promote_types(dtype, torch.float32)


class PartialSums:
    """Output ``[b, s, n, d]`` of the products so far, and its log-sum-exp ``[b, n, s]``.

    Args:
        like: queries ``[b, s, n, d]``.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: tuple[int, int], out: Tensor, lse: Tensor, empty: Tensor | None) -> None:
        """Add a product.

        Args:
            rows: rows that it has.
            out: its output ``[b, s, n, d]``; used up.
            lse: its log-sum-exp ``[b, n, s]``; used up.
            empty: rows ``[b | 1, n | 1, s]`` that see nothing of it.
        """
        if empty is not None:
            lse = lse.masked_fill(empty, -torch.inf)
            out = out.masked_fill(empty.transpose(1, 2).unsqueeze(-1), 0.0)
        b, s, n, _ = self._like.shape
        if self._out is None or self._lse is None:
            if rows == (0, s):
                self._out, self._lse = out, lse
                return
            self._out = self._like.new_zeros(self._like.shape, dtype=wide(out.dtype))
            self._lse = lse.new_full((b, s, n), -torch.inf).transpose(1, 2)
        self._out = self._out.to(wide(out.dtype))
        start, length = rows[0], rows[1] - rows[0]
        own, own_lse = self._out.narrow(1, start, length), self._lse.narrow(2, start, length)
        weight = torch.sigmoid(lse - own_lse).nan_to_num_(0.0)
        own.lerp_(out.to(own.dtype), weight.transpose(1, 2).unsqueeze(-1).to(own.dtype))
        own_lse.copy_(torch.logaddexp(own_lse, lse))

    def result(self) -> tuple[Tensor, Tensor]:
        """Output in the format of the queries, and its log-sum-exp, 0 for rows without keys."""
        b, s, n, _ = self._like.shape
        if self._out is None or self._lse is None:
            none = self._like.new_zeros((b, s, n), dtype=wide(self._like.dtype))
            return torch.zeros_like(self._like), none.transpose(1, 2)
        lse = self._lse.masked_fill(self._lse == -torch.inf, 0.0)
        return self._out.to(self._like.dtype), lse


class GradientSum:
    """Sum of gradients of places of a rank, ``[b, s, n, d]``.

    Args:
        like: what it is the gradient of.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def add(self, places: tuple[int, int], part: Tensor) -> None:
        """Add the gradient of some places; used up."""
        if self._sum is None:
            if places == (0, self._like.shape[1]):
                self._sum = part
                return
            self._sum = self._like.new_zeros(self._like.shape, dtype=wide(part.dtype))
        self._sum = self._sum.to(wide(part.dtype))
        self._sum.narrow(1, places[0], places[1] - places[0]).add_(part)

    def result(self) -> Tensor:
        """The sum, in the format of what it is the gradient of."""
        if self._sum is None:
            return torch.zeros_like(self._like)
        return self._sum.to(self._like.dtype)
