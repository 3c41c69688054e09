"""Segments of a dimension that are divided each by itself.

The rows of a fused projection ``[q; k; v]`` are three segments. Divided as one, the first of three
ranks would hold q alone. Divided each by itself, every rank holds a piece of each, one after the
other: its heads' q, k and v. Shape and order of the whole stay those of the fused parameter; a
rank's part of it is no longer one rectangle, but one for each segment.

*Canonical order* is that of the whole parameter, *rank order* that of the ranks' parts one after
the other, as a gather returns them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

Piece = tuple[int, int]
"""First index and length of a run of a dimension."""


@dataclass(frozen=True)
class Segments:
    """Segments of a dimension and the number of ranks over which each is divided.

    >>> Segments((8, 4, 4), 2).pieces(1)
    ((4, 4), (10, 2), (14, 2))
    """

    lengths: tuple[int, ...]
    """Length of every segment, each a multiple of ``ranks``."""
    ranks: int
    """Number of ranks."""

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return first index and length of a rank's piece of every segment."""
        found, begin = [], 0
        for length in self.lengths:
            each = length // self.ranks
            found.append((begin + rank * each, each))
            begin += length
        return tuple(found)

    def part_of(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """Return a copy of a rank's part of a tensor in canonical order."""
        return joined(whole, dim, self.pieces(rank))

    def in_rank_order(self, whole: Tensor, dim: int) -> Tensor:
        """Return a tensor in canonical order as the ranks' parts, one after the other."""
        pieces = [piece for rank in range(self.ranks) for piece in self.pieces(rank)]
        return joined(whole, dim, pieces)

    def in_canonical_order(self, whole: Tensor, dim: int) -> Tensor:
        """Return a tensor whose ranks' parts are one after the other in canonical order."""
        each = sum(self.lengths) // self.ranks
        pieces, begin = [], 0
        for length in self.lengths:
            size = length // self.ranks
            pieces += [(rank * each + begin, size) for rank in range(self.ranks)]
            begin += size
        return joined(whole, dim, pieces)


def joined(whole: Tensor, dim: int, pieces: "tuple[Piece, ...] | list[Piece]") -> Tensor:
    """Return a new tensor of some runs of a dimension, one after the other."""
    return torch.cat([whole.narrow(dim, first, length) for first, length in pieces], dim)


def common_pieces(pieces: tuple[Piece, ...], first: int, length: int) -> tuple[Piece, ...]:
    """Return what of ``pieces``, one after the other, lies in a range.

    >>> common_pieces(((4, 4), (10, 2)), 3, 2)
    ((7, 1), (10, 1))
    """
    found, begin, end = [], 0, first + length
    for start, size in pieces:
        low, high = max(first, begin), min(end, begin + size)
        if low < high:
            found.append((start + low - begin, high - low))
        begin += size
    return tuple(found)
