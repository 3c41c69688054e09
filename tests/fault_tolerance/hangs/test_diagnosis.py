"""Who is to blame, from what is seen of all ranks."""

from typing import Any

import pytest

from lightning_megatron.fault_tolerance.hangs import diagnosis as verdict
from lightning_megatron.fault_tolerance.hangs.diagnosis import Diagnosis, RankView, confirm, suspect
from lightning_megatron.fault_tolerance.hangs.flight_recorder import (
    Collective,
    Missing,
    first_missing,
)
from lightning_megatron.fault_tolerance.hangs.heartbeat import Beat, Member
from lightning_megatron.fault_tolerance.hangs.report import describe, summary
from lightning_megatron.fault_tolerance.hangs.section_limits import START_S, UNSEEN_S, Limits
from lightning_megatron.fault_tolerance.hangs.stack_dump import Frame, ProcessState
from lightning_megatron.run_log.sections import SectionClock
from tests.monitoring.test_sections import Time

SLEEPING = ProcessState("S", started=7)
STOPPED = ProcessState("T", started=7)


def view(rank: int, **changes: Any) -> RankView:
    """A rank that waits in its backward for longer than its limit."""
    known: dict[str, Any] = {"waits": 1, "left": False, "stall": 9.0, "silence": 0.1}
    known |= {"process": SLEEPING, "limit": 5.0, **changes}
    beat = Beat(3, 3, 0.0, "backward", known["waits"], 0.0, known["left"], {})
    member = Member(rank, 100 + rank, 7, "host", 1)
    silence, process = known["silence"], known["process"]
    return RankView(member, beat, process, known["stall"], known["limit"], silence)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"waits": 2}, verdict.BUSY),
        ({"silence": 8.0}, verdict.LOCKED),
        ({"process": STOPPED}, verdict.STOPPED),
        ({"process": ProcessState()}, verdict.GONE),
        ({"process": ProcessState("S", started=8)}, verdict.GONE),  # another with the same pid
        ({"left": True}, verdict.ABSENT),
    ],
)
def test_the_rank_that_differs_from_those_that_wait(changes: dict[str, Any], reason: str) -> None:
    found = suspect([view(0), view(1, **changes), view(2)], patience=2.0)
    assert found is not None
    assert (found.ranks, found.reason) == ((1,), reason)


@pytest.mark.parametrize(
    "views",
    [
        [view(0, stall=4.0), view(1, stall=4.0)],  # within their limits
        [view(0), view(1, waits=2, stall=4.0)],  # one saves, say, for which it has more time
        [view(0), view(1, waits=2, limit=300.0)],
        [view(0, process=STOPPED), view(1, process=STOPPED)],  # the job is suspended
        [view(0, left=True), view(1, left=True)],
    ],
)
def test_nobody_is_blamed_without_need(views: list[RankView]) -> None:
    assert suspect(views, patience=2.0) is None


def test_who_waits_for_another_node_is_not_blamed() -> None:
    views = [view(0), view(1)]
    assert suspect(views, patience=2.0) is not None
    assert suspect(views, patience=2.0, whole=False) is None
    busy = Diagnosis((0,), verdict.BUSY, certain=False)
    in_torch = {0: [Frame("/x/torch/distributed/c10d.py", 1, "all_reduce")]}
    assert confirm(busy, views, None, in_torch, whole=False) is None


def test_a_wait_that_was_not_seen_is_found_in_the_stack() -> None:
    views = [view(0, waits=2), view(1, waits=2, stall=20.0)]
    busy = suspect(views, patience=2.0)
    assert busy == Diagnosis((0, 1), verdict.BUSY, certain=False)
    stacks = {
        0: [Frame("/x/torch/distributed/c10d.py", 1, "all_reduce")],
        1: [Frame("/home/me/train.py", 30, "load")],
    }
    found = confirm(busy, views, None, stacks)
    assert found is not None
    assert found.ranks == (1,)


def collective(group: str, number: int, began: int, *, completed: bool = False) -> Collective:
    return Collective(group, number, "all_reduce", "4", began, completed)


def test_the_longest_wait_decides_who_skipped_a_collective() -> None:
    """Each rank waits for the other in another group; rank 1 was to come to ``a`` first."""
    seen = {
        0: [collective("a", 5, began=100), collective("b", 8, began=50, completed=True)],
        1: [collective("a", 4, began=40, completed=True), collective("b", 9, began=200)],
    }
    missing = first_missing(seen, {"a": [0, 1], "b": [0, 1]})
    assert missing == Missing(collective("a", 5, began=100), (0,), (1,))
    suspicion = Diagnosis((0,), verdict.ENTANGLED, certain=False)
    found = confirm(suspicion, [view(0), view(1)], missing, {})
    assert found == Diagnosis((1,), verdict.BEHIND, certain=True)


def test_a_rank_within_its_own_limit_is_not_blamed() -> None:
    """It may save for minutes before it comes to the collective that the others wait in."""
    missing = Missing(collective("a", 5, began=100), (0,), (1,))
    entangled = Diagnosis((0,), verdict.ENTANGLED, certain=False)
    within = [view(0), view(1, stall=9.0, limit=300.0)]
    assert confirm(entangled, within, missing, {}) is None
    found = confirm(entangled, [view(0), view(1)], missing, {})
    assert found == Diagnosis((1,), verdict.BEHIND, certain=True)


def test_a_report_names_as_waiting_who_is_late() -> None:
    """Neither a rank that has just come, nor one that has left, nor the culprit."""
    views = [view(0), view(1, waits=2), view(2, stall=1.0), view(3, left=True), view(4)]
    report = describe(Diagnosis((1,), verdict.BUSY, certain=True), views, {}, None, {})
    assert report["waiting"] == [0, 4]
    assert [entry["rank"] for entry in report["culprits"]] == [1]
    assert summary(report)[-1] == "waiting for it: ranks 0, 4"


def test_a_completed_collective_is_not_waited_in() -> None:
    """A broadcast ends on its source before the others have begun it."""
    seen = {0: [collective("a", 5, began=100, completed=True)], 1: [collective("a", 4, began=40)]}
    assert first_missing(seen, {"a": [0, 1]}) is None


def test_limits_grow_with_what_was_seen_and_start_high() -> None:
    time = Time()
    clock = SectionClock(time)
    auto, given = Limits("auto"), Limits(2.0)
    assert auto.of(clock)["start"] == given.of(clock)["start"] == START_S
    assert auto.of(clock)["forward"] == given.of(clock)["forward"] == UNSEEN_S
    clock.enter("data")
    for _ in range(4):
        for name, seconds in (("forward", 20.0), ("backward", 1.0), ("optimizer", 1.0)):
            clock.enter(name)
            time.now += seconds
        clock.enter("data")
    found = auto.of(clock)
    assert (found["forward"], found["backward"]) == (160.0, 60.0)
    assert found["checkpoint"] == UNSEEN_S  # none was seen yet
    assert given.of(clock)["checkpoint"] == given.of(clock)["forward"] == 2.0
    assert Limits({"forward": 3.0}).of(clock)["forward"] == 3.0
    assert Limits({"forward": 3.0}).of(clock)["backward"] == 60.0
