"""Words about faults: which ranks, which data, which parameters; and when two are the same."""

import math

import torch

from lightning_megatron.fault_tolerance.numbers.diagnosis import (
    BadNumber,
    Window,
    bad_gradients,
    bad_loss,
    in_words,
    not_finite,
    spike,
)
from lightning_megatron.topology.degrees import Degrees

BAD = math.nan


def fault(value: float = 1.0, ranks: tuple[int, ...] = (0,), detail: str = "a") -> BadNumber:
    return BadNumber(what="loss", value=value, ranks=ranks, detail=detail)


def test_faults_are_the_same_by_kind_value_and_ranks() -> None:
    assert fault().is_same_as(fault(detail="in other words"))
    assert fault(BAD).is_same_as(fault(BAD))
    assert not fault(BAD).is_same_as(fault(1.0))
    assert not fault(1.0).is_same_as(fault(2.0))
    assert not fault(ranks=(0,)).is_same_as(fault(ranks=(1,)))
    other = BadNumber(what="gradients", value=1.0, ranks=(0,), detail="a")
    assert not fault().is_same_as(other)


def test_first_batch_with_a_bad_loss_is_named_with_who_read_it() -> None:
    degrees = Degrees(dp_replicate=2, dp_shard=2, tp=2)
    fine = (1.0,) * 8
    losses = [fine, (1.0,) * 6 + (math.inf,) * 2, (1.0,) * 6 + (BAD,) * 2]
    found = bad_loss(Window(batches=[7, 8, 9], losses=losses), degrees)
    assert found is not None
    assert (found.value, found.ranks) == (math.inf, (6, 7))
    assert found.detail == (
        "the loss of batch 8 is inf on ranks 6, 7, which read the data of data-parallel rank 3"
    )
    assert bad_loss(Window(batches=[7], losses=[fine]), degrees) is None


def test_every_rank_and_a_single_one() -> None:
    window = Window(batches=[3], losses=[(BAD, BAD)])
    found = bad_loss(window, Degrees(dp_shard=2))
    assert found is not None
    assert found.detail == "the loss of batch 3 is nan on every rank"
    found = bad_loss(Window(batches=[3], losses=[(BAD,)]), Degrees())
    assert found is not None
    assert found.detail == "the loss of batch 3 is nan"


def test_a_spike_names_the_ranks_above_the_limit_unless_all_are() -> None:
    window = Window(batches=[4, 5], losses=[(1.0, 9.0), (1.0, 11.0)])
    found = spike(window, 5.5, 3.0)
    assert (found.value, found.ranks) == (5.5, (1,))
    assert found.detail.startswith(
        "the loss of batch 5 is 5.5, most on rank 1, above the limit of 3"
    )
    assert "most on" not in spike(window, 5.5, 0.5).detail
    assert spike(window, 5.5, 10.0).ranks == ()  # a mean of both batches, not the last one


def test_gradients_name_the_one_nearest_the_loss() -> None:
    gradients = [
        (name, torch.tensor([1.0, bad]))
        for name, bad in zip("abc", (1.0, BAD, math.inf), strict=True)
    ]
    found = bad_gradients(BAD, [not_finite(gradients)])
    assert found.ranks == (0,)
    assert found.detail == (
        "the norm of the gradients is nan; those of 2 parameters are not finite, c nearest the loss"
    )
    assert (
        bad_gradients(math.inf, [not_finite(gradients[:1])]).detail
        == "the norm of the gradients is inf"
    )


def test_eight_ranks_are_shown() -> None:
    assert in_words(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert in_words(range(9)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..."
