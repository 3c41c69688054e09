"""What a rank reads of loaders, samplers and batch samplers of a user's own classes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from lightning_megatron import ConfigError
from lightning_megatron.data.reading.sharding import Share, share_of

SAMPLES = list(range(8))


def share(loader: Any, rank: int = 0, ranks: int = 1, tp: int = 1, **options: Any) -> Share:
    topology: Any = SimpleNamespace(
        batch=SimpleNamespace(rank=rank, size=ranks), world_size=ranks * tp
    )
    return share_of(loader, topology, seed=1, **options)


def read(loader: Any, **options: Any) -> list[list[int]]:
    return [batch.tolist() for batch in share(loader, **options).loader]


class Bundles(DataLoader[Any]):
    """Makes its sampler itself, as loaders of scvi-tools do: its constructor takes none."""

    def __init__(self, samples: Any, size: int, *, shuffle: bool = False) -> None:
        order: Any = RandomSampler(samples) if shuffle else range(len(samples))
        batches: Any = BatchSampler(order, size, drop_last=False)
        super().__init__(samples, sampler=batches, batch_size=None, collate_fn=self.take)
        self.samples = samples

    def take(self, indices: list[int]) -> torch.Tensor:
        return torch.tensor(indices)


class Rows:
    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: Any) -> Any:
        return index


def test_no_constructor_of_a_subclass_runs() -> None:
    given = Bundles(Rows(), 2)
    before = dict(vars(given))
    assert read(given) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert read(given, rank=1, ranks=2) == [[2, 3], [6, 7]]
    assert vars(given) == before
    assert type(share(given).loader) is Bundles
    order = [index for batch in read(Bundles(Rows(), 2, shuffle=True)) for index in batch]
    assert sorted(order) == SAMPLES != order


class Pipe(DataLoader[Any]):
    """Goes on with what torch's loader reads."""

    def __iter__(self) -> Any:
        return (batch + 100 for batch in super().__iter__())


class Chain(DataLoader[Any]):
    """Reads other loaders in turn, and asks for none of its own batches."""

    def __init__(self, parts: list[Any]) -> None:
        super().__init__(parts[0].dataset, batch_size=parts[0].batch_size)
        self.parts = parts

    def __iter__(self) -> Any:
        return (batch for part in self.parts for batch in part)


def test_a_loader_that_reads_by_itself() -> None:
    pipe, chain = Pipe(SAMPLES, 2), Chain([DataLoader(SAMPLES, 4), DataLoader(SAMPLES, 2)])
    for one in (pipe, chain):
        alone = share(one)
        assert alone.untouched
        assert alone.loader is one
        assert not alone.is_known
    divided = share(pipe, rank=1, ranks=2)
    assert [batch.tolist() for batch in divided.loader] == [[101, 103], [105, 107]]
    assert divided.is_known
    assert read(pipe, tp=2) == read(pipe)
    divided = share(chain, rank=1, ranks=2)
    assert next(iter(divided.loader)).tolist() == [0, 1, 2, 3]
    assert not divided.is_known


class Curriculum(Sampler[int]):
    """Goes on where training says."""

    hardest = 2

    def __iter__(self) -> Iterator[int]:
        return (index % self.hardest for index in SAMPLES)

    def __len__(self) -> int:
        return len(SAMPLES)


def test_a_sampler_that_the_trainer_leaves_alone() -> None:
    given: Any = DataLoader(SAMPLES, 4, sampler=Curriculum())
    alone = share(given, ranks=2, divide=False)
    assert alone.untouched
    batches = iter(alone.loader)
    assert next(batches).tolist() == [0, 1, 0, 1]
    given.sampler.hardest = 4
    assert next(batches).tolist() == [0, 1, 2, 3]
    assert not share(given).untouched  # whose order is drawn ahead, to go on exactly
    assert not share(given, divide=False, tp=2).untouched  # so that peers read the same
    assert not share(DataLoader(SAMPLES, 4, shuffle=True), divide=False).untouched


class Reversed(BatchSampler):
    """A batch sampler that asks its sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(list(super().__iter__())[::-1])


class Prepared(BatchSampler):
    """One that asked it long ago."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.batches = list(super().__iter__())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


def test_a_batch_sampler_with_a_sampler() -> None:
    order: Any = range(len(SAMPLES))
    given: Any = DataLoader(SAMPLES, batch_sampler=Reversed(order, 2, False))
    assert read(given, rank=1, ranks=2) == [[5, 7], [1, 3]]
    assert given.batch_sampler.sampler is order
    given = DataLoader(SAMPLES, batch_sampler=Prepared(order, 2, False))
    assert read(given) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ConfigError, match=r"batch_sampler=Prepared: .* does not ask it"):
        read(given, rank=1, ranks=2)
