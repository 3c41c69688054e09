"""Samplers by length: the same batches on any number of ranks, little padding, exact positions."""

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from lightning_megatron import ConfigError, LengthGrouped, ResumableSampler, TokenBudget
from lightning_megatron.data.reading.sampler import Division

LENGTHS = [int(x) for x in np.random.default_rng(1).lognormal(3, 1, 4000).clip(1, 200)]


def padding(batches: list[list[int]], lengths: list[int] = LENGTHS) -> float:
    """Share of the batches that is padding."""
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    return 1 - sum(lengths[i] for batch in batches for i in batch) / padded


def budget(**options: Any) -> TokenBudget:
    return TokenBudget(LENGTHS, **{"tokens_per_batch": 2048, "samples_multiple": 4, **options})


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=60),
    more=st.integers(0, 200),
    multiple=st.sampled_from([1, 2, 4, 6]),
    pad=st.integers(1, 4),
    max_padding=st.sampled_from([0.0, 0.1, 0.5]),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    epoch=st.integers(0, 2),
)
def test_batches_keep_the_budget_and_hold_each_sample_once(
    lengths: list[int],
    more: int,
    multiple: int,
    pad: int,
    max_padding: float,
    drop_last: bool,
    shuffle: bool,
    epoch: int,
) -> None:
    padded = [-(-length // pad) * pad for length in lengths]
    tokens, rest = multiple * max(padded) + more, len(lengths) % multiple
    options: dict[str, Any] = {"samples_multiple": multiple, "pad_multiple": pad}
    options |= {"max_padding": max_padding, "drop_last": drop_last, "shuffle": shuffle}
    shortest = sorted(padded)[: multiple + rest]
    few = len(lengths) < multiple
    homeless = not few and rest and not drop_last and len(shortest) * shortest[-1] > tokens
    if few or homeless:
        with pytest.raises(ConfigError, match="drop_last=True" if homeless else "a batch has at"):
            TokenBudget(lengths, tokens_per_batch=tokens, **options)
        return
    sampler = TokenBudget(lengths, tokens_per_batch=tokens, **options)
    sampler.set_epoch(epoch)
    batches = list(sampler)
    read = sorted(i for batch in batches for i in batch)
    assert len(batches) == len(sampler)  # in every epoch
    assert len(set(read)) == len(read) == len(lengths) - (rest if drop_last else 0)
    uneven = 0
    for batch in batches:
        assert len(batch) >= multiple
        assert len(batch) * max(padded[i] for i in batch) <= tokens
        uneven += bool(len(batch) % multiple)
    assert uneven == (rest > 0 and not drop_last)
    for ranks in (r for r in range(1, multiple + 1) if multiple % r == 0):
        parts = [list(sampler.divided(rank, ranks)) for rank in range(ranks)]
        for batch, *mine in zip(batches, *parts, strict=True):
            assert sorted(sum(mine, [])) == sorted(batch)
            assert max(map(len, mine)) - min(map(len, mine)) <= len(batch) % ranks
            assert all(mine)


def test_epochs_make_other_batches_with_little_padding() -> None:
    sampler = budget()
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
        assert padding(epochs[-1]) < 0.1
    assert padding(list(BatchSampler(ResumableSampler(4000), 28, drop_last=False))) > 0.5
    made = [{frozenset(batch) for batch in epoch} for epoch in epochs]
    assert len(made[0] & made[1]) < 0.1 * len(made[0])
    firsts = [epoch[0] for epoch in epochs]
    assert firsts[0] != firsts[1] != firsts[2]
    longest = [max(LENGTHS[i] for i in batch) for batch in budget(shuffle=False)]
    assert longest == sorted(longest, reverse=True)


def test_a_budget_goes_on_after_any_batch() -> None:
    one = budget()
    one.set_epoch(1)
    batches = iter(one)
    read = [next(batches) for _ in range(3)]
    other = budget()
    other.load_state_dict(one.state_dict())
    assert [*read, *other] == [*read, *batches]
    assert len(list(other)) == len(other)  # only the first pass begins in the middle
    with pytest.raises(ConfigError, match="other lengths or options"):
        budget(tokens_per_batch=1024).load_state_dict(one.state_dict())


def test_a_loader_that_is_divided_again_is_divided_anew() -> None:
    part = budget().divided(1, 2)
    assert list(part.divided(0, 1)) == list(budget())
    assert list(copy.copy(part)) == list(part)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_batch": 100}, r"4\): so many|nearest valid: tokens_per_batch=800"),
        ({"tokens_per_batch": 0}, "at least 1"),
        ({"samples_multiple": 4001, "tokens_per_batch": 10**6}, "samples_multiple=4000"),
        ({"max_padding": 1.0}, r"max_padding=1.0: must lie in \[0, 1\)"),
        ({"drop_last": "no"}, "drop_last='no'"),
    ],
)
def test_a_budget_says_what_is_wrong(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        budget(**options)


def test_ranks_that_cannot_share_a_batch_are_told() -> None:
    with pytest.raises(ConfigError, match="with 3 data-parallel ranks.*samples_multiple=6"):
        budget().divided(0, 3)
    for lengths, message in (
        ([3, 0, 2], r"lengths\[1\]=0"),
        ([], "at least one sample"),
        ([1.5], "float"),
    ):
        with pytest.raises(ConfigError, match=message):
            LengthGrouped(lengths, batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("ranks", "size"), [(1, 28), (4, 7), (2, 14)])
def test_grouped_samples_are_divided_like_any_order(ranks: int, size: int) -> None:
    sampler = LengthGrouped(LENGTHS, batch_size=28, window=50, seed=3)
    sampler.set_epoch(2)
    order = sampler.order().tolist()
    assert sorted(order) == list(range(4000))
    one = [order[i : i + 28] for i in range(0, 4000, 28)]
    assert padding(one) < 0.35
    parts = []
    for rank in range(ranks):
        part = sampler.divided(Division(rank=rank, ranks=ranks, batch_size=size))
        part.seek(2, 280)
        parts.append(list(BatchSampler(part, size, drop_last=False)))
    together = [sorted(sum(step, [])) for step in zip(*parts, strict=True)]
    assert together == [sorted(batch) for batch in one[10:]]


def test_grouped_samples_are_shuffled_in_each_epoch() -> None:
    sampler = LengthGrouped(LENGTHS, batch_size=32, window=4)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        order = list(sampler)
        epochs.append([order[i : i + 32] for i in range(0, 4000, 32)])
        # Batches of a window do not come by length.
        means = [np.mean([LENGTHS[i] for i in batch]) for batch in epochs[-1]]
        falls = [a > b for a, b in zip(means, means[1:], strict=False)]
        assert not all(falls[:3]) or not all(falls[4:7]) or not all(falls[8:11])
    assert {frozenset(b) for b in epochs[0]}.isdisjoint(frozenset(b) for b in epochs[1])
