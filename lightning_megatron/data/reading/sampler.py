"""Sampler whose samples, order and division over ranks follow from three numbers.

The order of an epoch is a function of (seed, epoch); the position in it is the number of samples
that the whole job has *consumed*. Neither depends on the number of ranks. Global batch
``j`` is ``order[consumed + j * B :][:B]``, whatever ``B`` is made of, and rank ``r`` of ``n`` reads
every ``n``-th sample of it, ``batch[r::n]``: the ranks' batches together are the batch that one
process would read, so a run may stop under one layout and resume under another.

Cost. An epoch of ``N`` samples is one ``torch.randperm(N)``; to skip is to slice it. Nothing is
iterated and no data is read: a million samples take 0.1 to 0.3 s (``benchmarks/resume.py``).

Remainders. When ``B`` does not divide what is left, the last batch has the ``m`` samples that
remain, ``m // n`` or one more for each rank; every sample is read once. Only if there are fewer
samples than ranks (``m < n``) some of them are read twice, because a rank without a batch could not
take part in the step; ``drop_last=True`` drops the whole global batch on any number of ranks.
Where a repeated sample would enter a mean, in evaluation, `EvenBatches` takes a sample of the batch
before instead. `torch.utils.data.DistributedSampler`, by contrast, pads or drops per rank, so that
the same epoch has other samples under another degree. For the same seed and epoch the order is the
same as there.
"""

from collections.abc import Iterator, Mapping, Sized
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

_BLOCK = 65536
"""Number of indices that are converted to Python integers at a time."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """Part of a global batch that one rank reads."""

    rank: int = 0
    """Rank of this process among those that read different samples."""
    ranks: int = 1
    """Number of ranks that read different samples."""
    batch_size: int = 1
    """Number of samples of each rank's batch."""
    drop_last: bool = False
    """Whether an incomplete global batch is left out."""
    repeats: bool = True
    """Whether samples are read twice where fewer than ranks remain."""

    def share(self, order: Any, start: int = 0) -> Any:
        """Return this rank's part of ``order`` (a tensor or list) after ``start``."""
        rest = order[start:]
        left = len(rest) % (self.batch_size * self.ranks)
        if self.drop_last:
            rest = rest[: len(rest) - left]
        elif left < self.ranks and self.repeats:
            # Too few for one each: begin again with the first of them.
            wanted = self.ranks if left else 0
            again = [len(rest) - left + i % max(left, 1) for i in range(left, wanted)]
            more = [rest[i] for i in again]
            if more:
                both = isinstance(rest, torch.Tensor)
                rest = torch.cat([rest, torch.stack(more)]) if both else [*rest, *more]
        return rest[self.rank :: self.ranks]

    def length(self, samples: int) -> int:
        """Length of this rank's part of an epoch of ``samples``."""
        full, left = divmod(samples, self.batch_size * self.ranks)
        share = 0
        if left and not self.drop_last:
            share = max(-(-(left - self.rank) // self.ranks), int(self.repeats))
        return full * self.batch_size + share

    def batches(self, samples: int) -> int:
        """Number of batches in an epoch of ``samples``, equal on every rank."""
        full, left = divmod(samples, self.batch_size * self.ranks)
        return full + int(left > 0 and not self.drop_last)


class ResumableSampler(Sampler[int]):
    """Sampler of every sample once per epoch, from any position, in the same order on any layout.

    The strategy puts one into every training loader with a map-style dataset that has no sampler of
    its own. Made by hand it goes into ``DataLoader(sampler=...)``; the strategy divides it among
    the data-parallel ranks, and takes it back to where a checkpoint was saved.

    Args:
        source: dataset, or number of its samples.
        shuffle: whether each epoch has an order of its own.
        seed: seed of the orders.

    Example:
        >>> sampler = ResumableSampler(6, shuffle=False)
        >>> sampler.seek(epoch=0, consumed=4)
        >>> list(sampler), list(sampler)
        ([4, 5], [0, 1, 2, 3, 4, 5])
    """

    was_read = False
    """Whether a pass has begun."""

    def __init__(self, source: Sized | int, *, shuffle: bool = True, seed: int = 0) -> None:
        self._samples = source if isinstance(source, int) else len(source)
        self._shuffle = shuffle
        self._seed = seed
        self._division = Division()
        self._epoch = 0
        self._start = 0
        self._position = 0

    @property
    def epoch(self) -> int:
        """Epoch whose order is read."""
        return self._epoch

    def divided(self, division: Division) -> "ResumableSampler":
        """Return a sampler of one rank's share of the same order."""
        part = copy(self)  # a subclass has an order of its own
        part.seek(self._epoch, self._start)
        part._division = division
        part.was_read = False
        return part

    def order(self) -> torch.Tensor:
        """Return all indices of the current epoch, of all ranks."""
        if not self._shuffle:
            return torch.arange(self._samples)
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        return torch.randperm(self._samples, generator=generator)

    def seek(self, epoch: int, consumed: int) -> None:
        """Begin the next pass in ``epoch``, after ``consumed`` samples of all ranks."""
        self._epoch = epoch
        self._start = consumed
        self._position = consumed

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` at its first sample; nothing changes if it has begun already."""
        if epoch != self._epoch:
            self.seek(epoch, 0)

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        self._position = start
        self.was_read = True
        mine = self._division.share(self.order(), start)
        return self._indices(mine)

    def _indices(self, mine: torch.Tensor) -> Iterator[int]:
        for first in range(0, len(mine), _BLOCK):
            for index in mine[first : first + _BLOCK].tolist():
                self._position += self._division.ranks
                yield index

    def __len__(self) -> int:
        """Length of a whole pass on this rank."""
        return self._division.length(self._samples)

    def state_dict(self) -> dict[str, Any]:
        """Seed, epoch, and the samples handed out so far by all ranks together.

        DataLoader workers read ahead of training, so the strategy passes the number of samples that
        were trained on to `seek`; code that keeps this state itself must do the same.
        """
        return {
            "samples": self._samples,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "epoch": self._epoch,
            "consumed": min(self._position, self._samples),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was called, under any division.

        Raises:
            ValueError: the state is that of a dataset of another size.
        """
        if state["samples"] != self._samples:
            raise ValueError(
                f"the state is of {state['samples']} samples, the dataset has {self._samples}"
            )
        self._seed = state["seed"]
        self._shuffle = state["shuffle"]
        self.seek(state["epoch"], state["consumed"])


class EvenBatches(BatchSampler):
    """Batch sampler with equally many batches on every rank, of all its samples, each once.

    A rank whose samples do not suffice for a last batch makes one with the last sample of the batch
    before. Means over samples do not depend on how these are put into batches.

    Args:
        sampler: this rank's samples.
        batch_size: size of full batches; at least 2.
        batches: number of batches: those that fit, or one more.

    Example:
        >>> list(EvenBatches([5, 6, 7, 8], 2, 3)), list(EvenBatches([5, 6, 7], 2, 2))
        ([[5, 6], [7], [8]], [[5, 6], [7]])
    """

    def __init__(self, sampler: Any, batch_size: int, batches: int) -> None:
        super().__init__(sampler, batch_size, drop_last=False)
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        batches = super().__iter__()
        full = len(self.sampler) // self.batch_size  # type: ignore[arg-type]
        for number, batch in enumerate(batches, start=1):
            if number == full and super().__len__() < self._batches:
                yield batch[:-1]
                yield batch[-1:]
            else:
                yield batch

    def __len__(self) -> int:
        """Number of batches, the same on every rank."""
        return self._batches
