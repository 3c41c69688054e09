"""What a spike is: properties that hold for any curve."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.fault_tolerance.numbers.spikes import (
    SpikeConfig,
    SpikeHistory,
    spike_limit,
    spread,
)

LOSSES = st.lists(st.floats(0.01, 100.0), min_size=8, max_size=60)


@given(LOSSES, st.randoms(use_true_random=False), st.floats(0.1, 10.0))
def test_the_limit_knows_no_order_and_follows_the_scale(
    losses: list[float], shuffler: random.Random, factor: float
) -> None:
    config = SpikeConfig(warmup=8)
    limit = spike_limit(losses, config)
    shuffled = list(losses)
    shuffler.shuffle(shuffled)
    assert spike_limit(shuffled, config) == limit
    assert limit > max(sorted(losses)[: len(losses) // 2 + 1])
    assert spike_limit([factor * x for x in losses], config) == pytest.approx(factor * limit)


@given(LOSSES, st.floats(1e3, 1e30), st.floats(0.0, 0.49))
def test_less_than_half_of_the_history_cannot_hide_a_spike(
    losses: list[float], huge: float, part: float
) -> None:
    spoiled = list(losses)
    count = math.ceil(len(losses) * part) - 1
    for index in range(max(count, 0)):
        spoiled[index] = huge
    middle, width = spread(spoiled)
    assert middle <= max(losses)
    assert width <= 1.4826 * max(losses)


@given(st.integers(0, 1000), st.floats(0.001, 0.2), st.floats(1.0, 20.0))
def test_noise_is_no_spike_and_ten_times_the_loss_is_one(
    seed: int, noise: float, level: float
) -> None:
    generator, history = random.Random(seed), SpikeHistory(SpikeConfig())
    for step in range(300):  # falls to half, and scatters
        loss = level * (0.5 + 0.5 * math.exp(-step / 50)) * (1 + generator.uniform(-noise, noise))
        assert history.exceeds(loss) is None
    limit = history.exceeds(10 * level)
    assert limit is not None
    assert level * 0.5 < limit < 10 * level
    assert history.exceeds(level * 0.5) is None  # the spike has left no trace


def test_warmup_level_and_state() -> None:
    config = SpikeConfig(warmup=4, history=8, patience=3)
    history = SpikeHistory(config)
    assert [history.exceeds(loss) for loss in (1.0, 50.0, 1.0, 1.0)] == [None] * 4
    other = SpikeHistory(config)
    other.load_state_dict(history.state_dict())
    for one in (history, other):
        assert one.exceeds(30.0) is not None
        assert one.exceeds(30.0) is not None
        assert one.exceeds(30.0) is None  # that is where the curve is now
        assert one.exceeds(90.0) is None  # and the warmup begins again
    assert other.state_dict() == history.state_dict()


def test_wrong_numbers() -> None:
    faults = SpikeConfig(deviations=0.5, warmup=200).problems()
    assert faults == [
        "spikes.deviations=0.5: must be at least 1.0; nearest valid: deviations=1.0",
        "spikes.warmup=200, history=128: must be at most history; nearest valid: warmup=128",
    ]


def test_losses_below_zero_have_a_floor_too() -> None:
    config = SpikeConfig(warmup=4, deviations=10.0, floor=0.02)
    assert spike_limit([-5.0] * 4, config) == pytest.approx(-5.0 + 10 * 0.02 * 5.0)


def test_a_restored_history_is_the_saved_one_amid_a_row_of_spikes() -> None:
    config = SpikeConfig(warmup=2, history=8, patience=3)
    history, other = SpikeHistory(config), SpikeHistory(config)
    for loss in (1.0, 1.0, 1.0, 30.0, 30.0):
        history.exceeds(loss)
    for loss in (500.0, 500.0):
        other.exceeds(loss)
    other.load_state_dict(history.state_dict())
    assert other.state_dict() == history.state_dict() == {"losses": [1.0] * 3, "in_a_row": 2}
    assert other.exceeds(30.0) is None  # the third in a row
    assert other.state_dict()["losses"] == [30.0]


def test_what_is_no_spike_ends_the_row() -> None:
    history = SpikeHistory(SpikeConfig(warmup=2, history=8, patience=2))
    found = [history.exceeds(loss) for loss in (1.0, 1.0, 30.0, 1.0, 30.0, 30.0)]
    assert [limit is not None for limit in found] == [False, False, True, False, True, False]
