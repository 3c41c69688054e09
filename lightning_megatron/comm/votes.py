"""Votes of all ranks in every batch, settled by one small collective.

Some decisions must be the same on all ranks, or ranks wait for ever for a peer that decided
otherwise: to stop because one rank got a signal, to skip a step because one rank found a loss that
is not finite. Each such question registers a `Vote`. During a batch every rank puts a number into
it; once per batch, after the backward and before the update, all votes are settled together, by one
all-gather. Each rank then sees every rank's number of each vote.

The votes take the place of the broadcast by which Lightning tells the ranks of a SIGTERM before
every batch. That broadcast sends only signals that reached rank 0, and goes through the device,
whose queue it empties. Votes stay on the host: 8 bytes a vote and rank.

This is the form of `comm.peers.Peers` for every batch: one `Peers.exchange` of numbers, where a
gather of Python values would cost two collectives and a pickle. Rarer questions go to `Peers`.

The largest number is found after the gather and not by a reduction, as a NaN of any rank has to be
seen, and what backends make of NaN in a maximum depends on the order.
"""

import math
from collections.abc import Callable, Sequence

import torch.distributed as dist

from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError


class Vote:
    """Number that every rank votes in each batch.

    Args:
        name: name of the vote, the same on every rank.
        default: number of a rank that has put none in this batch.

    Attributes:
        values: numbers by global rank, as they were settled last; empty until then.
        max: largest number of the last settled batch; NaN if any is, and before the first.
    """

    def __init__(self, name: str, default: float = 0.0) -> None:
        self.name = name
        self._default = default
        self.values: tuple[float, ...] = ()
        self.reset()

    def put(self, value: float) -> None:
        """Tell the other ranks, when the batch is settled, or the next one if this has been.

        Until then a later value takes its place.
        """
        self._mine = float(value)

    def settle(self, values: Sequence[float]) -> None:
        """Take what all ranks have put."""
        self.values = tuple(values)
        self.max = _largest(values)

    def reset(self) -> None:
        """Forget what was put and settled."""
        self.values = ()
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
        self._peers = Peers(alone=True)
        self._compared = False

    def register(self, name: str, default: float = 0.0) -> Vote:
        """The vote of this name; made where there is none, on every rank in the same order.

        Args:
            name: says what it is.
            default: see `Vote`; counts when the vote is made.
        """
        if name not in self._votes:
            self._votes[name] = Vote(name, default)
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
        self._peers = Peers(group)
        self._compared = False
        for vote in self._votes.values():
            vote.reset()

    def settle(self) -> None:
        """Let every rank see what all have put; collective."""
        votes = list(self._votes.values())
        if not self._compared:
            self._compare()
        columns = self.exchange([vote.take() for vote in votes])
        for vote, column in zip(votes, columns, strict=True):
            vote.settle(column)
        for listener in self._listeners:
            listener()

    def exchange(self, mine: Sequence[float]) -> list[tuple[float, ...]]:
        """Gather each number from every rank; collective."""
        return self._peers.exchange(mine)

    def largest(self, mine: Sequence[float]) -> list[float]:
        """Reduce each number to the largest of all ranks, or NaN if one is; collective."""
        return [_largest(values) for values in self.exchange(mine)]

    def _compare(self) -> None:
        """Numbers in other votes, or another number of them, would mean something else."""
        everyone = self._peers.all_gather(list(self._votes))
        differing = [rank for rank, votes in enumerate(everyone) if votes != everyone[0]]
        if differing:
            first, other = everyone[0], everyone[differing[0]]
            raise ConfigError(
                f"rank 0 exchanges {first} in every batch, rank {differing[0]} {other}; nearest "
                "valid: the same callbacks on every rank"
            )
        self._compared = True


def _largest(values: Sequence[float]) -> float:
    """The largest number, or NaN if one is."""
    return math.nan if any(map(math.isnan, values)) else max(values)
