"""What a sample draws does not depend on who reads it, when, and what was read before."""

import pickle
import random
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_megatron.data.reading.augmentation import (
    Aside,
    Collate,
    SampleIndices,
    SampleSeeds,
    draws_random_numbers,
)
from lightning_megatron.topology.rng import HostRandomness


def drawn() -> tuple[float, ...]:
    return torch.rand(()).item(), random.random(), random.gauss(0, 1), numpy.random.rand()


def read(indices: list[int], seeds: SampleSeeds) -> dict[int, tuple[float, ...]]:
    return {i: drawn() for i in SampleIndices(indices, [seeds(i) for i in indices])}


def test_numbers_belong_to_the_sample_and_the_epoch() -> None:
    seeds = SampleSeeds.of_epoch(5, 0)
    all_of_them = read(list(range(50)), seeds)
    assert read([31, 7], seeds) == {31: all_of_them[31], 7: all_of_them[7]}
    assert len(set(all_of_them.values())) == 50
    for other in (SampleSeeds.of_epoch(5, 1), SampleSeeds.of_epoch(6, 0)):
        assert not set(read(list(range(50)), other).values()) & set(all_of_them.values())
    assert seeds("a") != seeds("b")  # keys of any kind


def test_a_worker_has_the_numbers_of_the_first_sample_before_it_goes_through_the_list() -> None:
    seeds = SampleSeeds.of_epoch(5, 0)
    batch = SampleIndices([3, 4], [seeds(3), seeds(4)], Aside())
    arrived = pickle.loads(pickle.dumps(batch))
    assert drawn() == read([3], seeds)[3]
    assert {i: drawn() for i in arrived} == read([3, 4], seeds)
    assert arrived.aside is None


@pytest.mark.parametrize("end", ["collated", "stopped", "failed"])
def test_the_process_keeps_its_own_numbers(end: str) -> None:
    position = HostRandomness.capture()
    expected = drawn()
    position.restore()
    aside = Aside()
    batch = SampleIndices([1, 2], [1, 2], aside)
    if end == "collated":
        samples = [drawn() for _ in batch]
        assert Collate(list, aside)(samples) == samples
    elif end == "stopped":  # as the fetcher of an iterable dataset does
        for _ in batch:
            drawn()
            break
    else:
        with pytest.raises(ZeroDivisionError):
            _ = [drawn()[0] / 0 for _ in batch]
    assert drawn() == expected


def test_all_generators_go_through_tensors() -> None:
    random.gauss(0, 1)  # half of a pair is kept
    position = HostRandomness.capture()
    tensors = {name: part.clone() for name, part in position.to_tensors().items()}
    expected = drawn()
    HostRandomness.from_tensors(tensors).restore()
    assert drawn() == expected


def test_a_dataset_that_draws_nothing_is_left_alone() -> None:
    class Plain(Dataset[Any]):
        pass

    class Declared(Plain):
        draws_random_numbers = False

    tensors = TensorDataset(torch.arange(4))
    assert draws_random_numbers(Plain())
    assert draws_random_numbers(ConcatDataset([tensors, Subset(Sized(), [0])]))
    for dataset in (tensors, Declared(), Subset(tensors, [1]), ConcatDataset([tensors, tensors])):
        assert not draws_random_numbers(dataset)


class Sized(Dataset[Any]):
    def __len__(self) -> int:
        return 1
