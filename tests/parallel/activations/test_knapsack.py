"""The choice of what to recompute is the best there is, and what it takes is counted right."""

import itertools
import random
from collections.abc import Sequence

import pytest

from lightning_megatron.parallel.activations.knapsack import (
    BlockCosts,
    RecomputeMode,
    choose,
    needed,
)
from lightning_megatron.schedules.actions import Action, Kind
from lightning_megatron.schedules.live_activations import ALONE, LiveCount, beside, moments
from lightning_megatron.schedules.schedule import make_schedule

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zbv": 2, "v-half": 2}
"""With stages per rank; the first two hold stages whose backwards are in one piece."""


def drawn(draw: random.Random, count: int, stages: Sequence[int]) -> list[BlockCosts]:
    """Blocks of some stages, in the order in which they run."""
    blocks = []
    for stage in sorted(draw.choice(stages) for _ in range(count)):
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
                stage=stage,
            )
        )
    return blocks


def some_moments(draw: random.Random, name: str | None) -> tuple[LiveCount, ...]:
    if name is None:
        return ALONE
    ranks, count = draw.randint(2, 4), draw.randint(1, 6)
    return moments(make_schedule(name, ranks, count).row(draw.randrange(ranks)))


@pytest.mark.parametrize("name", [None, *SCHEDULES])
@pytest.mark.parametrize("seed", range(6))
def test_against_all_choices(seed: int, name: str | None) -> None:
    draw = random.Random(seed)
    when = some_moments(draw, name)
    blocks = drawn(draw, draw.randint(1, 6), list(when[0].waiting))
    possible = list(itertools.product(*(block.ways for block in blocks)))
    nothing, everything = ("none",) * len(blocks), ("full",) * len(blocks)
    sizes = {ways: needed(blocks, ways, when) for ways in possible}
    times = {w: sum(b.time(one) for b, one in zip(blocks, w, strict=True)) for w in possible}
    for part in (-0.1, draw.random(), draw.random(), 1.0):
        limit = int(sizes[everything] + part * (sizes[nothing] - sizes[everything]))
        fitting = [ways for ways in possible if sizes[ways] <= limit]
        found = choose(blocks, limit, when)
        if found is None:
            assert everything not in fitting
            continue
        assert sizes[found] <= limit
        if name in (None, "gpipe", "1f1b"):
            assert times[found] == pytest.approx(min(times[ways] for ways in fitting))


def peak(
    actions: Sequence[Action], blocks: Sequence[BlockCosts], ways: Sequence[RecomputeMode]
) -> int:
    """The most bytes that a rank holds, by holding them."""
    held: dict[tuple[int, int, int], int] = {}
    most = 0
    for kind, stage, microbatch in actions:
        order = [i for i, block in enumerate(blocks) if block.stage == stage]
        for i in order if kind is Kind.FORWARD else reversed(order):
            key, block, way = (stage, microbatch, i), blocks[i], ways[i]
            if kind is Kind.FORWARD:
                held[key] = block.bytes(way)
            elif kind is Kind.BACKWARD_INPUT:
                held[key] = block.kept
            again = block.again(way) if kind is Kind.BACKWARD else 0
            most = max(most, sum(held.values()) + again)
            if kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                del held[key]
    return most


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_rank_holds_is_counted_as_it_holds_it(name: str) -> None:
    for seed in range(12):
        draw = random.Random(seed)
        ranks, count = draw.randint(2, 4), draw.randint(1, 7)
        schedule = make_schedule(name, ranks, count)
        rank = draw.randrange(ranks)
        blocks = drawn(draw, 6, schedule.stages_of_rank(rank))
        ways = [draw.choice(block.ways) for block in blocks]
        found = needed(blocks, ways, moments(schedule.row(rank)))
        assert found == peak(schedule.row(rank), blocks, ways)


def test_what_runs_on_every_stage_is_held_to_the_end() -> None:
    """At the latest when it runs backward, nothing of the stages is left."""
    row = make_schedule("1f1b", 2, 4).row(0)
    blocks = [BlockCosts(seconds=1.0, kept=10, input=1, stage=s) for s in (-1, 0, 0)]
    when = beside(moments(row), -1, 4)
    assert needed(blocks, ["none"] * 3, when) == 4 * 10 + 2 * 20
    assert needed(blocks, ["full", "none", "none"], when) == 4 * 1 + 10 + 2 * 20
    assert choose(blocks, 54, when) == ("full", "none", "none")


def test_a_stage_without_blocks_counts_what_waits_on_the_others() -> None:
    when = (
        LiveCount(waiting={0: 2, 1: 0}, spent={0: 0, 1: 0}, running=0),
        LiveCount(waiting={0: 4, 1: 0}, spent={0: 0, 1: 0}, running=1),
    )
    blocks = [BlockCosts(seconds=1.0, kept=10, input=2)] * 3
    for limit in range(30, 121):
        found = choose(blocks, limit, when)
        assert found is not None
        assert needed(blocks, found, when) <= limit


def test_the_last_blocks_are_kept_where_one_microbatch_is_under_way() -> None:
    blocks = [BlockCosts(seconds=1.0, kept=10, input=1)] * 4
    assert choose(blocks, 13) == ("full", "full", "full", "none")
    one_waits = (LiveCount(waiting={0: 1}, spent={0: 0}, running=0),)
    assert choose(blocks, 22, one_waits) == ("full", "full", "full", "full")


@pytest.mark.parametrize("name", [None, "1f1b", "interleaved", "zb-h1"])
def test_many_blocks_of_real_sizes_are_quick(name: str | None) -> None:
    draw = random.Random(0)
    row = make_schedule(name, 4, 8).row(0) if name else ()
    when = moments(row) if name else ALONE
    stages = list(when[0].waiting)
    blocks = [
        BlockCosts(
            seconds=1 + draw.random(),
            kept=1_500_000_000 + draw.randint(0, 10_000),
            input=10_000_000,
            selective_seconds=draw.random() / 10,
            selective_kept=400_000_000 + draw.randint(0, 10_000),
            stage=stages[i * len(stages) // 100],
        )
        for i in range(100)
    ]
    nothing = needed(blocks, ("none",) * 100, when)
    found = choose(blocks, nothing // 2, when)
    assert found is not None
    assert 0.97 * nothing / 2 <= needed(blocks, found, when) <= nothing / 2
    assert "full" not in found, "what is cheap and saves nearly as much is enough"
