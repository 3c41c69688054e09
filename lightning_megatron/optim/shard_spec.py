"""Specs of sharded parameters: the part that a rank holds, and the ranks that hold the others.

Axes of the layout shard a parameter one after the other: tensor parallelism takes a slice along one
dimension, ZeRO shards that slice along dimension 0 (unevenly, where it does not divide). A
`ShardSpec` lists these axes from the innermost to the outermost, so that gathering along them in
this order makes the parameter whole. An axis whose ranks all hold the same is listed too, with no
dimension: its ranks can share the work.

Optimizers that are more than element-wise need two operations. Both work on many tensors at once,
as latency is what small tensors cost:

* `reduce_sums` completes sums over dimensions that are sharded (norms, row and column means): one
  all-reduce for each axis, of the sums only;
* `optim.owner_all_to_all` gathers whole tensors and scatters the results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.topology.segments import Segments


def rows_of(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Offset and length of a rank's part of ``length`` elements, divided as ``torch.chunk`` does.

    >>> [rows_of(5, 3, rank) for rank in range(3)]
    [(0, 2), (2, 2), (4, 1)]
    """
    each = -(-length // ranks)
    offset = min(rank * each, length)
    return offset, min(each, length - offset)


@dataclass(frozen=True, kw_only=True)
class ShardAxis:
    """Axis of ranks that share a parameter."""

    name: str
    """Name of the axis; axes of several parameters with one name have the same group."""
    group: dist.ProcessGroup
    """Process group of the axis."""
    size: int
    """Number of ranks in the group."""
    rank: int
    """This process's rank in the group."""
    dim: int | None
    """Dimension along which each rank holds a part; None if all hold the same."""

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
        """View of the part that a rank holds of ``outer``."""
        if self.dim is None:
            return outer
        return outer.narrow(self.dim, *self.extent(outer.shape[self.dim], rank))


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Position of this rank's shard in a parameter of the whole model."""

    name: str
    """Canonical name of the parameter."""
    full_shape: tuple[int, ...]
    """Shape in the whole model."""
    axes: tuple[ShardAxis, ...] = ()
    """Axes that share the parameter, from the innermost to the outermost."""
    segments: tuple[int, Segments] | None = None
    """Dimension of which tp divides every segment by itself, and the segments. What is gathered is
    then in rank order (`topology.segments`)."""

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of this rank's shard, then the shape after gathering along each of the axes."""
        shapes = [self.full_shape]
        for axis in reversed(self.axes):
            shapes.append(axis.shape_of(shapes[-1], axis.rank))
        return tuple(reversed(shapes))

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds the whole parameter."""
        return all(axis.dim is None for axis in self.axes)

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return torch.Size(self.full_shape).numel()

    def in_canonical_order(self, gathered: Tensor) -> Tensor:
        """Whole parameter, from what was gathered along the axes."""
        if self.segments is None:
            return gathered
        dim, segments = self.segments
        return segments.in_canonical_order(gathered, dim)

    def in_rank_order(self, whole: Tensor) -> Tensor:
        """Inverse of `in_canonical_order`."""
        if self.segments is None:
            return whole
        dim, segments = self.segments
        return segments.in_rank_order(whole, dim)

    def part_of(self, whole: Tensor) -> Tensor:
        """View of this rank's part of a tensor of the whole parameter's shape, in rank order."""
        for axis in reversed(self.axes):
            whole = axis.part_of(whole, axis.rank)
        return whole

    def own_part(self, held: Tensor) -> Tensor:
        """View of this rank's shard in what is whole, or gathered along some of the axes."""
        shape = tuple(held.shape)
        if shape == self.full_shape:
            return self.part_of(self.in_rank_order(held))
        for axis in reversed(self.axes[: self.shapes.index(shape)]):
            held = axis.part_of(held, axis.rank)
        return held


@runtime_checkable
class ShardAware(Protocol):
    """Optimizer that steps on shards and asks the other ranks where it needs whole tensors."""

    def set_shard_specs(self, specs: Mapping[Tensor, ShardSpec]) -> None:
        """Store the spec of each tensor in the parameter groups; called before the next step."""
        ...


def unsharded(tensor: Tensor, name: str = "") -> ShardSpec:
    """Spec of a tensor that this process holds whole."""
    return ShardSpec(name=name, full_shape=tuple(tensor.shape))


@dataclass(frozen=True, kw_only=True)
class PartialSum:
    """Sum to which each rank contributes a part."""

    value: Tensor
    """Contribution of the local elements, contiguous; `reduce_sums` completes it in place."""
    spec: ShardSpec
    """Spec of the tensor that was summed."""
    dims: tuple[int, ...] | None = None
    """Dimensions that were summed over (not negative); all of them if None."""

    def crosses(self, axis: ShardAxis) -> bool:
        """Whether the ranks of ``axis`` have other parts of the sum."""
        return axis.dim is not None and (self.dims is None or axis.dim in self.dims)


def reduce_sums(sums: Sequence[PartialSum]) -> None:
    """Add up the parts of every sum over the ranks that hold them, in place; collective.

    Every rank of a group passes the same sums in the same order.
    """
    by_axis: dict[tuple[str, torch.dtype], tuple[dist.ProcessGroup, list[Tensor]]] = {}
    for entry in sums:
        for axis in entry.spec.axes:
            if entry.crosses(axis):
                key = axis.name, entry.value.dtype
                by_axis.setdefault(key, (axis.group, []))[1].append(entry.value)
    # In one order on all ranks, whichever parameter comes first on them.
    for _, (group, values) in sorted(by_axis.items(), key=lambda item: str(item[0])):
        flat = torch.cat([value.reshape(-1) for value in values])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [value.numel() for value in values])
        for value, total in zip(values, parts, strict=True):
            value.copy_(total.view(value.shape))
