"""Sizes of global batches as a function of the position."""

from typing import Any

import pytest
import torch

from lightning_megatron.data.reading.batch_sizes import BatchSizes, NoiseScale, Rampup
from lightning_megatron.errors import ConfigError


def test_a_size_holds_from_its_position_on() -> None:
    sizes = BatchSizes([(0, 4), (20, 8), (60, 16)])
    assert [sizes.at(n) for n in (0, 19, 20, 59, 60, 10**9)] == [4, 4, 8, 8, 16, 16]


def test_rampup() -> None:
    assert BatchSizes(Rampup(start=8, end=8, increment=4, samples=10)).steps == [(0, 8)]
    assert BatchSizes(Rampup(start=2, end=8, increment=3, samples=9)).steps == [
        (0, 2),
        (4, 5),
        (9, 8),
    ]


@pytest.mark.parametrize(("lr", "factor"), [("sqrt", 2.0), ("linear", 4.0), ("none", 1.0)])
def test_rates_during_a_step(lr: Any, factor: float) -> None:
    sizes = BatchSizes([(0, 4), (8, 16)], lr)
    weight = torch.nn.Parameter(torch.zeros(1))
    groups: Any = torch.optim.SGD([{"params": [weight], "lr": 0.5}]).param_groups
    with sizes.scaled(groups, 16):
        assert groups[0]["lr"] == 0.5 * factor
    assert groups[0]["lr"] == 0.5


def test_decisions() -> None:
    sizes = BatchSizes(NoiseScale(max=16, start=4, every=8, delay=6))
    assert [sizes.decide(noise, 0) for noise in (None, -3.0, 7.9, 8.0, 1e9)] == [4, 4, 4, 8, 8]
    sizes.follow(8, 32)
    assert (sizes.at(55), sizes.at(56)) == (4, 8)
    assert sizes.decide(1e9, 56) == 16
    sizes.follow(16, 56)
    assert sizes.decide(1e9, 1000) == 16
    assert sizes.all() == [4, 8, 16]
    again = BatchSizes(NoiseScale(max=16, start=4, every=8, delay=6))
    again.load_state_dict(sizes.state_dict())
    assert again.steps == sizes.steps


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "positions begin with 0"),
        ([(1, 4)], "positions begin with 0"),
        ([(0, 4), (0, 8)], "positions begin with 0 and increase"),
        ([(0, 0)], "size=0: must be a whole number of at least 1"),
        ([4, 8], "must be a list of"),
        (128, "must be a list of"),
        (Rampup(start=8, end=4, increment=2, samples=8), "sizes grow"),
        (Rampup(start=4, end=9, increment=2, samples=8), "end=8 or end=10"),
        (Rampup(start=4, end=9, increment=0, samples=8), "increment=0"),
        (NoiseScale(max=4, start=8), "nearest valid: max=8"),
        (NoiseScale(max=8, every=4, delay=4), "nearest valid: every=5"),
    ],
)
def test_what_is_no_schedule(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        BatchSizes(given)


def test_what_is_no_rule_for_rates() -> None:
    wrong: Any = "cubic"
    with pytest.raises(ConfigError, match="lr='cubic'"):
        BatchSizes([(0, 4)], wrong)
