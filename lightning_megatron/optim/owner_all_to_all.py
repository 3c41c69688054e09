"""All-to-all that gathers each sharded matrix on one of its ranks and scatters the result.

An operation on whole matrices (Muon's orthogonalisation) can be done on every rank, after each has
gathered everything, or once, on one rank per matrix. With ``n`` ranks that share matrices of ``P``
elements altogether, per step and rank:

================  =======================  ==========
who computes      elements sent            operations
================  =======================  ==========
every rank        ``P (n - 1) / n``        all
one for each      ``2 P (n - 1) / n**2``   1 / n
================  =======================  ==========

So one owner for each matrix is cheaper in both. (Ranks with copies, over tp or `dp_replicate`, send
nothing on the way there, and ``P (n - 1) / n`` on the way back; in return they share the work.
With bfloat16 on the wire that is 2 bytes an element, against the 30 ``m`` operations an element
that five iterations on ``m`` rows cost, or 15 ``m`` if the matrix is wide: from ``m = 100`` or so
the work outweighs the bytes on any network.)

The exchange goes along one axis after the other, innermost first: along each, one all-to-all brings
all matrices to their owners' coordinates on that axis, where they are concatenated. The way back is
the same in reverse. Owners are chosen by the number of operations, largest matrix first, each for
the rank with the least work; all ranks choose the same owners, as all see the same shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.optim.shard_spec import ShardAxis, ShardSpec


def choose_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Choose a rank for every task, so that the largest load is small.

    >>> choose_owners([5, 1, 4, 1], 2)
    [0, 1, 1, 0]
    """
    load = [0.0] * ranks
    owners = [0] * len(costs)
    for task in sorted(range(len(costs)), key=lambda task: (-costs[task], task)):
        owner = load.index(min(load))
        owners[task] = owner
        load[owner] += costs[task]
    return owners


@dataclass(frozen=True)
class _Hop:
    """Axis on the way to the owners."""

    name: str
    group: dist.ProcessGroup
    size: int
    rank: int


class OwnerAllToAll:
    """Exchange that brings matrices to their owners and results back.

    Args:
        specs: shard specs of the matrices, in the same order on all ranks that share them.
        costs: cost of the operation on each matrix.
    """

    def __init__(self, specs: Sequence[ShardSpec], costs: Sequence[float]) -> None:
        self._specs = specs
        self._empty = torch.empty(0)
        hops: dict[str, _Hop] = {}
        for spec in specs:
            for axis in spec.axes:
                hops.setdefault(axis.name, _Hop(axis.name, axis.group, axis.size, axis.rank))
        # Inner axes first, in one order on all ranks: each list of axes is in that order.
        self._hops = sorted(hops.values(), key=lambda hop: _ORDER.get(hop.name, -1))
        owners = choose_owners(costs, prod(hop.size for hop in self._hops))
        self._owner_on: list[dict[str, int]] = []
        for owner in owners:
            place = {}
            for hop in self._hops:
                owner, place[hop.name] = divmod(owner, hop.size)
            self._owner_on.append(place)

    def gather_on_owners(self, shards: Sequence[Tensor]) -> dict[int, Tensor]:
        """Gather the matrices that this rank owns, keyed by position; collective."""
        held = dict(enumerate(shards))
        if not held:  # a stack of which this rank has no matrix, like the ranks that it shares with
            return {}
        self._empty = shards[0].new_empty(0)
        for level, hop in enumerate(self._hops):
            held = self._gather(held, hop, level)
        return held

    def scatter_from_owners(self, results: dict[int, Tensor]) -> list[Tensor]:
        """Return this rank's shard of every result, sharded like its matrix; collective."""
        held = results
        for level, hop in reversed(list(enumerate(self._hops))):
            held = self._scatter(held, hop, level)
        return [held[index] for index in range(len(self._specs))]

    def _present(self, level: int) -> list[int]:
        """Positions of the matrices that this rank holds after the first ``level`` axes."""
        done = self._hops[:level]
        return [
            index
            for index, owner in enumerate(self._owner_on)
            if all(owner[hop.name] == hop.rank for hop in done)
        ]

    def _gather(self, held: dict[int, Tensor], hop: _Hop, level: int) -> dict[int, Tensor]:
        axes = {index: self._axis(index, hop) for index in held}
        outgoing: list[list[Tensor]] = [[] for _ in range(hop.size)]
        for index, tensor in held.items():
            if axes[index].dim is not None:
                outgoing[self._owner_on[index][hop.name]].append(tensor)
        mine = self._present(level + 1)
        shapes = [
            [axes[i].shape_of(self._outer(i, hop), rank) for i in mine if axes[i].dim is not None]
            for rank in range(hop.size)
        ]
        received = _all_to_all(outgoing, shapes, hop.group, self._empty)
        arrived = [iter(tensors) for tensors in received]
        return {
            index: held[index]
            if (dim := axes[index].dim) is None
            else torch.cat([next(tensors) for tensors in arrived], dim)
            for index in mine
        }

    def _scatter(self, held: dict[int, Tensor], hop: _Hop, level: int) -> dict[int, Tensor]:
        present = self._present(level)
        outgoing = [
            [self._axis(index, hop).part_of(held[index], rank) for index in sorted(held)]
            for rank in range(hop.size)
        ]
        from_rank = [
            [index for index in present if self._owner_on[index][hop.name] == rank]
            for rank in range(hop.size)
        ]
        shapes = [
            [self._axis(i, hop).shape_of(self._outer(i, hop), hop.rank) for i in members]
            for members in from_rank
        ]
        arrived = _all_to_all(outgoing, shapes, hop.group, self._empty)
        return {
            index: tensor
            for members, tensors in zip(from_rank, arrived, strict=True)
            for index, tensor in zip(members, tensors, strict=True)
        }

    def _axis(self, index: int, hop: _Hop) -> ShardAxis:
        """Axis of a matrix's spec that a hop goes along."""
        for axis in self._specs[index].axes:
            if axis.name == hop.name:
                return axis
        raise AssertionError(f"{self._specs[index].name} is not spread over {hop.name}")

    def _outer(self, index: int, hop: _Hop) -> tuple[int, ...]:
        """Shape that the ranks of an axis hold together."""
        spec = self._specs[index]
        position = [axis.name for axis in spec.axes].index(hop.name)
        return spec.shapes[position + 1]


