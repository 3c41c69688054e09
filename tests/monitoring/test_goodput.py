"""Goodput and what restarts cost, on written ledgers with known answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.monitoring.goodput import Ledger, ledger_of, runs_of
from lightning_megatron.run_log.events import EventLog, event_file


def event(t: float, kind: str, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"t": t, "rank": rank, "run": "r", "kind": kind, **fields}


def steps(start: float, first: int, last: int, seconds: float = 1.0) -> list[dict[str, Any]]:
    """Steps `first` to `last`, one after the other, the first of which begins at `start`."""
    return [
        event(start + (i + 1) * seconds, "step", step=step, seconds=seconds)
        for i, step in enumerate(range(first, last + 1))
    ]


def ledger(*events: Any, rank: int = 0) -> Ledger:
    found = Ledger(rank)
    for one in events:
        for e in one if isinstance(one, list) else [one]:
            found.add(e)
    return found


NOTHING = {
    "ft/restarts_total": 0,
    "ft/steps_lost_total": 0,
    "ft/hangs_total": 0,
    "ft/rollbacks_total": 0,
}


def test_a_hang_counts_once_whoever_tells_and_a_rollback_on_its_own_rank() -> None:
    found = ledger(
        event(100, "start"),
        steps(110, 1, 4),
        event(120, "hang", report="a.txt", rank=1),  # with two culprits
        event(120, "hang", report="a.txt", rank=1),
        event(130, "hang", report="b.txt"),
        event(140, "rollback"),
        event(140, "rollback", rank=1),
    )
    assert found.metrics(150)["ft/hangs_total"] == 2
    assert found.metrics(150)["ft/rollbacks_total"] == 1


def test_a_run_without_faults() -> None:
    found = ledger(event(100, "start"), steps(110, 1, 20), event(140, "end", status="completed"))
    assert found.productive_s == 20
    assert found.wall_s() == 40
    assert found.metrics() == {
        "ft/goodput": 0.5,
        **NOTHING,
    }
    assert found.goodput(now=180) == 0.25


def test_a_killed_run_that_goes_on_from_a_checkpoint() -> None:
    # 17 steps, saved after 10; killed at 117; new processes at 125, first new step done at 131.
    found = ledger(
        event(98, "start"),
        steps(100, 1, 17),
        event(125, "start"),
        steps(130, 11, 30),
        event(150, "end", status="completed"),
    )
    assert found.restarts == 1
    assert found.steps_lost == 7
    assert found.productive_s == 10 + 20
    assert found.goodput() == pytest.approx(30 / 52)
    assert (found.detect_s, found.recover_s) == (8, 6)
    first, second = found.attempts
    assert (first.from_step, first.to_step, first.kept_s, first.redone_s) == (0, 17, 10, 7)
    assert (second.from_step, second.to_step, second.kept_s, second.redone_s) == (10, 30, 20, 0)
    assert (first.status, second.status) == ("", "completed")


def test_the_rank_that_stopped_first_and_the_first_that_noticed() -> None:
    found = ledger(
        event(0, "fault", rank=1),
        event(0, "start"),
        event(0, "start", rank=1),
        [e for i in range(1, 6) for e in (event(i, "step", step=i, seconds=1.0),)],
        event(3, "step", rank=1, step=3),
        event(7.5, "fault", rank=2, what="lost"),
        event(8, "end", status="failed"),
        event(12, "start"),
        event(14, "step", step=6, seconds=1.0),
    )
    assert (found.detect_s, found.recover_s) == (4.5, 6.5)
    assert (found.restarts, found.steps_lost) == (1, 0)


def test_dying_twice_before_a_new_step_loses_steps_once() -> None:
    found = ledger(
        event(0, "start"),
        steps(0, 1, 10),
        event(20, "start"),
        event(30, "start"),
        steps(40, 5, 6),
        event(50, "start"),
        steps(60, 5, 10),
    )
    assert found.restarts == 3
    assert found.steps_lost == 6 + 2
    assert found.productive_s == 4 + 6
    assert [a.kept_s for a in found.attempts] == [4, 0, 0, 6]
    assert [a.redone_s for a in found.attempts] == [6, 0, 2, 0]
    assert [a.recover_s for a in found.attempts] == [None, 11, 11, None]


def test_a_rollback_within_an_attempt() -> None:
    found = ledger(event(0, "start"), steps(0, 1, 10), event(10, "rollback"), steps(12, 8, 12))
    assert found.restarts == 0
    assert found.steps_lost == 3
    assert found.productive_s == 12
    assert found.goodput() == pytest.approx(12 / 17)


def test_a_rollback_after_which_steps_are_counted_on() -> None:
    back = event(10, "rollback", updates_back=4, batches_since=5)
    found = ledger(event(0, "start"), steps(0, 1, 10), back, steps(10, 11, 14))
    assert (found.steps_lost, found.productive_s) == (4, 10)
    again = ledger(event(0, "start"), back, steps(0, 1, 3))
    assert (again.steps_lost, again.productive_s) == (0, 3)


def test_windows_of_steps_are_cut_in_proportion() -> None:
    found = ledger(
        event(0, "start"),
        event(10, "step", step=10, steps=10, seconds=10.0),
        event(20, "step", step=20, steps=10, seconds=10.0),
        event(30, "start"),
        event(40, "step", step=22, steps=10, seconds=5.0),
    )
    assert found.steps_lost == 8
    assert found.productive_s == pytest.approx(10 + 2 + 5)
    assert found.attempts[0].redone_s == pytest.approx(8)


def test_a_run_that_ended_and_is_extended_did_not_stand_still() -> None:
    found = ledger(
        event(0, "start"),
        steps(0, 1, 10),
        event(10, "end", status="completed"),
        event(1000, "start"),
        steps(1000, 11, 20),
    )
    assert found.restarts == 0
    assert found.goodput() == 1.0


def test_a_process_that_trains_another_model_begins_another_run() -> None:
    found = ledger(
        event(0, "start"),
        steps(0, 1, 10),
        event(20, "start"),
        steps(20, 5, 20),
        event(36, "end", status="completed"),
        event(100, "start"),
        steps(101, 1, 4),
    )
    assert (found.restarts, found.steps_lost, found.productive_s) == (0, 0, 4)
    assert found.goodput() == 0.8
    assert [(a.number, a.started) for a in found.attempts] == [(0, 100)]


def test_nothing_and_an_attempt_without_steps() -> None:
    assert Ledger().goodput() is None
    assert Ledger().metrics() == NOTHING
    assert ledger(event(5, "start")).goodput() is None
    assert ledger(event(5, "start")).goodput(now=6) == 0.0
    # The first lines may be missing, as those of a directory that could not be written.
    assert ledger(steps(0, 4, 5)).productive_s == 2


def test_counters_only_grow() -> None:
    found, before = Ledger(), {"ft/restarts_total": 0.0, "ft/steps_lost_total": 0.0}
    for attempt in range(5):
        start = 100.0 * attempt
        for e in [event(start, "start"), *steps(start, 3 * attempt + 1, 3 * attempt + 9)]:
            found.add(e)
            after = found.metrics()
            assert all(after[name] >= value for name, value in before.items())
            before = {name: after[name] for name in before}
    assert before == {"ft/restarts_total": 4, "ft/steps_lost_total": 4 * 6}


def test_runs_in_one_directory_are_kept_apart(tmp_path: Path) -> None:
    clock = iter(range(1000))
    for run, was, first in (("a", None, 1), ("b", None, 1), ("c", "a", 3), ("d", "a", 5)):
        log = EventLog()
        log.identify(run=run)
        log.open(tmp_path)
        log.write("start")
        if was:
            log.identify(run=was)
        for step in range(first, first + 4):
            log.write("step", step=step, seconds=1.0)
        log.close()
    lines = event_file(tmp_path, 0).read_text().splitlines()
    timed = [json.dumps({**json.loads(line), "t": next(clock)}) for line in lines]
    event_file(tmp_path, 0).write_text("\n".join(timed))
    assert ledger_of(tmp_path, "b").restarts == 0
    found = ledger_of(tmp_path, "a")
    assert (found.restarts, found.steps_lost, found.productive_s) == (2, 4, 8)
    assert ledger_of(tmp_path, "d").restarts == 2
    assert ledger_of(tmp_path, "unknown").attempts == []


def test_renaming_in_a_circle_ends() -> None:
    events = [{"kind": "renamed", "run": a, "was": b} for a, b in (("x", "y"), ("y", "x"))]
    assert set(runs_of(events)) == {"x", "y"}
