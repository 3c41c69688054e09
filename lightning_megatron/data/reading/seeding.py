"""Random streams of data loading: equal for ranks that read the same samples.

tp peers and pipeline stages each load their own copy of the batch, so that nothing is sent.
Lightning seeds DataLoader workers by the global rank, which would give those copies different
augmentations; and an iterator of a DataLoader draws its workers' seed from PyTorch's default
generator, whose position may differ between pipeline stages, and between a run that was interrupted
and one that was not. Here a loader gets a generator of its own, a function of the batch rank and,
for a training loader, of the epoch; and each sample its own random numbers
(`data.reading.augmentation`).
"""

from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from typing import Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lightning_megatron import env
from lightning_megatron.data.reading.augmentation import (
    Aside,
    Collate,
    SampleIndices,
    SampleSeeds,
    draws_random_numbers,
)
from lightning_megatron.data.reading.iterable_datasets import (
    SeededStream,
    begin_anew,
    go_to,
    keeps_position,
    state_at,
    wrap_stream,
)
from lightning_megatron.data.reading.sharding import DrawnOrder, with_batches
from lightning_megatron.fault_tolerance.signals import shield
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.rng import derive_seed, seed_generators


def seed_dataloader(dataloader: DataLoader[Any], topology: Topology) -> bool:
    """Give ``dataloader`` a generator of its own; returns False where the user gave one."""
    ours = dataloader.generator is None
    if ours:
        seed = derive_seed(topology.seed, "data", "workers", topology.batch.rank)
        dataloader.generator = torch.Generator().manual_seed(seed)
    if env.seed_workers() and dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=topology.batch.rank)
    dataloader.worker_init_fn = shield(dataloader.worker_init_fn)
    return ours


class Endless(Sampler[int]):
    """Sampler of an iterable dataset: as many indices as are asked for, all the same.

    Args:
        stream: told when a pass begins.
    """

    def __init__(self, stream: SeededStream | None = None) -> None:
        self.epoch = 0
        self._stream = stream

    def set_epoch(self, epoch: int) -> None:
        """Remember it, for the random numbers."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self._stream is not None:
            self._stream.begin(self.epoch)
        return repeat(0)


class SeededBatches(BatchSampler):
    """Batches of a training loader, each of whose samples has its own random numbers.

    Args:
        batches: what makes lists of indices.
        sampler: of ``batches``; knows the epoch.
        loader: which reads them.
        seed: of the run.
        rank: among those that read different samples.
        history: of how many batches the state of a stateful dataset is kept.
        generator: of the loader, to be seeded for every epoch; None leaves it alone.
    """

    def __init__(
        self,
        batches: Any,
        sampler: Any,
        loader: DataLoader[Any],
        *,
        seed: int,
        rank: int,
        history: int,
        generator: torch.Generator | None,
    ) -> None:
        self.batches = batches
        self.sampler: Any = sampler
        self.batch_size = loader.batch_size or 1
        self.drop_last = bool(getattr(batches, "drop_last", loader.drop_last))
        self.seed = seed
        self._rank = rank
        self._generator = generator
        self._iterable = has_iterable_dataset(loader)
        self._dataset = loader.dataset
        self._in_process = loader.num_workers == 0
        self._random = draws_random_numbers(loader.dataset)
        self._aside = Aside()
        if self._random and self._in_process:
            loader.collate_fn = Collate(loader.collate_fn, self._aside)
        self._next = self._first = 0
        self._states: deque[tuple[int, Any]] = deque(maxlen=history)

    def go_to(self, batch: int, state: Any = None) -> None:
        """Begin the next pass with this batch; ``state`` is the dataset's before it.

        Without one somebody else moves what is read.
        """
        if state is not None:
            go_to(self._dataset, state)
        self._first = batch

    @property
    def is_stateful(self) -> bool:
        """Whether the dataset knows where it is, and that is where this process reads it."""
        return self._iterable and self._in_process and keeps_position(self._dataset)

    def state_before(self, batch: int) -> Any:
        """State of a stateful dataset before it read a batch of this epoch; None if unknown."""
        if batch == self._next:
            return state_at(self._dataset, begun=batch > 0)
        return next((state for number, state in self._states if number == batch), None)

    def __iter__(self) -> Iterator[list[Any]]:
        # A loader asks for this before it draws the seed of its workers.
        for order in (self.batches, self.sampler):
            if isinstance(order, DrawnOrder):
                order.open()
        if self._generator is not None:
            names = ("data", "workers", self._rank, self.sampler.epoch)
            self._generator.manual_seed(derive_seed(self.seed, *names))
        self._next = self._first
        if self._next == 0 and self.is_stateful:
            begin_anew(self._dataset)
        if isinstance(self._dataset, SeededStream):  # before workers get their copies
            self._dataset.begin(self.sampler.epoch)
        self._states.clear()
        return self._batches()

    def _batches(self) -> Iterator[list[Any]]:
        self._first = 0  # only now: a loader with workers asks for two iterators, and reads one
        stream = ("stream", self._rank) if self._iterable else ()
        seeds = SampleSeeds.of_epoch(self.seed, self.sampler.epoch, *stream)
        at_once = hasattr(self._dataset, "__getitems__")
        for indices in self.batches:
            if self.is_stateful:
                self._states.append((self._next, self.state_before(self._next)))
            number, self._next = self._next, self._next + 1
            if not self._random:
                yield indices
                continue
            first = number * self.batch_size
            keys = range(first, first + len(indices)) if self._iterable else indices
            aside = self._aside if self._in_process else None
            batch = SampleIndices(indices, [seeds(key) for key in keys], aside)
            if self._in_process and at_once:
                self._aside.enter()
                seed_generators(batch.seeds[0])
            yield batch

    def __len__(self) -> int:
        return len(self.batches)


def seed_samples(
    dataloader: DataLoader[Any], topology: Topology, seed: int, history: int
) -> SeededBatches | None:
    """Make the random numbers of a training loader a function of epoch and sample.

    Args:
        dataloader: changed in place.
        topology: which rank this is.
        seed: of the random numbers.
        history: see `SeededBatches`.

    Returns:
        The loader's batches; None where it has none (``batch_size=None``).
    """
    ours = seed_dataloader(dataloader, topology)
    stream = has_iterable_dataset(dataloader)
    wrapped = wrap_stream(dataloader, seed, topology.batch.rank) if stream else None
    batches: Any = dataloader.batch_sampler
    if batches is None:
        if wrapped is not None:
            vars(dataloader)["sampler"] = Endless(wrapped)
        return None
    sampler = getattr(batches, "sampler", dataloader.sampler)
    if stream:
        sampler = Endless()
        batches = BatchSampler(sampler, dataloader.batch_size or 1, drop_last=False)
    elif not hasattr(sampler, "epoch"):
        sampler = batches
    if not hasattr(sampler, "epoch"):
        return None
    seeded = SeededBatches(
        batches,
        sampler,
        dataloader,
        seed=seed,
        rank=topology.batch.rank,
        history=history,
        generator=dataloader.generator if ours else None,
    )
    with_batches(dataloader, seeded)
    return seeded
