"""Nodes: the ranks that share a directory of a machine, and the ranks that keep copies.

Ranks belong to one *node* if they see the same directories: the kernel and its numbers for the
directories are equal. That holds however processes, containers and ranks are placed. Nodes are
numbered by their lowest ranks and form a ring. A restart may number ranks and nodes differently, so
nothing that is stored depends on these numbers.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from lightning_megatron.comm.peers import Peers


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run.

    >>> nodes = Nodes((0, 0, 1, 1, 2))
    >>> nodes.count, nodes.ranks(1), nodes.keepers(1, 1), nodes.keepers(3, 2)
    (3, [2, 3], [3], [4, 1])
    """

    of_rank: tuple[int, ...]
    """Node of each rank."""

    @classmethod
    def found(cls, mine: Hashable, peers: Peers) -> "Nodes":
        """Return the nodes of all ranks; collective.

        Args:
            mine: a value that is equal for the ranks of a node, and for no others.
            peers: all ranks.
        """
        return peers.run("finding out who shares a machine", lambda: mine, _numbered)

    @property
    def count(self) -> int:
        """Number of nodes."""
        return max(self.of_rank) + 1

    def ranks(self, node: int) -> list[int]:
        """Return the ranks of a node."""
        return [rank for rank, other in enumerate(self.of_rank) if other == node]

    def is_leader(self, rank: int) -> bool:
        """Return whether a rank is the leader of its node, which does the work of the node."""
        return self.of_rank.index(self.of_rank[rank]) == rank

    def keepers(self, rank: int, replicas: int) -> list[int]:
        """Return the ranks of other nodes that keep copies of the files of ``rank``."""
        node = self.of_rank[rank]
        position = self.ranks(node).index(rank)
        found = []
        for distance in range(1, min(replicas, self.count - 1) + 1):
            there = self.ranks((node + distance) % self.count)
            found.append(there[position % len(there)])
        return found


def _numbered(given: Sequence[Hashable]) -> Nodes:
    number = {one: i for i, one in enumerate(dict.fromkeys(given))}
    return Nodes(tuple(number[one] for one in given))
