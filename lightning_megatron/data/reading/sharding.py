"""Share of the samples that a rank reads, in an order that no layout changes.

Lightning's own insertion of a ``DistributedSampler`` shuffles every training loader, whatever the
user chose, and leaves a single process to its own random order; a run would then see other batches
under dp=2 than under dp=1. Here a loader that does not shuffle keeps its order, one that does gets
a `ResumableSampler`, and one with a sampler of the user's keeps it: every rank draws the same
order, and reads its share. With batches of ``b / dp`` samples, the ranks' batches together are the
batch of ``b`` samples that one process would read.

A sampler of the user's may draw random numbers from anywhere. It draws them from generators that
are seeded by (seed, epoch) and that nobody else uses meanwhile; what it has of its own, a
``state_dict`` or a ``generator``, is noted before, for the checkpoint. To go on in the midst of
that epoch, the same order is drawn again, and its beginning left out. It is drawn batch by batch,
when a loader asks for one, as a sampler may go by what was trained on.

The user's loader is never changed, and its constructor never runs again: what reads the share is a
shallow copy with another sampler, whatever class it is of. A loader with an ``__iter__`` of its own
may ask no sampler at all. Where nothing is divided it is left as it is; where samples are divided,
the first batch tells whether it asked (`Share.is_known`).
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_megatron._lightning.loaders import Stateful, replace_predicted_batches
from lightning_megatron._torch.loader import copy_with_indices
from lightning_megatron.data.reading.augmentation import SampleSeeds
from lightning_megatron.data.reading.lengths import TokenBudget
from lightning_megatron.data.reading.sampler import Division, EvenBatches, ResumableSampler
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.rng import HostRandomness, seed_generators

_LIBRARIES = ("torch.utils.data.", "torchdata.")
"""Homes of loaders and samplers that are known."""


class DrawnOrder(Sampler[Any]):
    """The order of a sampler, or batch sampler, of the user's; drawn alike on all ranks.

    Args:
        sampler: the user's; it has a length.
        seed: of the generators that it may draw from.
        division: of what it yields.
        within: our order that ``sampler`` is to read, where it is a batch sampler.

    Raises:
        ConfigError: when it is read, if ``sampler`` does not read ``within``.
    """

    was_read = False
    """Whether a pass has begun."""

    def __init__(
        self,
        sampler: Any,
        seed: int,
        division: Division | None = None,
        within: "ResumableSampler | DrawnOrder | None" = None,
    ) -> None:
        self.sampler = sampler
        self._within = within
        self._seed = seed
        self._division = division or Division()
        self._epoch = self._start = 0
        self._begun: tuple[int, Any] = (-1, None)
        self._restored: Any = None
        self._is_open = False

    def __iter__(self) -> Iterator[Any]:
        self.open()
        self._is_open = False
        self.was_read = True
        start, self._start = self._start, 0
        return self._drawn(start)

    def open(self) -> None:
        """Prepare a pass; a loader may draw its workers' seed from the same generator after it."""
        if not self._is_open:
            self._restore()
            self._begun = self._epoch, self._state()
            self._is_open = True

    def _drawn(self, start: int) -> Iterator[Any]:
        """This rank's part of what comes after ``start``, a batch of all ranks at a time."""
        order: Iterator[Any] | None = None
        place: HostRandomness | None = None
        division = self._division
        while True:
            kept = HostRandomness.capture()
            try:
                if order is None or place is None:
                    seed_generators(SampleSeeds.of_epoch(self._seed, self._epoch, "order").base)
                    order = islice(self.sampler, start, None)
                else:
                    place.restore()
                batch = list(islice(order, division.batch_size * division.ranks))
                place = HostRandomness.capture()
            finally:
                kept.restore()
            self._check_within()
            if not batch:
                return
            yield from division.share(batch)

    def _check_within(self) -> None:
        if self._within is not None and not self._within.was_read:
            kind = type(self.sampler).__name__
            raise ConfigError(
                f"batch_sampler={kind}: it has an attribute `sampler`, but does not ask it for "
                "samples, so that data-parallel ranks cannot be given their parts; nearest valid: "
                f"a {kind} that iterates over self.sampler, or one without this attribute, whose "
                "batches are divided as they are"
            )

    def _state(self) -> Any:
        if isinstance(self.sampler, Stateful):
            return self.sampler.state_dict()
        generator = getattr(self.sampler, "generator", None)
        return generator.get_state() if isinstance(generator, torch.Generator) else None

    @property
    def epoch(self) -> int:
        """Sampler whose order is read."""
        return self._epoch

    def state_before(self, epoch: int) -> Any:
        """State of the user's sampler when that epoch began; None if it keeps nothing."""
        begun, state = self._begun
        return state if begun == epoch else self._state()

    def load_state_dict(self, state: Any) -> None:
        """Bring the user's sampler to what it was when the epoch began, when that begins again."""
        self._restored = state

    def _restore(self) -> None:
        state, self._restored = self._restored, None
        if state is None:
            return
        if isinstance(self.sampler, Stateful):
            self.sampler.load_state_dict(state)
        elif isinstance(getattr(self.sampler, "generator", None), torch.Generator):
            self.sampler.generator.set_state(state)

    def seek(self, epoch: int, consumed: int) -> None:
        """Begin the next pass in ``epoch``, after ``consumed`` samples of all ranks."""
        self.set_epoch(epoch)
        self._start = consumed
        self._is_open = False

    def set_epoch(self, epoch: int) -> None:
        """Tell the user's sampler too."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._start = 0
        inner: Any = getattr(self.sampler, "sampler", None)
        for sampler in (self.sampler, inner):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Number of batches of a whole pass, on this rank."""
        return self._division.length(len(self.sampler))


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of a loader."""

    loader: DataLoader[Any]
    """Reads this part only."""
    order: ResumableSampler | TokenBudget | DrawnOrder | None
    """Sampler that knows the position; None where the user's loader knows it itself."""
    items: int = 0
    """Samples (or batches, where a batch sampler of the user's makes them) in an epoch."""
    per_batch: int = 0
    """Number of these that all ranks that share ``items`` read in a batch."""
    sets: int = 1
    """Number of such sets of ``items``; more than one where the user divides them."""
    untouched: bool = False
    """Whether it is the user's loader itself."""

    @property
    def is_known(self) -> bool:
        """Whether the position is that of ``order``: whether the loader asks it for samples."""
        order = self.order
        return order is not None and (order.was_read or not reads_by_itself(self.loader))


