"""The choice of blocks to recompute is the best there is."""

import itertools
import random

import pytest

from lightning_megatron.parallel.knapsack import BlockCosts, choose_recomputed, needed


@pytest.mark.parametrize("seed", range(40))
def test_against_all_choices(seed: int) -> None:
    draw = random.Random(seed)
    blocks = []
    for _ in range(draw.randint(1, 9)):
        size = draw.randint(1, 9)
        blocks.append(
            BlockCosts(
                seconds=draw.choice([1.0, draw.random()]),
                kept=size + draw.randint(0, 30),
                input=size,
                live=draw.randint(1, 3),
            )
        )
    numbers = range(len(blocks))
    subsets = [c for n in range(len(blocks) + 1) for c in itertools.combinations(numbers, n)]
    for limit in (0, draw.randint(1, 100), draw.randint(50, 300), needed(blocks, ())):
        fitting = [c for c in subsets if needed(blocks, c) <= limit]
        found = choose_recomputed(blocks, limit)
        if found is None:
            assert not any(c == tuple(numbers) for c in fitting)
            continue
        assert needed(blocks, found) <= limit
        cost = sum(blocks[i].seconds for i in found)
        assert cost == pytest.approx(min(sum(blocks[i].seconds for i in c) for c in fitting))


def test_many_blocks_of_real_sizes_are_quick() -> None:
    draw = random.Random(0)
    blocks = [
        BlockCosts(seconds=draw.random(), kept=draw.randint(10**9, 2 * 10**9), input=10**7, live=4)
        for _ in range(40)
    ]
    limit = needed(blocks, ()) // 2
    found = choose_recomputed(blocks, limit)
    assert found is not None
    assert needed(blocks, found) <= limit
    by_value = sorted(range(40), key=lambda i: blocks[i].seconds)
    assert sum(blocks[i].seconds for i in found) < 0.5 * sum(b.seconds for b in blocks)
    assert by_value
