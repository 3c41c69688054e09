"""Every schedule: each action once, on its rank, in a legal order."""

import itertools
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.custom import parse_schedule
from lightning_megatron.schedules.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    default_stages_per_rank,
    forward_only,
    make_schedule,
    schedule_problems,
)
from lightning_megatron.schedules.simulate import simulate

names = st.sampled_from(SCHEDULES)
ranks = st.integers(1, 7)
microbatches = st.integers(1, 16)  # more than twice as many as ranks
LOOPED = ("interleaved", "breadth-first", "zb-h1")
V_SHAPED = ("zbv", "v-half", "v-min", "dualpipev")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any schedule of any size."""
    name = draw(names)
    stages = draw(st.integers(1, 4)) if name in LOOPED else None
    return make_schedule(name, draw(ranks), draw(microbatches), stages)


def test_names() -> None:
    assert set(SCHEDULES) == {"gpipe", "1f1b", "zb-h2", *LOOPED, *V_SHAPED}


@given(schedules())
def test_every_action_once_on_its_rank(schedule: Schedule) -> None:
    found = Counter(action for row in schedule.actions for action in row)
    for stage, microbatch in itertools.product(
        range(schedule.num_stages), range(schedule.num_microbatches)
    ):
        did = "".join(kind.value * found[Action(kind, stage, microbatch)] for kind in Kind)
        assert did in ("FB", "FIW")
    assert len(found) == sum(map(len, schedule.actions))
    for rank in range(schedule.num_ranks):
        assert {action.stage for action in schedule.row(rank)} == set(schedule.stages_of_rank(rank))


@given(schedules())
def test_dependencies_hold(schedule: Schedule) -> None:
    spans = {span.action: span for rank in simulate(schedule).spans for span in rank}
    for action, span in spans.items():
        assert all(spans[needed].end <= span.start for needed in schedule.needs(action))


@given(schedules())
def test_microbatches_in_order_everywhere(schedule: Schedule) -> None:
    # Floating-point sums depend on the order, and parameters shared by stages compare them.
    backward = Kind.BACKWARD
    for stage, rank in enumerate(schedule.stage_ranks):
        row = [action for action in schedule.row(rank) if action.stage == stage]
        for kinds in (
            (Kind.FORWARD,),
            (backward, Kind.BACKWARD_INPUT),
            (backward, Kind.BACKWARD_WEIGHT),
        ):
            numbers = [action.microbatch for action in row if action.kind in kinds]
            assert numbers == list(range(schedule.num_microbatches))


@given(names, ranks, microbatches)
def test_placement(name: str, p: int, m: int) -> None:
    schedule = make_schedule(name, p, m)
    v = default_stages_per_rank(name)
    assert schedule.stages_per_rank == v
    assert schedule.num_ranks == p
    if name in V_SHAPED:
        assert schedule.stage_ranks == (*range(p), *range(p - 1, -1, -1))
    else:
        assert schedule.stage_ranks == tuple(range(p)) * v


@pytest.mark.parametrize("name", SCHEDULES)
def test_split(name: str) -> None:
    split = name.startswith(("z", "v")) or name == "dualpipev"
    assert make_schedule(name, 4, 8).splits_backward == split


@pytest.mark.parametrize("name", SCHEDULES)
def test_quick_to_make(name: str) -> None:
    start = time.process_time()  # a busy machine counts for nothing
    make_schedule(name, 16, 128)
    assert time.process_time() - start < 2.0  # 0.25 s at most


def test_needs() -> None:
    schedule = make_schedule("gpipe", 3, 2)

    def needs(kind: Kind, stage: int) -> list[str]:
        return [str(action) for action in schedule.needs(Action(kind, stage, 1))]

    assert needs(Kind.FORWARD, 0) == []
    assert needs(Kind.FORWARD, 2) == ["F1.1"]
    assert needs(Kind.BACKWARD, 2) == ["F2.1"]
    assert needs(Kind.BACKWARD, 0) == ["F0.1", "B1.1"]


def test_needs_of_split_backwards() -> None:
    schedule = parse_schedule(
        [["0F0", "0I0", "0F1", "0W0", "0B1"], ["1F0", "1B0", "1F1", "1I1", "1W1"]]
    )

    def needs(kind: Kind, stage: int, microbatch: int) -> list[str]:
        return [str(action) for action in schedule.needs(Action(kind, stage, microbatch))]

    assert needs(Kind.BACKWARD_WEIGHT, 0, 0) == ["I0.0"]
    assert needs(Kind.BACKWARD_INPUT, 0, 0) == ["F0.0", "B1.0"]
    assert needs(Kind.BACKWARD, 0, 1) == ["F0.1", "I1.1"]
    assert needs(Kind.BACKWARD_INPUT, 1, 1) == ["F1.1"]


def test_orders_of_a_small_case() -> None:
    def order(name: str, rank: int) -> str:
        actions = make_schedule(name, 3, 4).actions[rank]
        return " ".join(f"{a.kind.value}{a.microbatch}" for a in actions)

    assert order("gpipe", 1) == "F0 F1 F2 F3 B0 B1 B2 B3"
    assert order("1f1b", 0) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert order("1f1b", 1) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert order("1f1b", 2) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_fewer_microbatches_than_ranks() -> None:
    schedule = make_schedule("1f1b", 4, 1)
    assert [str(a) for actions in schedule.actions for a in actions] == [
        *("F0.0", "B0.0", "F1.0", "B1.0", "F2.0", "B2.0", "F3.0", "B3.0")
    ]


@given(ranks, microbatches)
def test_forward_only(p: int, m: int) -> None:
    schedule = forward_only(p, m)
    found = Counter(action for actions in schedule.actions for action in actions)
    assert found == Counter(Action(Kind.FORWARD, s, b) for s in range(p) for b in range(m))
    timeline = simulate(schedule)
    assert timeline.step_time == m + p - 1
    assert timeline.peak_live == (1,) * p


@given(st.lists(st.integers(0, 3), min_size=4, max_size=12), microbatches)
def test_forward_only_runs_under_any_placement(placement: list[int], m: int) -> None:
    schedule = forward_only(4, m, placement)
    simulate(schedule)  # raises on a deadlock
    assert schedule.num_stages == len(placement)
    assert sum(map(len, schedule.actions)) == m * len(placement)


def test_placement_of_several_stages_on_a_rank() -> None:
    v_shaped = Schedule("v", 1, (0, 1, 1, 0), ((), ()))
    assert v_shaped.num_ranks == 2
    assert v_shaped.num_stages == 4
    assert v_shaped.stages_per_rank == 2
    assert v_shaped.last_stage_rank == 0
    assert v_shaped.stages_of_rank(0) == (0, 3)
    assert v_shaped.stages_of_rank(1) == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "option", "nearest"),
    [
        (("1F1B", 2, 2, 1), "schedule='1F1B'", "schedule='1f1b'"),
        (("g-pipe", 2, 2, 1), "schedule='g-pipe'", "schedule='gpipe'"),
        (("xyz", 2, 2, 1), "schedule='xyz'", "schedule='1f1b'"),
        (("1f1b", 0, 2, 1), "pp=0", "pp=1"),
        (("1f1b", 2, 0, 1), "num_microbatches=0", "num_microbatches=1"),
        (("1f1b", 2, 1.5, 1), "num_microbatches=1.5", "num_microbatches=1"),
        (("1f1b", 2, 2, 0), "stages_per_rank=0", "stages_per_rank=1"),
        (("1f1b", 2, 2, 2), "stages_per_rank=2", "stages_per_rank=1"),
        (("zb-v", 2, 2), "schedule='zb-v'", "schedule='zbv'"),
        (("zbv", 2, 2, 3), "stages_per_rank=3: zbv runs two", "stages_per_rank=2"),
        (("zbv", 2, 2, 2, "a.csv"), "table='a.csv'", "schedule='custom'"),
        (("custom", 2, 2), "table=None", "a path to a .csv or .json file"),
    ],
)
def test_problems(arguments: tuple[Any, ...], option: str, nearest: str) -> None:
    (problem,) = schedule_problems(*arguments)
    given_part, _, remedy = problem.partition("; nearest valid: ")
    assert option in given_part
    assert remedy == nearest
    with pytest.raises(ConfigError) as error:
        make_schedule(*arguments)
    assert error.value.problems == (problem,)


def test_problems_come_together() -> None:
    assert len(schedule_problems("nothing", 0, 0, 0)) == 4
    assert schedule_problems("gpipe", 8, 1) == []
