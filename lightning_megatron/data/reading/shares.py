"""Unequal parts of a global batch, for ranks of unequal speed.

A global batch of ``B`` samples is the same as with equal parts: ``order[consumed:][:B]``. Only who
reads what of it changes. Rank ``r`` reads ``n_r`` samples of a full batch, ``sum(n_r) = B``, and
these are spread over the batch: sample ``k`` of rank ``r`` stands where ``(k + 1/2) / n_r`` is in
the order of all of them. With equal parts that is every ``R``-th sample, as
`lightning_megatron.data.reading.sampler.Division` has it. Of an incomplete batch of ``m`` samples
the ranks read what they would read of the first ``m`` samples of a full one. So the parts stay in
proportion, and no rank has more samples than in a full batch.

A rank whose part of an incomplete batch is empty reads the first sample of it once more, because it
has to take part in the step. `Portion.samples` is 0 then: the sample counts nowhere.

The weight of a rank in a mean over ranks of means over samples is ``n_r * R / m``: the mean over
the ranks is then the mean over the samples.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler


@dataclass(frozen=True)
class Portion:
    """Part of one global batch that a rank reads."""

    samples: int
    """Number of samples of this rank that count; 0: it repeats a sample of another rank."""
    total: int
    """Number of samples of all ranks."""
    sizes: tuple[int, ...]
    """Number of samples of each rank in a full batch."""

    @property
    def weight(self) -> float:
        """Factor of this rank's mean over samples in a mean over ranks."""
        return self.samples * len(self.sizes) / self.total

    @property
    def counts(self) -> bool:
        """Whether the samples of this rank count."""
        return self.samples > 0

    @property
    def rows(self) -> int:
        """Number of samples that this rank reads."""
        return max(self.samples, 1)


class Parts:
    """Who reads which sample of a global batch.

    Args:
        sizes: number of samples of each rank in a full batch.

    Example:
        >>> parts = Parts((4, 2))
        >>> parts.owners
        (0, 1, 0, 0, 1, 0)
        >>> parts.take(["a", "b", "c", "d", "e", "f"], 1), parts.take(["g"], 1)
        (['b', 'e'], ['g'])
        >>> parts.portion(1, 1)
        Portion(samples=0, total=1, sizes=(4, 2))
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Rank that reads each sample of a full batch."""
        places = [((k + 0.5) / n, r) for r, n in enumerate(self.sizes) for k in range(n)]
        return tuple(rank for _, rank in sorted(places))

    def take(self, batch: Sequence[Any], rank: int) -> list[Any]:
        """Return what ``rank`` reads of a batch; at least one sample."""
        # An incomplete batch is shorter than the owners.
        mine = [sample for sample, owner in zip(batch, self.owners, strict=False) if owner == rank]
        return mine or [batch[0]]

    def portion(self, rank: int, total: int) -> Portion:
        """Number of samples of ``rank`` in a batch of ``total``."""
        return Portion(self.owners[:total].count(rank), total, self.sizes)


def sizes_of(shares: Sequence[float], batch: int) -> tuple[int, ...]:
    """Number of samples of each rank in a batch, in proportion to ``shares``; at least one each.

    Args:
        shares: positive, by rank.
        batch: number of samples of all ranks; no fewer than ranks.

    Example:
        >>> sizes_of([2, 1, 1], 8), sizes_of([1, 1], 6), sizes_of([100, 1], 4)
        ((4, 2, 2), (3, 3), (3, 1))
    """
    whole = math.fsum(shares)
    exact = [share / whole * batch for share in shares]
    sizes = [max(math.floor(part), 1) for part in exact]
    while sum(sizes) < batch:  # to the rank that has the least of its part
        sizes[min(range(len(sizes)), key=lambda r: (sizes[r] - exact[r], r))] += 1
    while sum(sizes) > batch:
        able = [r for r in range(len(sizes)) if sizes[r] > 1]
        sizes[max(able, key=lambda r: (sizes[r] - exact[r], -r))] -= 1
    return tuple(sizes)


class UnevenBatches(BatchSampler):
    """Batch sampler of one rank's parts of the global batches of an order.

    Args:
        sampler: order of the samples of all ranks.
        batch_size: number of samples of a full global batch.
        drop_last: whether an incomplete one is left out.
        rank: of this process, among those that read different samples.
        parts_of: from the number of a global batch in this pass, who reads what of it.

    Attributes:
        portions: this rank's part of every batch that was drawn in this pass; whoever uses a batch
            takes the first.
        drawn: number of batches that were drawn in this pass.
    """

    def __init__(
        self,
        sampler: Any,
        batch_size: int,
        drop_last: bool,
        *,
        rank: int,
        parts_of: Callable[[int], Parts],
    ) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self._rank = rank
        self._parts_of = parts_of
        self.portions: deque[Portion] = deque()
        self.drawn = 0

    def __iter__(self) -> Iterator[list[Any]]:
        self.portions.clear()
        self.drawn = 0
        samples = iter(self.sampler)
        while batch := list(islice(samples, self.batch_size)):
            if len(batch) < self.batch_size and self.drop_last:
                return
            parts = self._parts_of(self.drawn)
            self.drawn += 1
            self.portions.append(parts.portion(self._rank, len(batch)))
            yield parts.take(batch, self._rank)
