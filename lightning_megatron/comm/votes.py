"""Votes of all ranks in every batch, settled by one small collective.

Some decisions must be the same on all ranks, or ranks wait for ever for a peer that decided
otherwise: to stop because one rank got a signal, to skip a step because one rank found a loss that
is not finite. Each such question registers a `Vote`. During a batch every rank puts a number into
it; once per batch, after the backward and before the update, all votes are settled together. Each
rank then sees the largest number of every vote and, of votes by rank, the number of every rank.

The votes take the place of the broadcast by which Lightning tells the ranks of a SIGTERM before
every batch. That broadcast sends only signals that reached rank 0, and goes through the device,
whose queue it empties. Votes stay on the host, and go up and down a tree (`comm.tree`): 8 bytes a
vote, and 8 bytes a rank of each vote that is kept by rank.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.tree import Tree
from lightning_megatron.comm.tree_group import tree_of
from lightning_megatron.errors import ConfigError


class Vote:
    """Number that every rank votes in each batch.

    Args:
        name: name of the vote, the same on every rank.
        default: number of a rank that has put none in this batch.
        by_rank: whether to keep the number of every rank, or only the largest.

    Attributes:
        max: largest number of the last settled batch; NaN if any is, and before the first.
    """

    def __init__(self, name: str, default: float = 0.0, *, by_rank: bool = True) -> None:
        self.name = name
        self._default = default
        self.by_rank = by_rank
        self._values: tuple[float, ...] = ()
        self.reset()

    def put(self, value: float) -> None:
        """Tell the other ranks, when the batch is settled, or the next one if this has been.

        Until then a later value takes its place.
        """
        self._mine = float(value)

    @property
    def values(self) -> tuple[float, ...]:
        """The numbers by global rank, as they were settled last; empty until then.

        Raises:
            RuntimeError: the vote was registered for its largest number alone.
        """
        if not self.by_rank:
            raise RuntimeError(f"vote {self.name!r} has a largest number only: by_rank=False")
        return self._values

    def settle(self, values: Sequence[float]) -> None:
        """Take what all ranks have put, or the largest of it alone."""
        self._values = tuple(values)
        self.max = math.nan if any(map(math.isnan, values)) else max(values)

    def reset(self) -> None:
        """Forget what was put and settled."""
        self._values = ()
        self.max = math.nan
        self._mine = self._default

    def take(self) -> float:
        """Return this rank's number and reset it to the default."""
        mine, self._mine = self._mine, self._default
        return mine


class PerBatchVotes:
    """Settles the votes of all ranks, once per batch.

    The strategy has one, from its construction on. Whoever uses it registers in ``setup``, puts
    values in any hook up to ``on_after_backward``, and reads or is called from then on.
    """

    def __init__(self) -> None:
        self._votes: dict[str, Vote] = {}
        self._listeners: list[Callable[[], None]] = []
        self._tree: Tree | None = None
        self._group: dist.ProcessGroup | None = None
        self._compared = False

    def register(self, name: str, default: float = 0.0, *, by_rank: bool = True) -> Vote:
        """The vote of this name; made where there is none, on every rank in the same order.

        Args:
            name: says what it is.
            default: see `Vote`; counts when the vote is made.
            by_rank: whether `Vote.values` is needed; who only needs `Vote.max` saves the bytes.
        """
        if name not in self._votes:
            self._votes[name] = Vote(name, default, by_rank=by_rank)
            self._compared = False
        elif by_rank and not self._votes[name].by_rank:
            self._votes[name].by_rank = True
            self._compared = False
        return self._votes[name]

    def on_settled(self, listener: Callable[[], None]) -> None:
        """Have ``listener`` called whenever the votes of a batch have been settled, on all ranks.

        It may use collectives; what it raises, it should raise on all ranks.
        """
        if listener not in self._listeners:
            self._listeners.append(listener)

    def start(self, group: dist.ProcessGroup | None) -> None:
        """Begin a run.

        Args:
            group: all processes, for tensors on the host; None for the default group.
        """
        together = dist.is_initialized() and dist.get_world_size() > 1
        self._tree = tree_of(group) if together else None
        self._group = group
        self._compared = False
        for vote in self._votes.values():
            vote.reset()

    def settle(self) -> None:
        """Let every rank see what all have put; collective."""
        votes = list(self._votes.values())
        if self._tree is not None and not self._compared:
            self._compare()
        by_rank = [vote for vote in votes if vote.by_rank]
        others = [vote for vote in votes if not vote.by_rank]
        columns = self._settled([s.take() for s in by_rank], [s.take() for s in others])
        for vote, column in zip((*by_rank, *others), columns, strict=True):
            vote.settle(column)
        for listener in self._listeners:
            listener()

    def _settled(self, by_rank: list[float], others: list[float]) -> list[tuple[float, ...]]:
        """Every rank's numbers of the first kind, the largest alone of the others."""
        if self._tree is None or not by_rank:
            return [(value,) for value in (*by_rank, *self.largest(others))]
        rows, size, kept = (
            self._tree.gather(_tensor([*by_rank, *others])),
            self._tree.size,
            len(by_rank),
        )
        answer = torch.empty(size * kept + len(others), dtype=torch.float64)
        if rows is not None:
            answer[: size * kept] = rows[:, :kept].T.flatten()
            answer[size * kept :] = rows[:, kept:].amax(0)
        self._tree.broadcast(answer)
        numbers = answer.tolist()
        columns = [tuple(numbers[i * size : (i + 1) * size]) for i in range(kept)]
        return [*columns, *((value,) for value in numbers[size * kept :])]

    def exchange(self, mine: Sequence[float]) -> list[tuple[float, ...]]:
        """Gather each number from every rank; collective."""
        if self._tree is None or not mine:
            return [(value,) for value in mine]
        rows = self._tree.all_gather(_tensor(mine)).tolist()
        return list(zip(*rows, strict=True))

    def largest(self, mine: Sequence[float]) -> list[float]:
        """Reduce each number to the largest of all ranks, or NaN if one is; collective."""
        if self._tree is None or not mine:
            return list(mine)
        found: list[float] = self._tree.reduce(_tensor(mine), lambda rows: rows.amax(0)).tolist()
        return found

    def _compare(self) -> None:
        """Numbers in other votes, or another number of them, would mean something else."""
        mine = [(vote.name, vote.by_rank) for vote in self._votes.values()]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        differing = [rank for rank, votes in enumerate(everyone) if votes != everyone[0]]
        if differing:
            first, other = ([name for name, _ in everyone[r]] for r in (0, differing[0]))
            raise ConfigError(
                f"rank 0 exchanges {first} in every batch, rank {differing[0]} {other}; nearest "
                "valid: the same callbacks on every rank"
            )
        self._compared = True


def _tensor(numbers: Sequence[float]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)
