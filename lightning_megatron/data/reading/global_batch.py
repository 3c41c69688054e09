"""Training loaders whose batches the strategy sizes, for a global batch that no layout changes.

With ``global_batch_size`` the loader of every data-parallel rank gets batches of its equal share,
and everything else stays as it is for a loader that the user has sized so himself. Where a
`BatchSchedule` changes the size, `ScheduledBatches` makes the batches: it takes the next ``B``
samples of the order of all ranks, ``B`` being a function of the samples that the run has consumed,
and gives this rank's share of them.

Loaders read ahead of training: what was drawn is not what was trained on. So the sampler remembers
where each batch of the pass ended, and the strategy says which batch has begun (`begin_batch`);
consumed samples are counted up to that one, when a checkpoint is saved, and when an epoch ends of
which not everything was trained on.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader

from lightning_megatron.data.reading.batch_sizes import BatchSizes
from lightning_megatron.data.reading.sampler import Division, ResumableSampler
from lightning_megatron.data.reading.sharding import (
    DrawnOrder,
    Share,
    reads_by_itself,
    with_batches,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.mesh import Topology


def schedule_of(trainer: Trainer) -> BatchSizes | None:
    """The batch sizes of the run's `BatchSchedule`; None without one."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    found = (getattr(callback, "batch_sizes", None) for callback in callbacks)
    return next((sizes for sizes in found if isinstance(sizes, BatchSizes)), None)


def sized(dataloader: DataLoader[Any], batch_size: int, name: str) -> DataLoader[Any]:
    """A copy of a training loader with batches of this size.

    Args:
        dataloader: the user's.
        batch_size: of this rank.
        name: of the option that gives the size.

    Raises:
        ConfigError: the loader does not put samples into batches itself.
    """
    problem = sizing_problem(dataloader, name)
    if problem is not None:
        raise ConfigError(problem)
    resized = copy(dataloader)
    batches = BatchSampler(dataloader.sampler, batch_size, dataloader.drop_last)
    if not has_iterable_dataset(dataloader):
        batches = BatchSampler(
            getattr(dataloader.batch_sampler, "sampler", dataloader.sampler),
            batch_size,
            bool(getattr(dataloader.batch_sampler, "drop_last", False)),
        )
    vars(resized)["batch_size"] = batch_size
    return with_batches(resized, batches)


def sizing_problem(dataloader: DataLoader[Any], name: str) -> str | None:
    """Reason why the strategy cannot size the batches of a loader, if there is one."""
    kind = type(dataloader.batch_sampler)
    if reads_by_itself(dataloader) and not has_iterable_dataset(dataloader):
        return (
            f"{name}, {type(dataloader).__name__}: its own __iter__ may ask for no batches, which "
            "then cannot be given another size; nearest valid: "
            f"torch.utils.data.DataLoader, or no {name.split('=')[0]}"
        )
    if kind is BatchSampler:
        return None
    none = dataloader.batch_sampler is None
    made_by = "batch_size=None" if none else f"batch_sampler={kind.__name__}"
    return (
        f"{name}, DataLoader({made_by}): batches are not made of batch_size samples, so that they "
        f"cannot be given another size; nearest valid: DataLoader(sampler=..., batch_size=1), or "
        f"no {name.split('=')[0]}"
    )


