"""The choice of what to recompute is the best there is."""

import itertools
import random
from functools import partial

import pytest

from lightning_megatron.parallel.knapsack import BlockCosts, choose, needed


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_against_all_choices(seed: int, in_order: bool) -> None:
    draw = random.Random(seed)
    blocks = []
    for _ in range(draw.randint(1, 7)):
        size, seconds = draw.randint(1, 9), draw.choice([1.0, draw.random()])
        kept = size + draw.randint(0, 30)
        blocks.append(
            BlockCosts(
                seconds=seconds,
                kept=kept,
                input=size,
                # Sometimes of no use, as it keeps or takes more than another way.
                selective_seconds=draw.choice([None, seconds * draw.uniform(0.0, 1.2)]),
                selective_kept=draw.randint(size, kept + 2),
                live=1 if in_order else draw.randint(1, 3),
            )
        )
    possible = list(itertools.product(*(block.ways for block in blocks)))
    nothing, everything = ("none",) * len(blocks), ("full",) * len(blocks)
    size_of = partial(needed, blocks, in_order=in_order)
    for limit in (0, draw.randint(1, 100), draw.randint(50, 300), size_of(nothing)):
        fitting = [ways for ways in possible if size_of(ways) <= limit]
        found = choose(blocks, limit, in_order=in_order)
        if found is None:
            assert everything not in fitting
            continue
        assert size_of(found) <= limit
        cost = sum(block.time(way) for block, way in zip(blocks, found, strict=True))
        least = min(sum(b.time(w) for b, w in zip(blocks, ways, strict=True)) for ways in fitting)
        assert cost == pytest.approx(least)


def test_the_last_blocks_are_kept_where_one_microbatch_is_under_way() -> None:
    blocks = [BlockCosts(seconds=1.0, kept=10, input=1)] * 4
    assert choose(blocks, 22, in_order=True) == ("full", "full", "none", "none")
    assert choose(blocks, 22) == ("full", "full", "full", "full")


def test_many_blocks_of_real_sizes_are_quick() -> None:
    draw = random.Random(0)
    blocks = [
        BlockCosts(
            seconds=1 + draw.random(),
            kept=draw.randint(10**9, 2 * 10**9),
            input=10**7,
            selective_seconds=draw.random() / 10,
            selective_kept=draw.randint(3 * 10**8, 5 * 10**8),
            live=4,
        )
        for _ in range(40)
    ]
    limit = needed(blocks, ("none",) * 40) // 2
    found = choose(blocks, limit)
    assert found is not None
    assert needed(blocks, found) <= limit
    assert "full" not in found, "what is cheap and saves nearly as much is enough"