def share_of(
    dataloader: DataLoader[Any],
    topology: Topology,
    seed: int,
    *,
    divide: bool = True,
    evaluates: bool = False,
) -> Share:
    """This rank's share of ``dataloader``.

    Args:
        dataloader: the user's; one with an ``IterableDataset`` is left to him.
        topology: which rank this is.
        seed: of the order of a loader that shuffles.
        divide: whether the ranks are to read different samples; else each reads all that its
            loader gives, as it does with a ``DistributedSampler`` of the user's own.
        evaluates: whether samples enter means, so that none may be read twice.
    """
    batches: Any = dataloader.batch_sampler
    sampler: Any = getattr(batches, "sampler", dataloader.sampler)
    if has_iterable_dataset(dataloader) or not hasattr(sampler, "__len__"):
        return Share(loader=dataloader, order=None)
    if _is_left_alone(dataloader, topology, divide=divide):
        return Share(loader=dataloader, order=None, untouched=True)
    if isinstance(batches, TokenBudget):
        return _share_of_budget(dataloader, batches, topology, divide=divide)
    if _is_torchdatas(batches):  # `StatefulDataLoader`'s own, made as torch's is
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    divide = divide and not isinstance(sampler, DistributedSampler)
    # Where an item is a batch, those that the ranks read together are one batch of the job.
    sets = 1 if divide or dataloader.batch_size is None else topology.batch.size
    # A loader that was given `batch_sampler=` has no size of its own.
    sizes: Any = batches if type(batches) is BatchSampler else dataloader
    division = Division(
        rank=topology.batch.rank if divide else 0,
        ranks=topology.batch.size if divide else 1,
        batch_size=sizes.batch_size or 1,
        drop_last=sizes.drop_last,
    )
    if evaluates and type(batches) is BatchSampler:
        division = _without_repeats(division, len(sampler))
    if type(batches) in (BatchSampler, type(None)):
        order = order_of(sampler, dataloader, seed, division, divide)
        items = len(sampler)
        loader = with_order(dataloader, order)
        if not division.repeats:
            count = division.batches(items)
            loader = with_batches(loader, EvenBatches(order, division.batch_size, count))
    else:
        loader, order, items = _share_of_batches(dataloader, seed, division)
        division = replace(division, batch_size=1)
    return Share(
        loader=loader,
        order=order,
        items=items,
        per_batch=division.batch_size * division.ranks,
        sets=sets,
    )


def _without_repeats(division: Division, samples: int) -> Division:
    """The division with no sample twice, if every rank can have a sample for its last batch."""
    full, left = divmod(samples, division.batch_size * division.ranks)
    if division.drop_last or not 0 < left < division.ranks:
        return division
    if full and division.batch_size > 1:
        return replace(division, repeats=False)
    rank_zero_warn(
        f"evaluation of {samples} samples on {division.ranks} ranks with batch_size="
        f"{division.batch_size}: {left} remain for {division.ranks} last batches, so that "
        f"{division.ranks - left} of them are repeated and count twice; a batch_size of 2 or more, "
        "and no fewer samples than ranks, need none"
    )
    return division


