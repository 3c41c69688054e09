"""Nodes of the ranks, and the share of their traffic that goes from one node to another.

Bytes between nodes go over a network that is ten to a hundred times slower than what joins the
ranks of one node, so they are counted apart (`topology.meter`), and sent once where possible. How
much of what a rank sends leaves its node depends on the way that a collective takes:

* a *ring* sends everything to the next rank of the group, so all of it or nothing leaves the node.
  Where the ranks of a group follow each other node by node, one rank of each node sends to another
  node: with ``p`` ranks, of a tensor of ``n`` bytes, each node sends ``n (p-1)/p`` for a gather or
  a reduce-scatter, and twice that for an all-reduce;
* an *exchange* sends each other rank a part of its own: of ``L`` ranks on each of ``N`` nodes a
  rank sends ``(N L - L) / (N L - 1)`` of its bytes to other nodes. Each node sends
  ``n L (N-1)/N`` for a reduce-scatter, more than a ring if ``L > 1``;
* a *broadcast* from each rank, as gloo does it, follows a tree: each rank sends as much as in an
  exchange, but trees that know nothing of nodes go to and fro between them: 5 of the 6 messages
  that the ranks of each of two nodes of two send leave it;
* an exchange in *two levels* (`TwoLevels`) goes inside the nodes first, and then between ranks of
  the same place on their nodes: each node sends ``n (N-1)/N``, the least that is possible. The sum
  of a node leaves it once, whatever the number of its ranks.

Everything here is arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TwoLevels:
    """Ranks of a group that form a rectangle of nodes and places on a node."""

    inside: tuple[tuple[int, ...], ...]
    """Ranks of each node, in group order; equally many on each."""
    across: tuple[tuple[int, ...], ...]
    """Ranks of each place, one of every node."""


class Nodes:
    """Nodes of a run.

    Args:
        names: unique name of the node of each global rank.
    """

    def __init__(self, names: Sequence[str]) -> None:
        numbers: dict[str, int] = {}
        self._of = tuple(numbers.setdefault(name, len(numbers)) for name in names)
        self.count = len(numbers)

    def __getitem__(self, rank: int) -> int:
        """Number of a rank's node, in the order of their lowest ranks."""
        return self._of[rank]

    def share(self, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` are on one node."""
        return len({self._of[rank] for rank in ranks}) == 1

    def by_ring(self, ranks: Sequence[int], rank: int) -> float:
        """Share of what ``rank`` sends around a ring of ``ranks`` that leaves its node.

        >>> nodes = Nodes(["a", "a", "b", "b"])
        >>> [nodes.by_ring(range(4), rank) for rank in range(4)]
        [0.0, 1.0, 0.0, 1.0]
        """
        following = ranks[(list(ranks).index(rank) + 1) % len(ranks)]
        return float(self._of[following] != self._of[rank])

    def by_exchange(self, ranks: Sequence[int], rank: int) -> float:
        """Share of what ``rank`` sends in equal parts to the others of ``ranks``.

        >>> Nodes(["a", "a", "b", "b"]).by_exchange(range(4), 0) * 3
        2.0
        """
        others = [other for other in ranks if other != rank]
        return sum(self._of[other] != self._of[rank] for other in others) / max(len(others), 1)

    def by_broadcasts(self, ranks: Sequence[int], rank: int) -> float:
        """Share of what ``rank`` sends where each of ``ranks`` broadcasts as much by gloo's tree.

        >>> nodes = Nodes(["a", "a", "b", "b"])
        >>> [nodes.by_broadcasts(range(4), rank) * 3 for rank in range(4)]
        [2.0, 3.0, 2.0, 3.0]
        """
        size, mine, crossing = len(ranks), list(ranks).index(rank), 0
        for root in range(size):
            step, place = 1, (mine - root) % size
            while step < size:
                if place < step and place + step < size:
                    other = ranks[(mine + step) % size]
                    crossing += self._of[other] != self._of[rank]
                step *= 2
        return crossing / max(size - 1, 1)

    def two_levels(self, ranks: Sequence[int]) -> TwoLevels | None:
        """Levels of a group.

        None where a level would be empty, where the nodes hold unequally many, and where the ranks
        of a place do not follow each other as the nodes do, as process groups number by rank.

        Args:
            ranks: global ranks in ascending order.

        >>> Nodes(["a", "a", "b", "b"]).two_levels((0, 1, 2, 3))
        TwoLevels(inside=((0, 1), (2, 3)), across=((0, 2), (1, 3)))
        """
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self._of[rank], []).append(rank)
        inside = tuple(map(tuple, by_node.values()))
        sizes = {len(members) for members in inside}
        if len(inside) == 1 or len(sizes) > 1 or sizes == {1}:
            return None
        across = tuple(zip(*inside, strict=True))
        if any(list(members) != sorted(members) for members in across):
            return None
        return TwoLevels(inside, across)
