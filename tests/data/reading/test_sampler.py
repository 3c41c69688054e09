"""One order for every number of ranks, from any position."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_megatron import ResumableSampler
from lightning_megatron.data.reading.sampler import Division


def batches(samples: int, consumed: int, ranks: int, size: int, drop_last: bool) -> list[list[int]]:
    """What each step reads over all ranks, in the order of the ranks."""
    by_rank = []
    for rank in range(ranks):
        division = Division(rank=rank, ranks=ranks, batch_size=size, drop_last=drop_last)
        sampler = ResumableSampler(samples, seed=4).divided(division)
        assert len(list(sampler)) == len(sampler)
        sampler.seek(1, consumed)
        by_rank.append(list(BatchSampler(sampler, size, drop_last)))
    return [sum(step, []) for step in zip(*by_rank, strict=True)]


def order(samples: int, consumed: int = 0, epoch: int = 1) -> list[int]:
    sampler = ResumableSampler(samples, seed=4)
    sampler.seek(epoch, consumed)
    return list(sampler)


@given(
    samples=st.integers(1, 40),
    part=st.floats(0, 0.99),
    ranks=st.integers(1, 5),
    size=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_ranks_together_read_what_one_process_reads(
    samples: int, part: float, ranks: int, size: int, drop_last: bool
) -> None:
    consumed = int(part * samples)
    one = order(samples)[consumed:]
    assert order(samples, consumed) == one
    steps = batches(samples, consumed, ranks, size, drop_last)
    width = ranks * size
    expected = [one[i : i + width] for i in range(0, len(one), width)]
    if drop_last and len(one) % width:
        expected.pop()
    assert [set(step) for step in steps] == [set(step) for step in expected]
    # Only a remainder of fewer samples than ranks is read more than once.
    for step, wanted in zip(steps, expected, strict=True):
        assert len(step) == max(len(wanted), ranks)


def test_every_epoch_has_its_order_which_is_that_of_the_distributed_sampler() -> None:
    theirs = DistributedSampler(range(12), num_replicas=1, rank=0, seed=4)  # type: ignore[arg-type]
    for epoch in range(3):
        theirs.set_epoch(epoch)
        assert order(12, epoch=epoch) == list(theirs)
    assert len({tuple(order(12, epoch=epoch)) for epoch in range(5)}) == 5
    assert list(ResumableSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]


def test_a_state_brings_another_sampler_to_the_same_place() -> None:
    one = ResumableSampler(10, seed=3)
    one.set_epoch(2)
    indices = iter(one)
    read = [next(indices) for _ in range(4)]
    other = ResumableSampler(10)
    other.load_state_dict(one.state_dict())
    assert [*read, *other] == [*read, *indices]
    assert sorted([*read, *order_of(one, 2, 4)]) == list(range(10))
    with pytest.raises(ValueError, match="10 samples, the dataset has 11"):
        ResumableSampler(11).load_state_dict(one.state_dict())


def order_of(sampler: ResumableSampler, epoch: int, consumed: int) -> list[int]:
    sampler.seek(epoch, consumed)
    return list(sampler)


def test_only_the_first_pass_begins_in_the_middle() -> None:
    sampler = ResumableSampler(6, shuffle=False)
    sampler.seek(1, 4)
    sampler.set_epoch(1)  # as Lightning does, once the epoch is known
    assert list(sampler) == [4, 5]
    sampler.set_epoch(2)
    assert list(sampler) == list(range(6))


def test_it_works_in_a_loader_without_any_strategy() -> None:
    data = torch.arange(9)
    loader = DataLoader(data, batch_size=4, sampler=ResumableSampler(data, seed=1))  # type: ignore[arg-type]
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(9))


def test_a_million_samples_are_skipped() -> None:
    sampler = ResumableSampler(2_000_000, seed=1).divided(Division(ranks=8, rank=3, batch_size=4))
    sampler.seek(2, 0)
    whole = list(sampler)
    sampler.seek(2, 1_000_000)
    assert list(sampler) == whole[125_000:]
