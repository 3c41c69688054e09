"""Training loaders of every kind that a user may bring, over the same augmented samples."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_megatron import ResumableSampler
from tests.strategy.resuming import SAMPLES, Augmented, augmented_loader


class Wandering(Sampler[int]):
    """Random numbers from the global generator, and a state of its own."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        shift = self.passes
        return iter([(i + shift) % SAMPLES for i in torch.randperm(SAMPLES).tolist()])

    def __len__(self) -> int:
        return SAMPLES

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes = state["passes"]


class Pairs(Sampler[list[int]]):
    """A batch sampler that knows nothing of samplers."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[i : i + self.size] for i in range(0, SAMPLES, self.size)])

    def __len__(self) -> int:
        return -(-SAMPLES // self.size)


class Stream(IterableDataset[Any]):
    """A stream that is shared out among workers, and knows no length."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        data = Augmented()
        return (data[i] for i in range(first, SAMPLES, step))


class StatefulStream(IterableDataset[Any]):
    """One that can go on where it was."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Any]:
        data = Augmented()
        while self.next < SAMPLES:
            self.next += 1
            yield data[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class StatefulLoader:
    """Not a DataLoader at all; it keeps its own state."""

    def __init__(self, size: int) -> None:
        self.size, self.batch, self.resumed = size, 0, False

    def __iter__(self) -> Iterator[Any]:
        self.batch = self.batch if self.resumed else 0
        self.resumed = False
        while self.batch < len(self):
            indices = range(self.batch * self.size, min((self.batch + 1) * self.size, SAMPLES))
            self.batch += 1
            yield torch.ones(len(indices), 4, dtype=torch.float64), torch.tensor(indices)

    def __len__(self) -> int:
        return -(-SAMPLES // self.size)

    def state_dict(self) -> dict[str, int]:
        return {"batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batch, self.resumed = state["batch"], True


def weighted(size: int, workers: int) -> Any:
    weights = torch.arange(1.0, SAMPLES + 1).tolist()
    generator = torch.Generator().manual_seed(1)
    sampler = WeightedRandomSampler(weights, SAMPLES, generator=generator)
    return DataLoader(Augmented(), size, sampler=sampler)


def replaced(size: int, workers: int) -> Any:
    """The loader and its sampler share a generator, as ``DataLoader(generator=...)`` has it."""
    generator = torch.Generator().manual_seed(1)
    sampler = RandomSampler(range(SAMPLES), replacement=True, generator=generator)
    return DataLoader(Augmented(), size, sampler=sampler, generator=generator)


def several(size: int, workers: int) -> Any:
    short = DataLoader(Augmented(), 2 * size, shuffle=True)
    return {"long": augmented_loader(size, workers), "short": short}


def numbered(size: int, workers: int) -> Any:
    return DataLoader(Augmented(), size, sampler=ResumableSampler(SAMPLES, seed=5), drop_last=False)


LOADERS: dict[str, Any] = {
    "a sampler with a generator": weighted,
    "a generator for sampler and loader": replaced,
    "a sampler with a state": lambda size, _: DataLoader(Augmented(), size, sampler=Wandering()),
    "a batch sampler": lambda size, _: DataLoader(Augmented(), batch_sampler=Pairs(size)),
    "a ResumableSampler": numbered,
    "two loaders": several,
    "a stream": lambda size, workers: DataLoader(Stream(), size, num_workers=workers),
    "a stream with a state": lambda size, _: DataLoader(StatefulStream(), size),
    "a loader with a state": lambda size, _: StatefulLoader(size),
}
"""By what is special about them."""
