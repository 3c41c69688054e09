"""`Peers`: the one way in which ranks exchange small Python values while they have process groups.

It has the object collectives of ``torch.distributed`` (`all_gather`, `gather`, `broadcast`), a
`vote`, and `run`, which carries errors. A step of saving or loading may fail on one rank only: a
full disk, a parameter that only one stage holds. If that rank alone raised, its peers would wait
for it in the next collective until the timeout. In `Peers.run` each rank does its part, the first
rank sees all outcomes and makes the result, and every rank then returns the same result or raises
the same error. It costs one gather and one broadcast of small objects.

Data-parallel ranks mostly have equal values, and a thousand copies of a list of all parameters
would not be small. So in larger groups `run` gathers hashes first, and equal values travel once.

Two classes are forms of it that are cheap enough for every batch: `comm.votes.PerBatchVotes`
settles many votes by one `exchange` of numbers, `comm.objects.ObjectBroadcast` sends tensors as
tensors and the rest only when it changes. Before ranks have groups, and where one may not come,
they use the store: `launch/store_barrier.py`.
"""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch.collectives import gather_now
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.topology.axis import Axis

_FEW_RANKS = 16
"""Size of groups up to which values are gathered without comparing hashes first."""
_MOST_SPEAKERS = 64
"""Largest number of ranks with different values that send theirs to the first one by one."""
_LENGTH_BYTES = 8

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class _Failure:
    text: str
    problems: tuple[str, ...] | None = None
    """Faults of a `ConfigError`; None for any other error."""
    kind: type[CheckpointError] = CheckpointError
    """Class of the error to raise."""


@dataclass(frozen=True)
class _Outcome:
    value: Any = None
    failure: _Failure | None = None