class ScheduledBatches(BatchSampler):
    """This rank's share of global batches, whose size follows from the samples consumed before.

    Args:
        order: of the samples of all ranks.
        division: among the ranks.
        sizes: of global batches.

    Attributes:
        total: samples that the run had consumed when the present pass began.
    """

    def __init__(
        self, order: ResumableSampler | DrawnOrder, division: Division, sizes: BatchSizes
    ) -> None:
        super().__init__(order, max(sizes.first // division.ranks, 1), division.drop_last)
        self._order = order
        self._division = division
        self._sizes = sizes
        self.total = 0
        self._epoch = -1
        self._begins = self._next = 0
        """Samples of the epoch before the present pass; and before the next one."""
        self._first = self._next_first = 0
        """Number of the pass's first batch in its epoch; and of the next one's."""
        self._ends: list[tuple[int, int]] = []
        """Samples of the epoch after each batch of the pass, and the size that was asked for."""
        self._begun = 0
        """Number of batches of the pass that training has begun."""

    def seek(self, epoch: int, consumed: int, batches: int, total: int) -> None:
        """Begin the next pass after so many samples and batches of an epoch."""
        self._order.seek(epoch, consumed)
        self._next, self._next_first, self.total = consumed, batches, total
        self._ends, self._begun = [], 0

    def begin_batch(self, number: int) -> None:
        """Training has begun the batch of this number in the epoch."""
        self._begun = number - self._first + 1

    @property
    def size(self) -> int:
        """Size that the schedule gives the present batch."""
        return self._ends[self._begun - 1][1] if self._begun else self._sizes.at(self.total)

    def _consumed_by(self, batches: int) -> int:
        return self._ends[min(batches, len(self._ends)) - 1][0] if batches > 0 else self._begins

    @property
    def total_consumed(self) -> int:
        """Samples that the run has consumed, at the end of the batch that has begun."""
        return self.total + self._consumed_by(self._begun) - self._begins

    def position(self, epoch: int, batches: int) -> tuple[int, int]:
        """Samples consumed of an epoch, and of the run, when so many of its batches are done."""
        if epoch != self._epoch:  # the present one is over
            return 0, self.total_consumed
        consumed = self._consumed_by(batches - self._first)
        return consumed, self.total + consumed - self._begins

    def __iter__(self) -> Iterator[list[Any]]:
        self.total = self.total_consumed
        self._epoch = self._order.epoch
        self._begins, self._next = self._next, 0
        self._first, self._next_first = self._next_first, 0
        self._ends, self._begun = [], 0
        # Asked for here: the order may draw random numbers.
        return self._batches(iter(self._order), self._ends)

    def _batches(self, indices: Iterator[Any], ends: list[tuple[int, int]]) -> Iterator[list[Any]]:
        consumed, ranks = self._begins, self._division.ranks
        before = self.total - self._begins
        while True:
            size = self._sizes.at(before + consumed)
            division = replace(self._division, batch_size=size // ranks)
            batch = list(islice(indices, size))
            mine = division.share(batch)
            if not batch or not mine:
                return
            consumed += len(batch)
            ends.append((consumed, size))
            yield mine

    def __len__(self) -> int:
        raise TypeError("the number of batches of an epoch depends on a BatchSchedule")


def scheduled(
    share: Share, topology: Topology, sizes: BatchSizes, seed: int
) -> tuple[Share, ScheduledBatches]:
    """Have the batches of a share follow a schedule.

    Raises:
        ConfigError: the share is not one of a map-style dataset that the strategy divides, or the
            loader reads further ahead than decisions of the schedule are made.
    """
    loader, order = share.loader, share.order
    known = isinstance(order, ResumableSampler | DrawnOrder) and share.sets == 1
    if not known or type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            f"BatchSchedule, {type(loader.dataset).__name__} with {type(loader.sampler).__name__}: "
            "the strategy counts and divides the samples of a map-style dataset only; nearest "
            "valid: DataLoader(map-style dataset, shuffle=True), or no BatchSchedule"
        )
    ahead = loader.num_workers * (loader.prefetch_factor or 1) + 2
    if sizes.noise is not None and sizes.noise.delay < ahead:
        raise ConfigError(
            f"NoiseScale(delay={sizes.noise.delay}), num_workers={loader.num_workers}, "
            f"prefetch_factor={loader.prefetch_factor}: {ahead} batches may have been drawn when a "
            f"decision is made; nearest valid: delay={ahead}"
        )
    division = Division(
        rank=topology.batch.rank, ranks=topology.batch.size, drop_last=loader.drop_last
    )
    drop_last = bool(getattr(loader.batch_sampler, "drop_last", loader.drop_last))
    division = replace(division, drop_last=drop_last)
    assert isinstance(order, ResumableSampler | DrawnOrder)
    if isinstance(order, ResumableSampler):
        whole: ResumableSampler | DrawnOrder = order.divided(Division())
    else:
        whole = DrawnOrder(order.sampler, seed)
    batches = ScheduledBatches(whole, division, sizes)
    vars(loader)["sampler"] = whole
    return replace(share, loader=with_batches(loader, batches), order=whole), batches
