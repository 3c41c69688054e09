"""The simulator: times by hand, closed formulas, deadlocks."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.schedules.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    forward_only,
    make_schedule,
)
from lightning_megatron.schedules.simulate import (
    DeadlockError,
    Span,
    Timeline,
    peak_live_activations,
    render,
    simulate,
)

names = st.sampled_from(SCHEDULES)
plain_names = st.sampled_from(["gpipe", "1f1b"])
ranks = st.integers(1, 8)
microbatches = st.integers(1, 16)
times = st.floats(0.01, 10.0)


def parse(text: str) -> tuple[Action, ...]:
    """Actions from ``F0.0 B0.0``."""
    kinds = {kind.value: kind for kind in Kind}
    parsed = []
    for word in text.split():
        stage, microbatch = word[1:].split(".")
        parsed.append(Action(kinds[word[0]], int(stage), int(microbatch)))
    return tuple(parsed)


@given(plain_names, ranks, microbatches)
def test_bubble_of_even_stages(name: str, p: int, m: int) -> None:
    timeline = simulate(make_schedule(name, p, m), forward=1.0, backward=2.0)
    assert timeline.step_time == 3 * (m + p - 1)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(ranks, microbatches)
def test_peak_live_activations(p: int, m: int) -> None:
    assert simulate(make_schedule("gpipe", p, m)).peak_live == (m,) * p
    one_f_one_b = simulate(make_schedule("1f1b", p, m)).peak_live
    assert one_f_one_b == tuple(min(p - rank, m) for rank in range(p))


@given(st.data(), names, ranks, microbatches, st.floats(0.0, 3.0))
def test_timeline_obeys_the_model(
    data: st.DataObject, name: str, p: int, m: int, send: float
) -> None:
    schedule = make_schedule(name, p, m)
    n = schedule.num_stages
    forward, input_half, weight_half = (
        data.draw(st.lists(times, min_size=n, max_size=n)) for _ in range(3)
    )
    timeline = simulate(
        schedule,
        forward=forward,
        backward_input=input_half,
        backward_weight=weight_half,
        send=send,
    )
    durations = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: [i + w for i, w in zip(input_half, weight_half, strict=True)],
        Kind.BACKWARD_INPUT: input_half,
        Kind.BACKWARD_WEIGHT: weight_half,
    }
    owner = schedule.rank_of_stage
    ends = {span.action: span.end for rank in timeline.spans for span in rank}
    for rank, spans in enumerate(timeline.spans):
        assert tuple(span.action for span in spans) == schedule.actions[rank]
        free = 0.0
        for start, end, action in spans:
            assert end == start + durations[action.kind][action.stage]
            arrivals = [
                ends[needed] + (send if owner(needed.stage) != rank else 0.0)
                for needed in schedule.needs(action)
            ]
            assert start == max([free, *arrivals])  # as early as possible, not earlier
            free = end
    # No order of the actions beats the slowest rank or the way of one microbatch.
    work = [0.0] * p
    for times_of_kind in (forward, input_half, weight_half):
        for stage, time in enumerate(times_of_kind):
            work[owner(stage)] += m * time
    hops = sum(owner(stage) != owner(stage + 1) for stage in range(n - 1))
    way = sum(forward) + sum(input_half) + 2 * hops * send
    assert timeline.step_time >= max(*work, way) - 1e-9
    assert timeline.flowing_step_time >= max(work) - 1e-9
    assert timeline.flowing_step_time <= timeline.step_time
    assert -1e-9 <= timeline.bubble_fraction < 1.0
    assert timeline.busy == pytest.approx(work)


def test_transfer_times_of_each_boundary() -> None:
    timeline = simulate(make_schedule("gpipe", 3, 1), send=[0.5, 4.0])
    starts = {str(span.action): span.start for rank in timeline.spans for span in rank}
    assert starts == {"F0.0": 0, "F1.0": 1.5, "F2.0": 6.5, "B2.0": 7.5, "B1.0": 13.5, "B0.0": 16}


def test_boundary_inside_a_rank_is_free() -> None:
    folded = Schedule("v", 1, (0, 1, 1, 0), (parse("F0.0 F3.0"), parse("F1.0 F2.0")))
    assert simulate(folded, send=10.0).step_time == 4 + 2 * 10


def test_slow_transfers_cost_1f1b_more_than_gpipe() -> None:
    # What the lecture of `schedule` says about transfers.
    gpipe, one_f_one_b = (simulate(make_schedule(n, 4, 16), send=0.5) for n in ("gpipe", "1f1b"))
    assert gpipe.step_time < one_f_one_b.step_time


def test_slowest_stage_sets_the_pace() -> None:
    m = 50
    timeline = simulate(make_schedule("1f1b", 3, m), forward=[1, 2, 1], backward=[2, 4, 2])
    # Stage 1 starts after one forward, waits one unit for its first gradient, then never idles.
    assert timeline.step_time == 1 + 1 + m * (2 + 4) + 2


def test_busy() -> None:
    timeline = simulate(make_schedule("1f1b", 2, 3), forward=[1, 2], backward=[2, 1])
    assert list(timeline.busy) == [9, 9]
    assert timeline.step_time > 9


def test_evaluation_keeps_nothing_alive() -> None:
    assert peak_live_activations(parse("F0.0 F0.1 F0.2")) == 1
    assert peak_live_activations(parse("F0.0 F0.1 F0.2 B0.0 B0.1")) == 3
    assert peak_live_activations(parse("F0.0 F0.2 F0.1 B0.0 B0.1")) == 2  # 2 is dropped at once
    assert peak_live_activations(()) == 0


def test_split_backward_releases_its_activation_with_the_weight_half() -> None:
    assert peak_live_activations(parse("F0.0 I0.0 F0.1 W0.0 I0.1 W0.1")) == 2
    assert peak_live_activations(parse("F0.0 I0.0 W0.0 F0.1 B0.1")) == 1


def test_weighted_activations() -> None:
    row = parse("F0.0 F3.0 B3.0 F0.1 F3.1 B3.1 B0.0 B0.1")
    assert peak_live_activations(row) == 3
    assert peak_live_activations(row, {0: 5.0, 3: 7.0}) == 17.0


def test_flowing_steps() -> None:
    # Rank 1 starts and ends one forward later than rank 0.
    own = Schedule("own", 1, (0, 1), (parse("F0.0 I0.0 W0.0"), parse("F1.0 I1.0 W1.0")))
    timeline = simulate(own, send=0.0)
    assert timeline.step_time == 5
    assert timeline.flowing_step_time == 5
    assert simulate(make_schedule("zb-h2", 4, 8)).flowing_step_time == 3 * 8


def test_wrong_times() -> None:
    schedule = make_schedule("1f1b", 3, 2)
    with pytest.raises(ValueError, match="forward holds 2 times; the schedule needs 3"):
        simulate(schedule, forward=[1.0, 1.0])
    with pytest.raises(ValueError, match="go together"):
        simulate(schedule, backward_input=1.0)


def test_whole_backward_takes_as_long_as_its_halves() -> None:
    schedule = make_schedule("1f1b", 3, 2)
    halves = simulate(schedule, backward_input=[1, 2, 3], backward_weight=[4, 5, 6])
    assert halves == simulate(schedule, backward=[5, 7, 9])


def test_whole_backward_may_take_less_than_its_halves() -> None:
    times = {"backward": 1.5, "backward_input": 1.0, "backward_weight": 1.0}
    assert simulate(make_schedule("gpipe", 1, 2), **times).step_time == 2 * 2.5
    assert simulate(make_schedule("zb-h1", 1, 2), **times).step_time == 2 * 3.0


def test_circular_wait_is_refused_with_the_actions() -> None:
    # Rank 0 wants the gradient of microbatch 0 before it sends microbatch 1; rank 1 the reverse.
    circular = Schedule(
        "own", 2, (0, 1), (parse("F0.0 B0.0 F0.1 B0.1"), parse("F1.0 F1.1 B1.0 B1.1"))
    )
    with pytest.raises(DeadlockError) as error:
        simulate(circular)
    assert error.value.blocked == {0: parse("B0.0")[0], 1: parse("F1.1")[0]}
    message = str(error.value)
    assert "schedule own with 2 ranks and 2 microbatches" in message
    assert "rank 0 stands at B0.0, which waits for B1.0 of rank 1" in message
    assert "rank 1 stands at F1.1, which waits for F0.1 of rank 0" in message


def test_missing_action_is_named() -> None:
    with pytest.raises(DeadlockError, match=r"waits for F0\.0 of rank 0, which no rank runs"):
        simulate(Schedule("own", 1, (0, 1), ((), parse("F1.0"))))


@given(st.data(), names, st.integers(1, 4), st.integers(1, 4))
def test_deadlock_is_found_exactly_when_there_is_no_legal_interleaving(
    data: st.DataObject, name: str, p: int, m: int
) -> None:
    proper = make_schedule(name, p, m)
    shuffled = tuple(tuple(data.draw(st.permutations(actions))) for actions in proper.actions)
    schedule = Schedule("shuffled", m, proper.stage_ranks, shuffled)
    runs = not _has_cycle(schedule)
    try:
        simulate(schedule)
    except DeadlockError:
        assert not runs
    else:
        assert runs


def _has_cycle(schedule: Schedule) -> bool:
    """Whether dependencies and the order on the ranks contradict each other (Kahn)."""
    before = {a: set(schedule.needs(a)) for actions in schedule.actions for a in actions}
    for actions in schedule.actions:
        for earlier, later in itertools.pairwise(actions):
            before[later].add(earlier)
    while ready := {action for action, others in before.items() if not others}:
        before = {a: others - ready for a, others in before.items() if a not in ready}
    return bool(before)


def test_render_scales_to_uneven_times() -> None:
    timeline = simulate(make_schedule("1f1b", 2, 1), forward=[1, 2], backward=[4, 2])
    assert render(timeline).splitlines() == [
        "rank 0  F0 ............B0---------",
        "rank 1  ...F0--- B0--- ............",
    ]


def test_render_to_a_width_leaves_out_numbers_that_do_not_fit() -> None:
    timeline = simulate(make_schedule("gpipe", 2, 11))
    assert render(timeline, width=36).splitlines() == [
        "rank 0  FFFFFFFFFFF...B B B B B B B B B B B",
        "rank 1  .FFFFFFFFFFFB B B B B B B B B B B ..",
    ]


def test_render_names_stages_when_a_rank_holds_several() -> None:
    drawing = render(simulate(forward_only(2, 2, (0, 1, 0, 1))))
    assert drawing.splitlines() == [
        "rank 0  F0.0 F0.1 F2.0 F2.1 .....",
        "rank 1  .....F1.0 F1.1 F3.0 F3.1",
    ]


def test_short_labels() -> None:
    drawing = render(simulate(forward_only(2, 2, (0, 1, 0, 1))), short=True)
    assert drawing.splitlines() == ["rank 0  F0 F1 f0 f1 ...", "rank 1  ...F0 F1 f0 f1"]


def test_render_of_nothing() -> None:
    assert render(simulate(Schedule("own", 1, (0, 1), ((), ())))) == "rank 0\nrank 1"


def test_measured_times_make_a_timeline() -> None:
    schedule = make_schedule("gpipe", 1, 1)
    forward, backward = schedule.actions[0]
    timeline = Timeline(schedule, ((Span(0.1, 0.2, forward), Span(0.3, 0.5, backward)),))
    assert timeline.step_time == 0.5
    assert timeline.bubble_fraction == pytest.approx(0.4)