class Peers:
    """The ranks of a process group, as they exchange small values; all methods are collective.

    Args:
        group: group of the ranks; all ranks when None. A gloo group keeps the values on the host,
            and one of its own keeps these messages apart from training.
        alone: whether this process acts by itself, even if there are process groups.

    Attributes:
        group: their group; None for the default group, or for a process alone.
        size: number of ranks.
        rank: place of this one in the group.
    """

    _axis: Axis | None = None
    """Axis whose ranks they are, which may have another order than the group."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        together = not alone and dist.is_available() and dist.is_initialized()
        self.group = group if together else None
        self.size = dist.get_world_size(group) if together else 1
        self.rank = dist.get_rank(group) if together else 0

    @classmethod
    def over(cls, axis: Axis) -> "Peers":
        """The ranks of an axis, whose values `all_gather` returns in axis order."""
        peers = cls(axis.group, alone=axis.group is None)
        peers._axis = axis
        return peers

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which makes results and commits."""
        return self.rank == 0

    def run(self, what: str, each: Callable[[], T], first: Callable[[list[T]], R]) -> R:
        """Run ``each`` on every rank, then ``first`` on the values, on the first rank.

        Args:
            what: beginning of error messages, like ``saving PATH``.
            each: this rank's part; its value must be picklable.
            first: function of the values of all ranks; its result must be picklable.

        Returns:
            The result of ``first``, on every rank.

        Raises:
            ConfigError: all failing ranks raised it; it has the faults of all.
            CheckpointError: any other error, with the ranks that raised it; a
                `DamagedCheckpointError` if all of them raised that.
        """
        outcome, error = _attempt(each)
        outcomes = self._outcomes(outcome)
        failures: dict[int, _Failure] = {}
        result: Any = None
        if outcomes is not None:
            failures = {i: o.failure for i, o in enumerate(outcomes) if o.failure is not None}
            if not failures:
                values = [o.value for o in outcomes]
                conclusion, error = _attempt(lambda: first(values))
                result = conclusion.value
                failures = {} if conclusion.failure is None else {0: conclusion.failure}
        agreed: R
        failures, agreed = self.broadcast((failures, result))
        if error is not None and not isinstance(error, Exception):
            raise error  # an interrupt stays one
        if failures:
            ours = isinstance(error, CheckpointError | ConfigError)
            raise _joint_error(what, failures, self.size) from (None if ours else error)
        return agreed

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        if self._axis is None or self.group is None:
            return values
        return [values[dist.get_group_rank(self.group, rank)] for rank in self._axis.ranks]

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on the first one, and None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, dst=self._global_rank(0), group=self.group)
        return values

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of one rank, by its place in the group, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self._global_rank(source), group=self.group)
        return box[0]

    def vote(self, decision: bool, device: torch.device, *, all: bool) -> bool:
        """Return whether all (or any) of the ranks decided so.

        Args:
            decision: of this rank.
            device: device on which the group adds up.
            all: whether all of them have to.
        """
        if self.size == 1:
            return decision
        votes = torch.tensor(int(decision), device=device)
        dist.all_reduce(votes, group=self.group)
        return bool(votes == self.size) if all else bool(votes)

    def exchange(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """Gather each number from every rank, by one collective of 8 bytes a number and rank."""
        if self.size == 1 or not numbers:
            return [(number,) for number in numbers]
        local = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        found = local.new_empty(self.size * len(numbers))
        gather_now(found, local, self.group)
        return list(zip(*found.view(-1, len(numbers)).tolist(), strict=True))

    def deliver(self, texts: Sequence[bytes]) -> list[bytes]:
        """Send a text to each of the first ranks; return the texts that came to this rank.

        Args:
            texts: text for each receiving rank; all ranks give as many.

        Returns:
            Texts by sender; empty on ranks that receive nothing.
        """
        if self.size == 1:
            return list(texts)
        lengths = self._largest([len(text) for text in texts])
        found: list[bytes] = []
        for rank, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            row = _padded(text, length)
            rows = [torch.empty_like(row) for _ in range(self.size)] if self.rank == rank else None
            dist.gather(row, rows, dst=self._global_rank(rank), group=self.group)
            found += [] if rows is None else map(_text, rows)
        return found

    def hand_out(self, texts: Sequence[bytes], givers: int) -> list[bytes]:
        """Send a text from each of the first ranks to every rank; return those for this rank.

        Args:
            texts: text for each rank, if this rank sends.
            givers: number of ranks that send.

        Returns:
            Texts by sender.
        """
        if self.size == 1:
            return list(texts)
        gives = self.rank < givers
        longest = max(map(len, texts)) if gives else 0
        lengths = self._largest([longest if self.rank == rank else 0 for rank in range(givers)])
        found = []
        for rank, length in enumerate(lengths):
            rows = [_padded(text, length) for text in texts] if self.rank == rank else None
            row = _padded(b"", length)
            dist.scatter(row, rows, src=self._global_rank(rank), group=self.group)
            found.append(_text(row))
        return found

    def _largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the element-wise maximum of the ranks' numbers."""
        found = torch.tensor(numbers, device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        largest: list[int] = found.tolist()
        return largest

    def _outcomes(self, outcome: _Outcome) -> list[_Outcome] | None:
        """Gather the outcomes on the first rank, equal ones once where ranks are many."""
        if self.size > _FEW_RANKS:
            speakers = self._speakers(outcome)
            if len(set(speakers)) <= min(_MOST_SPEAKERS, self.size // 2):
                return self._gather_from(speakers, outcome)
        return self.gather(outcome)

    def _speakers(self, outcome: _Outcome) -> list[int]:
        """Return, for every rank, the lowest rank with an equal outcome; on every rank."""
        digest = hashlib.sha256(pickle.dumps(outcome)).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)] if self.is_first else None
        dist.gather(mine, all_of_them, dst=self._global_rank(0), group=self.group)
        speakers = torch.empty(self.size, dtype=torch.int64, device="cpu")
        if all_of_them is not None:
            first: dict[bytes, int] = {}
            for rank, other in enumerate(all_of_them):
                speakers[rank] = first.setdefault(other.numpy().tobytes(), rank)
        dist.broadcast(speakers, src=self._global_rank(0), group=self.group)
        found: list[int] = speakers.tolist()
        return found

    def _gather_from(self, speakers: Sequence[int], outcome: _Outcome) -> list[_Outcome] | None:
        """Send the outcomes of some ranks to the first, where they stand for those of all."""
        if not self.is_first:
            if self.rank in speakers:
                dist.send_object_list([outcome], dst=self._global_rank(0), group=self.group)
            return None
        said = {0: outcome}
        for rank in sorted(set(speakers) - {0}):
            box: list[Any] = [None]
            dist.recv_object_list(box, src=self._global_rank(rank), group=self.group)
            said[rank] = box[0]
        return [said[rank] for rank in speakers]

    def _global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


def _padded(text: bytes, length: int) -> Tensor:
    """Return a text with its length in front, padded with zeros."""
    content = len(text).to_bytes(_LENGTH_BYTES, "little") + text.ljust(length, b"\0")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _text(padded: Tensor) -> bytes:
    content = padded.numpy().tobytes()
    length = int.from_bytes(content[:_LENGTH_BYTES], "little")
    return content[_LENGTH_BYTES : _LENGTH_BYTES + length]


def _attempt(function: Callable[[], Any]) -> tuple[_Outcome, BaseException | None]:
    try:
        return _Outcome(value=function()), None
    except BaseException as error:
        return _Outcome(failure=_describe(error)), error


def _describe(error: BaseException) -> _Failure:
    if isinstance(error, ConfigError):
        return _Failure(str(error), problems=error.problems)
    if isinstance(error, CheckpointError):
        return _Failure(str(error), kind=type(error))
    return _Failure(f"{type(error).__name__}: {error}")


def _joint_error(what: str, failures: dict[int, _Failure], size: int) -> Exception:
    by_text: dict[str, list[int]] = {}
    for rank, failure in failures.items():
        by_text.setdefault(failure.text, []).append(rank)
    if all(f.problems is not None for f in failures.values()):
        return ConfigError([p for f in failures.values() for p in f.problems or ()])
    path = what.partition(" ")[2]  # is named once
    by_text = {text.removeprefix(f"{path}: "): ranks for text, ranks in by_text.items()}
    parts = [
        text if size == 1 else f"rank {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    ]
    kinds = {failure.kind for failure in failures.values()}
    kind = kinds.pop() if len(kinds) == 1 else CheckpointError
    return kind(f"{what}: {'; '.join(parts)}")
