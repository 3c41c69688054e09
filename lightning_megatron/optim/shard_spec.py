"""Which part of a parameter of the whole model a rank holds, and with whom it shares the rest.

A parameter is cut along axes of the layout, one after the other: tensor parallelism takes a slice
along one dimension, ZeRO cuts that slice along dimension 0 (unevenly, where it does not divide).
A `Piece` lists these cuts from the innermost to the outermost, so that undoing them in this order
makes the parameter whole. An axis along which every rank holds the same is listed too, as a cut
along no dimension: its ranks can share the work.

Optimizers that are more than element-wise need two operations, and both exist for many tensors at
once, as latency is what small tensors cost:

* `sum_over_cuts` completes sums over dimensions that are cut (norms, row and column means): one
  all-reduce for each axis, of the sums only;
* `optim.owner_all_to_all` brings whole tensors together and parts of them back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor


def rows_of(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Offset and length of a rank's part of ``length`` elements, as ``torch.chunk`` cuts.

    >>> [rows_of(5, 3, rank) for rank in range(3)]
    [(0, 2), (2, 2), (4, 1)]
    """
    each = -(-length // ranks)
    offset = min(rank * each, length)
    return offset, min(each, length - offset)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the ranks of one axis share a parameter."""

    axis: str
    """Its name; cuts of several parameters along one axis have the same group."""
    group: dist.ProcessGroup
    """The ranks of the axis."""
    size: int
    """How many they are."""
    rank: int
    """Which of them this is."""
    dim: int | None
    """Dimension along which each holds a part; None if all hold the same."""

    def extent(self, length: int, rank: int) -> tuple[int, int]:
        """Offset and length of a rank's part of ``length`` elements."""
        return rows_of(length, self.size, rank)

    def shape_of(self, outer: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of the part that a rank holds of a tensor of shape ``outer``."""
        shape = list(outer)
        if self.dim is not None:
            shape[self.dim] = self.extent(shape[self.dim], rank)[1]
        return tuple(shape)

    def part_of(self, outer: Tensor, rank: int) -> Tensor:
        """A view of the part that a rank holds."""
        if self.dim is None:
            return outer
        return outer.narrow(self.dim, *self.extent(outer.shape[self.dim], rank))


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a parameter."""

    name: str
    """Canonical name of the parameter."""
    full_shape: tuple[int, ...]
    """Shape in the whole model."""
    cuts: tuple[Cut, ...] = ()
    """From the innermost to the outermost."""

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of this rank's piece, and of what it is part of after undoing each of the cuts."""
        shapes = [self.full_shape]
        for cut in reversed(self.cuts):
            shapes.append(cut.shape_of(shapes[-1], cut.rank))
        return tuple(reversed(shapes))

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds all of it."""
        return all(cut.dim is None for cut in self.cuts)

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return torch.Size(self.full_shape).numel()

    def part_of(self, whole: Tensor) -> Tensor:
        """A view of this rank's part of the whole parameter, or of a tensor of its shape."""
        for cut in reversed(self.cuts):
            whole = cut.part_of(whole, cut.rank)
        return whole


@runtime_checkable
class KnowsPieces(Protocol):
    """An optimizer that steps on pieces and asks the other ranks where it needs the whole."""

    def use_pieces(self, pieces: Mapping[Tensor, Piece]) -> None:
        """Learn what the tensors in the parameter groups are parts of; before the next step."""
        ...


def whole_piece(tensor: Tensor, name: str = "") -> Piece:
    """The piece of a process that holds everything."""
    return Piece(name=name, full_shape=tuple(tensor.shape))


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A sum of which this rank has a part."""

    value: Tensor
    """What the local elements contribute; is completed in place. Contiguous."""
    piece: Piece
    """Of the tensor that was summed."""
    dims: tuple[int, ...] | None = None
    """The dimensions that were summed over (not negative); all of them if None."""

    def crosses(self, cut: Cut) -> bool:
        """Whether the ranks of ``cut`` have other parts of the sum."""
        return cut.dim is not None and (self.dims is None or cut.dim in self.dims)


def sum_over_cuts(sums: Sequence[Sum]) -> None:
    """Add up the parts of every sum over the ranks that hold them, in place; collective.

    Every rank of a group gives the same sums in the same order.
    """
    axes: dict[tuple[str, torch.dtype], tuple[dist.ProcessGroup, list[Tensor]]] = {}
    for entry in sums:
        for cut in entry.piece.cuts:
            if entry.crosses(cut):
                key = cut.axis, entry.value.dtype
                axes.setdefault(key, (cut.group, []))[1].append(entry.value)
    # In one order on all ranks, whichever parameter comes first on them.
    for _, (group, values) in sorted(axes.items(), key=lambda item: str(item[0])):
        flat = torch.cat([value.reshape(-1) for value in values])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [value.numel() for value in values])
        for value, total in zip(values, parts, strict=True):
            value.copy_(total.view(value.shape))
