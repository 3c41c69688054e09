import numpy as np
import pytest

from lightning_megatron.data.tokens.blend import BLOCK, Blend, key_of, permuted, quotas


def test_samples_of_a_source_are_counted_without_gaps() -> None:
    blend = Blend({0: [0.7, 0.2, 0.1], 1000: [0.1, 0, 0.9], 1500: [1, 1, 1]}, seed=3)
    sources, numbers = blend.at(np.arange(BLOCK + 3000))
    for source in range(3):
        mine = numbers[sources == source]
        assert np.array_equal(mine, np.arange(len(mine)))
    assert not (sources[1000:1500] == 1).any()
    for position in (0, 1, 999, 1000, 1234, 1500, BLOCK + 1499, BLOCK + 1500, BLOCK + 2999):
        counted = np.bincount(sources[:position], minlength=3)
        assert np.array_equal(blend.taken(position), counted), position


def test_any_part_of_the_order_is_that_of_the_whole() -> None:
    make = lambda: Blend({0: [2, 3], 700: [3, 2]}, seed=1)  # noqa: E731
    whole = make().at(np.arange(2000))
    backwards = np.arange(2000)[::-1]
    for part in (slice(1990, 2000), slice(650, 750), slice(0, 3)):
        found = make().at(np.arange(2000)[part])
        assert all(np.array_equal(a, b[part]) for a, b in zip(found, whole, strict=True))
    assert all(np.array_equal(a[::-1], b) for a, b in zip(make().at(backwards), whole, strict=True))


def test_every_part_has_the_shares_of_the_weights() -> None:
    weights = np.array([0.6, 0.3, 0.0995, 0.0005])
    sources, _ = Blend({0: weights.tolist()}, seed=5).at(np.arange(40_000))
    for first, last in ((0, 100), (0, 5_000), (12_345, 22_345), (0, 40_000)):
        counts = np.bincount(sources[first:last], minlength=4)
        # Shuffling moves samples by 64 at most, and few of these across the ends.
        assert np.abs(counts - weights * (last - first)).max() < 12, (first, last)


def test_neighbours_are_not_in_a_regular_order() -> None:
    sources, _ = Blend({0: [1, 1]}, seed=0).at(np.arange(4096))
    assert 0.4 < sources[::2].mean() < 0.6  # what the first of two ranks reads
    other, _ = Blend({0: [1, 1]}, seed=1).at(np.arange(4096))
    assert 0.4 < (sources == other).mean() < 0.6


def test_quotas() -> None:
    assert quotas([1]).tolist() == [BLOCK]
    assert quotas([0, 5, 0]).tolist() == [0, BLOCK, 0]
    many = quotas(np.full(1000, 0.001).tolist())
    assert many.sum() == BLOCK
    assert many.max() - many.min() == 1


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_permutation(size: int) -> None:
    orders = {tuple(permuted(np.arange(size), size, key_of(seed)).tolist()) for seed in range(50)}
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len(orders) >= min(50, [1, 2, 6][min(size, 3) - 1])
    keys = np.array([key_of(0), key_of(1)] * size, dtype=np.uint64)
    mixed = permuted(np.repeat(np.arange(size), 2), size, keys)
    assert np.array_equal(mixed[::2], permuted(np.arange(size), size, key_of(0)))
    assert np.array_equal(mixed[1::2], permuted(np.arange(size), size, key_of(1)))


def test_permutations_prefer_no_place() -> None:
    size, draws = 6, 1200
    counts = np.zeros((size, size))
    for seed in range(draws):
        counts[np.arange(size), permuted(np.arange(size), size, key_of("x", seed))] += 1
    expected = draws / size
    assert ((counts - expected) ** 2 / expected).sum() / (size - 1) ** 2 < 2
    order = permuted(np.arange(5000), 5000, key_of(7))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
