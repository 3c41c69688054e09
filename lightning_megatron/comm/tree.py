"""Collectives between the hosts of all ranks, over a tree of small groups.

Gloo connects every pair of a group when the group is made, and its all-gather is a ring. In a group
of all ``p`` ranks that is ``p - 1`` sockets a rank, ``2 p**2`` requests to the store, and ``p - 1``
hops every time. Here the ranks of a machine make a group, the first rank of each such group leads
it, up to `FAN` leaders make a group of the next level, and so on up to rank 0::

    level 2                 0
    level 1      0          16          32         ...
    level 0   0 1 .. 7   16 17 .. 23    ...

What all shall know goes up by one gather a level, whose members send to their leader at the same
time, and down by one broadcast a level: ``levels + sum(log2(size))`` hops. A rank has the sockets
of the groups that it is in. For 4,096 ranks on machines of 8 these are 15 hops in place of 4,095,
and 7 sockets (53 on rank 0) in place of 4,095. Between two machines one message goes each way, not
one for each pair of their ranks.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_megatron._torch import BroadcastOptions, GatherOptions, ScatterOptions

FAN = 32
"""Ranks of a group at most."""
Fold: TypeAlias = Callable[[Tensor], Tensor]
"""Reduction of ``[ranks, *shape]`` to ``[*shape]``, such as a maximum, in rank order."""


@dataclass(frozen=True)
class Branch:
    """Group of the tree.

    Attributes:
        level: level in the tree, 0 for groups of ranks of one machine.
        ranks: global ranks; the first leads.
        spans: number of ranks that each member stands for: those below it, and itself.
    """

    level: int
    ranks: tuple[int, ...]
    spans: tuple[int, ...]


def branches(machines: Sequence[Hashable], fan: int = FAN) -> list[Branch]:
    """Groups of the tree over ``len(machines)`` ranks, the lowest level first.

    Groups of one rank are left out. The ranks that a rank stands for follow one another.

    Args:
        machines: machine of each rank; ranks in a row on one machine make groups of the lowest
            level.
        fan: ranks of a group at most.

    >>> [b.ranks for b in branches("aaabbb")]
    [(0, 1, 2), (3, 4, 5), (0, 3)]
    >>> [b.ranks for b in branches("aaaaa", fan=2)]
    [(0, 1), (2, 3), (0, 2), (0, 4)]
    """
    found: list[Branch] = []
    heads = [(rank, 1) for rank in range(len(machines))]
    level = 0
    while len(heads) > 1 or level == 0:
        above: list[tuple[int, int]] = []
        for run in _runs(machines) if level == 0 else [range(len(heads))]:
            for chunk in _chunks([heads[i] for i in run], fan):
                ranks, spans = zip(*chunk, strict=True)
                if len(ranks) > 1:
                    found.append(Branch(level, ranks, spans))
                above.append((ranks[0], sum(spans)))
        heads, level = above, level + 1
    return found


def _runs(machines: Sequence[Hashable]) -> list[range]:
    """Ranks in a row on one machine."""
    starts = [i for i in range(len(machines)) if i == 0 or machines[i] != machines[i - 1]]
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(machines)], strict=True) if b > a]


def _chunks(heads: list[tuple[int, int]], fan: int) -> list[list[tuple[int, int]]]:
    """Parts of at most ``fan``, as many as are needed."""
    number = -(-len(heads) // fan)
    size = -(-len(heads) // number)
    return [heads[i : i + size] for i in range(0, len(heads), size)]


class Tree:
    """The place of this rank in a tree, and what it can do there together with all ranks.

    Every rank calls the same methods in the same order, from one thread. Tensors are in host memory
    and contiguous.

    Args:
        rank: rank of this process.
        machines: machine of each rank, the same list on all ranks (see `branches`).
        connect: makes the group of a branch, for its members: a gloo backend or process group.
        fan: ranks of a group at most.
    """

    def __init__(
        self,
        rank: int,
        machines: Sequence[Hashable],
        connect: Callable[[Branch], Any],
        fan: int = FAN,
    ) -> None:
        self.rank = rank
        self.size = len(machines)
        self.branches = branches(machines, fan)
        self.groups = [(b, connect(b)) for b in self.branches if rank in b.ranks]
        """Branches that this rank is in, the lowest first; it leads all but perhaps the last."""

    def all_gather(self, local: Tensor) -> Tensor:
        """``[ranks, *shape]`` of every rank's tensor of that shape."""
        everything = self.gather(local)
        if everything is None:
            everything = local.new_empty((self.size, *local.shape))
        self._down(everything)
        return everything

    def reduce(self, local: Tensor, fold: Fold) -> Tensor:
        """Every rank's tensor, folded into one; the leaders fold on the way up."""
        folded = self._up(local.unsqueeze(0), fold)
        result = torch.empty_like(local) if folded is None else folded[0].contiguous()
        self._down(result)
        return result

    def barrier(self) -> None:
        """Return when every rank has called this."""
        self.reduce(torch.zeros(1, dtype=torch.uint8), lambda rows: rows[0])

    def gather(self, local: Tensor, to: int = 0) -> Tensor | None:
        """Gather on one rank what `all_gather` returns on all; None elsewhere."""
        everything = self._up(local.unsqueeze(0))
        if to != 0:
            if everything is None and self._passes(to):
                everything = local.new_empty((self.size, *local.shape))
            self._route(everything, to, up=False)
        return everything if self.rank == to else None

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Fill ``tensor`` with that of one rank."""
        if source != 0:
            held = tensor if self.rank in (0, source) else torch.empty_like(tensor)
            self._route(held if self._passes(source) else None, source, up=True)
        self._down(tensor)

    def scatter(self, rows: Tensor | None, mine: Tensor, source: int = 0) -> None:
        """Fill ``mine`` with this rank's row of what one rank has.

        Args:
            rows: ``[ranks, *shape]`` on that rank.
            mine: tensor of that shape.
            source: the rank that has them.
        """
        if source != 0:
            if rows is None and self._passes(source):
                rows = mine.new_empty((self.size, *mine.shape))
            self._route(rows, source, up=True)
        for branch, group in reversed(self.groups):
            rows = self._hand_down(branch, group, rows, mine)
        if rows is not None:
            mine.copy_(rows[0])

    def _up(self, rows: Tensor, fold: Fold | None = None) -> Tensor | None:
        """Rows of all ranks on rank 0, folded into one row where they meet; None elsewhere."""
        for branch, group in self.groups:
            wide = rows.shape[0] if fold is not None else max(branch.spans)
            padded = rows
            if rows.shape[0] < wide:
                padded = rows.new_zeros((wide, *rows.shape[1:]))
                padded[: rows.shape[0]] = rows
            options = GatherOptions()
            options.rootRank = 0
            if self.rank != branch.ranks[0]:
                _ended(group.gather([], [_raw(padded)], options))
                return None
            together = rows.new_empty((len(branch.ranks), *padded.shape))
            _ended(
                group.gather(
                    [list(_raw(together).chunk(len(branch.ranks)))], [_raw(padded)], options
                )
            )
            if fold is not None:
                rows = fold(together[:, 0]).unsqueeze(0)
            elif min(branch.spans) == wide:
                rows = together.flatten(0, 1)
            else:
                rows = torch.cat([r[:n] for r, n in zip(together, branch.spans, strict=True)])
        return rows

    def _down(self, tensor: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for _, group in reversed(self.groups):
            _ended(group.broadcast([_raw(tensor)], options))

    def _hand_down(self, branch: Branch, group: Any, rows: Tensor | None, like: Tensor) -> Tensor:
        """The rows of the ranks below this one, of those that the leader of a branch has."""
        wide, parts = max(branch.spans), list[list[Tensor]]()
        if self.rank == branch.ranks[0]:
            assert rows is not None
            if min(branch.spans) < wide:
                padded = rows.new_zeros((len(branch.ranks), wide, *like.shape))
                for row, part in zip(padded, torch.split(rows, list(branch.spans)), strict=True):
                    row[: len(part)] = part
                rows = padded
            parts = [list(_raw(rows).chunk(len(branch.ranks)))]
        own = like.new_empty((wide, *like.shape))
        options = ScatterOptions()
        options.rootRank = 0
        _ended(group.scatter([_raw(own)], parts, options))
        return own[: branch.spans[branch.ranks.index(self.rank)]]

    def _path(self, rank: int) -> list[Branch]:
        """Branches on the way from a rank to rank 0 in which another rank leads."""
        path = []
        for branch in self.branches:
            if rank in branch.ranks[1:]:
                path.append(branch)
                rank = branch.ranks[0]
        return path

    def _passes(self, other: int) -> bool:
        """Whether this rank is on the way between a rank and rank 0."""
        path = self._path(other)
        return self.rank in (other, *(branch.ranks[0] for branch in path))

    def _route(self, tensor: Tensor | None, end: int, *, up: bool) -> None:
        """Carry a tensor from rank ``end`` to rank 0, or back; None where it does not pass."""
        path = self._path(end)
        if not up:
            path.reverse()
        groups = {id(branch): group for branch, group in self.groups}
        at = [end, *(branch.ranks[0] for branch in self._path(end))]
        for branch in path:
            member = next(r for r in at if r in branch.ranks[1:])
            if self.rank not in (member, branch.ranks[0]):
                continue
            assert tensor is not None
            sender, receiver = (member, branch.ranks[0]) if up else (branch.ranks[0], member)
            group = groups[id(branch)]
            if self.rank == sender:
                _ended(group.send([_raw(tensor)], branch.ranks.index(receiver), 0))
            else:
                _ended(group.recv([_raw(tensor)], branch.ranks.index(sender), 0))


def _raw(tensor: Tensor) -> Tensor:
    """The bytes, as one line: gloo does not know every format."""
    return tensor.view(-1).view(torch.uint8)


def _ended(work: Any) -> None:
    work.wait()
