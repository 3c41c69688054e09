"""What the monitor of a node makes of ranks that do not answer."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.fault_tolerance.hangs import node_monitor
from lightning_megatron.fault_tolerance.hangs.diagnosis import RankView
from lightning_megatron.fault_tolerance.hangs.evidence import Evidence
from lightning_megatron.fault_tolerance.hangs.flight_recorder import Collective
from lightning_megatron.fault_tolerance.hangs.heartbeat import NOTHING, Page, page_file
from lightning_megatron.fault_tolerance.hangs.node_monitor import MonitorConfig, NodeMonitor
from tests.fault_tolerance.hangs.test_diagnosis import view

VIEWS = [view(0), view(1)]
GROUPS = {"0": [0, 1]}
OLD = Collective("0", 4, "all_reduce", "", 1, False)
NEW = Collective("0", 5, "all_reduce", "", 2, False)


class Told(NodeMonitor):
    """Gets its answers from a list; notes who is blamed."""

    def __init__(self, directory: Path, answers: list[Evidence]) -> None:
        members = tuple(v.member for v in VIEWS)
        config = MonitorConfig(members, str(directory), "hang", "report", 0.5)
        super().__init__(directory, config)
        self.answers, self.blamed = answers, []

    def look(self) -> list[RankView]:
        return VIEWS

    def collect(self, views: Any) -> Evidence:
        return self.answers.pop(0)

    def _do(self, views: Any, report: Any) -> None:
        self.blamed.append(tuple(c["rank"] for c in report["culprits"]))


def test_who_turns_out_to_hold_the_lock_is_not_asked_again(tmp_path: Path) -> None:
    """It gave no answer, and by then no sign of life for so long that this says enough."""
    monitor = Told(tmp_path, [evidence(OLD, NEW, 1)])
    monitor.look = lambda: [view(0), view(1, silence=2.5)]  # type: ignore[method-assign]
    monitor.act_on([view(0), view(1, waits=2, silence=1.5)])
    assert monitor.blamed == [(1,)]


def test_who_waited_for_a_hang_has_all_its_time_when_that_is_over(tmp_path: Path) -> None:
    """Rank 0 still stands where rank 1 kept it waiting, and rank 1 is under way to it."""
    monitor = Told(tmp_path, [evidence(OLD, NEW, 1)])
    for watched in monitor._watched:
        watched.stall = 9.0
    monitor.act_on([view(0), view(1, waits=2, silence=2.5)])
    monitor.act_on([view(0), view(1, waits=3)])
    assert monitor.blamed == [(1,)]
    assert [watched.stall for watched in monitor._watched] == [0.0, 0.0]


def test_ranks_that_cannot_be_told_get_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, value: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(node_monitor, "write_whole", full)
    config = MonitorConfig(
        tuple(v.member for v in VIEWS), str(tmp_path), "hang", "report", check_s=0.5
    )
    monitor = NodeMonitor(tmp_path, config)
    monitor._do(VIEWS, {})
    assert [Page(page_file(tmp_path, v.rank)).order for v in VIEWS] == [(1, NOTHING)] * 2
    assert "No space left on device" in capfd.readouterr().err


def evidence(of_0: Collective, of_1: Collective, mute: int) -> Evidence:
    return Evidence({0: [of_0], 1: [of_1]}, GROUPS, {}, {}, mute)


@pytest.mark.parametrize("asked", [1, 3])
def test_who_answers_late_is_asked_again(tmp_path: Path, asked: int) -> None:
    """Rank 0, by its last sample, seems to be behind; it is rank 1."""
    late = [evidence(OLD, NEW, 1)] * asked
    monitor = Told(tmp_path, [*late, evidence(NEW, OLD, 0)])
    for _ in range(asked + 1):
        monitor.act_on(VIEWS)
    assert monitor.blamed == [(1,)]


def test_a_verdict_is_given_without_who_never_answers(tmp_path: Path) -> None:
    monitor = Told(tmp_path, [evidence(OLD, NEW, 1)] * 4)
    views: list[RankView] = VIEWS
    for number in range(4):
        assert monitor.blamed == [], number
        monitor.act_on(views)
    assert monitor.blamed == [(0,)]


@pytest.mark.parametrize("first", [2, 3])
def test_groups_of_one_name_on_different_ranks_are_told_apart(first: int) -> None:
    """Ranks 0 and 2 are a group, 1 and 3 another, and torch calls both ``2``."""
    behind, ahead = Collective("2", 7, "x", "", 1, False), Collective("2", 8, "x", "", 2, False)
    here, there = Evidence({}, {}, {}, {}), Evidence({}, {}, {}, {})
    here.take({0: [behind]}, {"2": [0, 2]})
    here.take({1: [ahead]}, {"2": [1, 3]})
    for rank in (first, 5 - first):
        there.take({rank: [ahead]}, {"2": [rank - 2, rank]})
    here.add(json.loads(json.dumps(there.packed())))
    assert here.groups == {"2": [0, 2], "2 of rank 1": [1, 3]}
    assert here.missing is not None
    assert (here.missing.ranks, here.missing.begun_by) == ((0,), (2,))
