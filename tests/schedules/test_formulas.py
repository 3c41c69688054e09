"""Bubbles and live activations of the schedules are those that the papers (and our lectures) state.

Times are even: a forward and either half of a backward take 1 on every stage.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatron.schedules.one_f_one_b import group_sizes
from lightning_megatron.schedules.schedule import SCHEDULES, make_schedule
from lightning_megatron.schedules.simulate import Timeline, simulate

ranks = st.integers(1, 10)
turns = st.integers(1, 4)
few = st.integers(1, 30)
extra = st.integers(0, 20)


def run(name: str, p: int, m: int, v: int | None = None) -> tuple[Timeline, float]:
    """Timeline, and the bubble: what the step takes beyond the work of a rank."""
    timeline = simulate(make_schedule(name, p, m, v))
    return timeline, timeline.step_time - 3 * m * timeline.schedule.stages_per_rank


@given(ranks, few)
def test_gpipe(p: int, m: int) -> None:
    timeline, bubble = run("gpipe", p, m)
    assert bubble == 3 * (p - 1)
    assert timeline.peak_live == (m,) * p


@given(ranks, few)
def test_1f1b(p: int, m: int) -> None:
    timeline, bubble = run("1f1b", p, m)
    assert bubble == 3 * (p - 1)
    assert timeline.peak_live == tuple(min(p - rank, m) for rank in range(p))


@given(ranks, extra, turns)
def test_breadth_first(p: int, more: int, v: int) -> None:
    timeline, bubble = run("breadth-first", p, p + more, v)
    assert bubble == 3 * (p - 1)
    assert timeline.peak_live == (v * (p + more),) * p


@given(ranks, extra, st.integers(2, 4))
def test_interleaved(p: int, more: int, v: int) -> None:
    m = p + more
    timeline, bubble = run("interleaved", p, m, v)
    assert bubble == 3 * (p - 1)  # of 1 / v of a rank each
    group = group_sizes(p, m)[0]
    assert timeline.peak_live == tuple(
        min((v - 1) * group + 2 * (p - 1 - rank) + 1, v * m) for rank in range(p)
    )


@given(ranks, few)
def test_group_sizes(p: int, m: int) -> None:
    sizes = group_sizes(p, m)
    assert sum(sizes) == m
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) >= min(p, m)
    assert max(sizes) < 2 * p


@given(ranks, few)
def test_zb_h1(p: int, m: int) -> None:
    timeline, bubble = run("zb-h1", p, m)
    assert bubble == max(p - 1, 2 * p - 1 - m)
    assert max(timeline.peak_live) == min(p, m)


@settings(max_examples=20)
@given(ranks, extra, turns)
def test_zb_h1_looped(p: int, more: int, v: int) -> None:
    timeline, bubble = run("zb-h1", p, p + more, v)
    assert bubble == p - 1
    group = group_sizes(p, p + more)[0]
    assert max(timeline.peak_live) <= (v - 1) * group + p


@given(ranks, few)
def test_zb_h2(p: int, m: int) -> None:
    timeline, bubble = run("zb-h2", p, m)
    assert bubble == max(p - 1, 2 * p - 1 - m)
    assert max(timeline.peak_live) == min(2 * p - 1, m)
    if m >= 2 * p - 1:
        assert timeline.flowing_step_time == 3 * m  # no bubble


@settings(max_examples=20)
@given(ranks, extra)
def test_zbv(p: int, more: int) -> None:
    m = p + more
    timeline, bubble = run("zbv", p, m)
    assert bubble == p - 1
    assert max(timeline.peak_live) == 2 * p


@settings(max_examples=20)
@given(ranks, extra)
def test_dualpipev(p: int, more: int) -> None:
    timeline, bubble = run("dualpipev", p, p + more)
    assert bubble == p - 1
    assert max(timeline.peak_live) <= 2 * p + 1
    if more >= p:
        assert max(timeline.peak_live) == 2 * p + 1


@settings(max_examples=20)
@given(st.integers(2, 10), st.integers(24, 40))
def test_dualpipev_pairs_forwards_with_whole_backwards(p: int, m: int) -> None:
    schedule = make_schedule("dualpipev", p, m)
    for rank in range(p):
        # A weight half may stand between the two of a pair, where the backward came late.
        row = [action for action in schedule.row(rank) if action.kind.value != "W"]
        whole = [i for i, action in enumerate(row) if action.kind.value == "B"]
        assert len(whole) >= 2 * (m - 2 * p)
        for i in whole:
            assert row[i - 1].kind.value == "F"
            assert row[i - 1].stage != row[i].stage
            assert row[i - 1].microbatch != row[i].microbatch


@settings(max_examples=20)
@given(st.integers(2, 10), extra)
def test_v_half(p: int, more: int) -> None:
    timeline, bubble = run("v-half", p, p + more)
    assert bubble <= 3 * (p - 1)  # half of 1f1b's, whose stages are twice as large
    if more >= p:
        assert max(timeline.peak_live) == 2 * ((p + 2) // 2)


@settings(max_examples=20)
@given(st.integers(2, 10), extra)
def test_v_min(p: int, more: int) -> None:
    timeline, bubble = run("v-min", p, p + more)
    assert bubble <= 4 * (p - 1) + 1  # two thirds of 1f1b's, and one unit
    if more >= p:
        assert max(timeline.peak_live) == 2 * ((p + 4) // 3)


LIMITS = {
    "zbv": lambda p: 2 * p,
    "v-half": lambda p: 2 * ((p + 2) // 2),
    "v-min": lambda p: 2 * ((p + 4) // 3),
    "dualpipev": lambda p: 2 * p + 1,
}
"""Live activations of a stage that no rank exceeds, whatever the number of microbatches."""


@settings(max_examples=20)
@given(st.sampled_from(sorted(LIMITS)), st.integers(1, 16), few)
def test_room_of_v_shaped_schedules(name: str, p: int, m: int) -> None:
    timeline, _ = run(name, p, m)
    assert max(timeline.peak_live) <= min(LIMITS[name](p), 2 * m)


@settings(max_examples=8)
@given(st.integers(2, 10), extra)
def test_order_of_memory_and_bubble(p: int, more: int) -> None:
    m = 2 * p + more
    peaks, bubbles = [], []
    for name in ("v-min", "v-half", "zbv"):
        timeline, bubble = run(name, p, m)
        peaks.append(max(timeline.peak_live))
        bubbles.append(bubble)
    assert peaks == sorted(peaks)
    assert bubbles == sorted(bubbles, reverse=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_has_no_bubble(name: str) -> None:
    assert run(name, 1, 5)[1] == 0
