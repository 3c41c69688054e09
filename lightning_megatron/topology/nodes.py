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
  ``n L (N-1)/N`` for a reduce-scatter, more than a ring if ``L > 1``.

Everything here is arithmetic.
"""

from collections.abc import Sequence


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