_ORDER = {"fsdp": 0, "efsdp": 0, "tp": 1, "ep": 1, "dp_replicate": 2, "expert_copies": 2}


def gather_whole(tensors: Sequence[Tensor], specs: Sequence[ShardSpec]) -> list[Tensor]:
    """Gather every tensor whole on every rank; collective.

    Args:
        tensors: this rank's shards, all of one dtype.
        specs: their shard specs.
    """
    held = list(tensors)
    axes = {a.name: a for spec in specs for a in spec.axes if a.dim is not None}
    for name in sorted(axes, key=lambda name: _ORDER.get(name, -1)):
        where = [
            (index, axis, spec.shapes[position + 1])
            for index, spec in enumerate(specs)
            for position, axis in enumerate(spec.axes)
            if axis.name == name and axis.dim is not None
        ]
        axis = axes[name]
        outgoing = [[held[index] for index, _, _ in where] for _ in range(axis.size)]
        shapes = [[a.shape_of(outer, rank) for _, a, outer in where] for rank in range(axis.size)]
        arrived = _all_to_all(outgoing, shapes, axis.group, held[where[0][0]])
        for (index, own, _), parts in zip(where, zip(*arrived, strict=True), strict=True):
            assert own.dim is not None
            held[index] = torch.cat(parts, own.dim)
    return held


def _all_to_all(
    outgoing: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    group: dist.ProcessGroup,
    example: Tensor,
) -> list[list[Tensor]]:
    """Send each rank its tensors, and receive from each those of the given ``shapes``."""
    sizes = [[prod(shape) for shape in members] for members in shapes]
    flat = [t.detach().reshape(-1) for members in outgoing for t in members]
    sent = torch.cat(flat) if flat else example.new_empty(0)
    received = sent.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        received,
        sent,
        [sum(members) for members in sizes],
        [sum(t.numel() for t in members) for members in outgoing],
        group=group,
    )
    by_rank = torch.split(received, [sum(members) for members in sizes])
    return [
        [part.view(shape) for part, shape in zip(torch.split(chunk, own), members, strict=True)]
        for chunk, own, members in zip(by_rank, sizes, shapes, strict=True)
    ]
