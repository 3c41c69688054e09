"""Whole matrices from pieces, each on one of the ranks that share it, and the results back.

An operation on whole matrices (Muon's orthogonalisation) can be done on every rank, after each has
gathered everything, or once, on one rank per matrix. With ``n`` ranks that share matrices of ``P``
elements altogether, per step and rank:

================  =======================  ==========
who computes      elements sent            operations
================  =======================  ==========
every rank        ``P (n - 1) / n``        all
one for each      ``2 P (n - 1) / n**2``   1 / n
================  =======================  ==========

So handing matrices out is cheaper in both. (Ranks that hold the same, over tp or `dp_replicate`,
send nothing on the way there, and ``P (n - 1) / n`` on the way back; in return they share the work.
With bfloat16 on the wire that is 2 bytes an element, against the 30 ``m`` operations an element
that five iterations on ``m`` rows cost, or 15 ``m`` if the matrix is wide: from ``m = 100`` or so
the work outweighs the bytes on any network.)

The way leads over one axis after the other, innermost first: along each, every matrix goes to the
owner's coordinate on that axis, in one all-to-all for all matrices, and is put together there. The
way back is the same in reverse. Owners are chosen by the operations, largest matrix first, each to
the rank with the least to do; that is the same on every rank, as all see the same shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.optim.shard_spec import Cut, Piece


def choose_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """A rank for every task, so that the largest load is small.

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
    """One axis on the way to the owners."""

    name: str
    group: dist.ProcessGroup
    size: int
    rank: int


class Exchange:
    """The way of matrices to their owners and back.

    Args:
        pieces: of the matrices, in the same order on all ranks that share them.
        costs: of the operation on each.
    """

    def __init__(self, pieces: Sequence[Piece], costs: Sequence[float]) -> None:
        self._pieces = pieces
        self._empty = torch.empty(0)
        hops: dict[str, _Hop] = {}
        for piece in pieces:
            for cut in piece.cuts:
                hops.setdefault(cut.axis, _Hop(cut.axis, cut.group, cut.size, cut.rank))
        # Inner axes first, in one order on all ranks: each list of cuts is in that order.
        self._hops = sorted(hops.values(), key=lambda hop: _ORDER.get(hop.name, -1))
        owners = choose_owners(costs, prod(hop.size for hop in self._hops))
        self._owner_on: list[dict[str, int]] = []
        for owner in owners:
            place = {}
            for hop in self._hops:
                owner, place[hop.name] = divmod(owner, hop.size)
            self._owner_on.append(place)

    def to_owners(self, pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """Whole matrices of which this rank is the owner, by position; collective."""
        held = dict(enumerate(pieces))
        self._empty = pieces[0].new_empty(0)
        for level, hop in enumerate(self._hops):
            held = self._gather(held, hop, level)
        return held

    def from_owners(self, results: dict[int, Tensor]) -> list[Tensor]:
        """This rank's part of every result, each like its matrix; collective."""
        held = results
        for level, hop in reversed(list(enumerate(self._hops))):
            held = self._spread(held, hop, level)
        return [held[index] for index in range(len(self._pieces))]

    def _present(self, level: int) -> list[int]:
        """Matrices that have come to this rank's coordinates on the first ``level`` axes."""
        done = self._hops[:level]
        return [
            index
            for index, owner in enumerate(self._owner_on)
            if all(owner[hop.name] == hop.rank for hop in done)
        ]

    def _gather(self, held: dict[int, Tensor], hop: _Hop, level: int) -> dict[int, Tensor]:
        cuts = {index: self._cut(index, hop) for index in held}
        outgoing: list[list[Tensor]] = [[] for _ in range(hop.size)]
        for index, tensor in held.items():
            if cuts[index].dim is not None:
                outgoing[self._owner_on[index][hop.name]].append(tensor)
        mine = self._present(level + 1)
        shapes = [
            [cuts[i].shape_of(self._outer(i, hop), rank) for i in mine if cuts[i].dim is not None]
            for rank in range(hop.size)
        ]
        received = _all_to_all(outgoing, shapes, hop.group, self._empty)
        arrived = [iter(tensors) for tensors in received]
        return {
            index: held[index]
            if (dim := cuts[index].dim) is None
            else torch.cat([next(tensors) for tensors in arrived], dim)
            for index in mine
        }

    def _spread(self, held: dict[int, Tensor], hop: _Hop, level: int) -> dict[int, Tensor]:
        present = self._present(level)
        outgoing = [
            [self._cut(index, hop).part_of(held[index], rank) for index in sorted(held)]
            for rank in range(hop.size)
        ]
        from_rank = [
            [index for index in present if self._owner_on[index][hop.name] == rank]
            for rank in range(hop.size)
        ]
        shapes = [
            [self._cut(i, hop).shape_of(self._outer(i, hop), hop.rank) for i in members]
            for members in from_rank
        ]
        arrived = _all_to_all(outgoing, shapes, hop.group, self._empty)
        return {
            index: tensor
            for members, tensors in zip(from_rank, arrived, strict=True)
            for index, tensor in zip(members, tensors, strict=True)
        }

    def _cut(self, index: int, hop: _Hop) -> Cut:
        """How a matrix is cut along an axis; an axis that it does not know has copies of it."""
        for cut in self._pieces[index].cuts:
            if cut.axis == hop.name:
                return cut
        raise AssertionError(f"{self._pieces[index].name} is not spread over {hop.name}")

    def _outer(self, index: int, hop: _Hop) -> tuple[int, ...]:
        """Shape of what the ranks of an axis hold together."""
        piece = self._pieces[index]
        position = [cut.axis for cut in piece.cuts].index(hop.name)
        return piece.shapes[position + 1]


_ORDER = {"dp_shard": 0, "tp": 1, "dp_replicate": 2}


def gather_whole(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> list[Tensor]:
    """Every tensor whole, on every rank; collective.

    Args:
        tensors: this rank's pieces, all of one dtype.
        pieces: what they are pieces of.
    """
    held = list(tensors)
    axes = {cut.axis: cut for piece in pieces for cut in piece.cuts if cut.dim is not None}
    for axis in sorted(axes, key=lambda name: _ORDER.get(name, -1)):
        where = [
            (index, cut, piece.shapes[position + 1])
            for index, piece in enumerate(pieces)
            for position, cut in enumerate(piece.cuts)
            if cut.axis == axis and cut.dim is not None
        ]
        cut = axes[axis]
        outgoing = [[held[index] for index, _, _ in where] for _ in range(cut.size)]
        shapes = [[c.shape_of(outer, rank) for _, c, outer in where] for rank in range(cut.size)]
        arrived = _all_to_all(outgoing, shapes, cut.group, held[where[0][0]])
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