def order_of(
    sampler: Any, dataloader: DataLoader[Any], seed: int, division: Division, divide: bool
) -> ResumableSampler | DrawnOrder:
    """Order of a sampler of the user's, and this rank's part of it.

    Args:
        sampler: the user's.
        dataloader: that it belongs to.
        seed: of the order, if it shuffles.
        division: what of the order this rank reads.
        divide: whether the ranks are to read different samples.
    """
    if isinstance(sampler, ResumableSampler):
        return sampler.divided(division)
    shuffle = _is_permutation(sampler)
    if divide and (shuffle or type(sampler) is SequentialSampler):
        # The samples that the sampler takes, which may be the first ones of the data set.
        return ResumableSampler(sampler.data_source, shuffle=shuffle, seed=seed).divided(division)
    return DrawnOrder(sampler, seed, division)


def _share_of_batches(
    dataloader: DataLoader[Any], seed: int, division: Division
) -> tuple[DataLoader[Any], DrawnOrder, int]:
    """Divide what a batch sampler of the user's yields.

    One that takes a sampler gets this rank's; of another one, each rank reads its share of batches.
    """
    batches: Any = dataloader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if division.ranks > 1 and sampler is not None:
        division = replace(
            division, batch_size=batches.batch_size, drop_last=bool(batches.drop_last)
        )
        order = order_of(sampler, dataloader, seed, division, divide=True)
        batches = copy(batches)
        vars(batches)["sampler"] = order
        division = replace(division, ranks=1, rank=0)
    else:
        order = None
    division = replace(division, batch_size=1, drop_last=False)
    drawn = DrawnOrder(batches, seed, division, within=order)
    return copy_with_indices(dataloader, drawn), drawn, len(batches)


def _share_of_budget(
    dataloader: DataLoader[Any], batches: TokenBudget, topology: Topology, *, divide: bool
) -> Share:
    """A part of each of the batches, which are those of the whole job."""
    if divide:
        batches = batches.divided(topology.batch.rank, topology.batch.size)
    loader = copy_with_indices(dataloader, batches)
    return Share(loader=loader, order=batches, items=len(batches), per_batch=1)


def divide_predictions(dataloader: DataLoader[Any], topology: Topology) -> None:
    """Have predictions read this rank's part of batches that Lightning cannot divide."""

    def part(batches: Any) -> Any:
        budget = isinstance(batches, TokenBudget)
        return batches.divided(topology.batch.rank, topology.batch.size) if budget else batches

    replace_predicted_batches(dataloader, part)


def with_batches(dataloader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """Have ``dataloader`` read these batches of indices.

    It is changed in place: a new one would have to be made with ``batch_sampler=`` alone, and its
    ``batch_size`` would be None to whoever asks.
    """
    vars(dataloader)["batch_sampler"] = batches
    return dataloader


def _is_torchdatas(sampler: Any) -> bool:
    """Whether a sampler, or batch sampler, is of those that torchdata's loader makes for itself."""
    return type(sampler).__module__.startswith("torchdata.stateful_dataloader")


def with_order(dataloader: DataLoader[Any], order: Any) -> DataLoader[Any]:
    """A copy of a loader that reads in another order, in batches as before."""
    batches: Any = dataloader.batch_sampler
    if batches is None:
        return copy_with_indices(dataloader, order)
    made = BatchSampler(order, batches.batch_size, batches.drop_last)
    loader = copy_with_indices(dataloader, made)
    vars(loader)["sampler"] = order
    return loader


def reads_by_itself(dataloader: DataLoader[Any]) -> bool:
    """Whether a loader is of a class with an ``__iter__`` of its own, which may ask no sampler."""
    return not type(dataloader).__iter__.__module__.startswith(_LIBRARIES)


def _is_left_alone(dataloader: DataLoader[Any], topology: Topology, *, divide: bool) -> bool:
    """Whether a loader is used as the user made it: where no other rank has to know its order.

    That is so if nothing is divided, the loader reads by itself or draws by a sampler of the user's
    that the Trainer was told to leave alone (``divide``), and no tp, cp or pp ranks read the same.
    """
    batches: Any = dataloader.batch_sampler
    sampler: Any = getattr(batches, "sampler", dataloader.sampler)
    divides = divide and topology.batch.size > 1 and not isinstance(sampler, DistributedSampler)
    if divides or topology.world_size > topology.batch.size:
        return False
    homes = (type(one).__module__ for one in (sampler, batches) if one is not None)
    given = not all(home.startswith((*_LIBRARIES, "lightning_megatron.")) for home in homes)
    return reads_by_itself(dataloader) or (given and not divide)


def _is_permutation(sampler: Any) -> bool:
    """Whether ``sampler`` is what ``DataLoader(shuffle=True)`` makes: each sample once.

    One with a generator of the user's has the order that this draws.
    """
    torchdatas = type(sampler).__name__ == "RandomSampler" and _is_torchdatas(sampler)
    return (
        (type(sampler) is RandomSampler or torchdatas)
        and not sampler.replacement
        and sampler.generator is None
        and len(sampler) == len(sampler.data_source)
    )
