"""The outcomes of faults follow from the events of a run."""

import json
from pathlib import Path
from typing import Any

from benchmarks.soak import SECTIONS, random_faults
from benchmarks.soak_outcomes import read_outcomes, table
from lightning_megatron.run_log.events import EventLog


def write_run(directory: Path) -> None:
    """Steps 0 to 5, a kill, a restart from 4, a slow step noticed by the run, and its end."""
    log, clock = EventLog(0), iter(float(second) for second in range(100, 1000))
    log.open(directory)

    def event(kind: str, step: int, **fields: Any) -> None:
        log.step = step
        log.write(kind, t=next(clock), **fields)

    event("start", 0)  # at 100 s
    for step in range(1, 6):
        event("step", step, seconds=1.0)  # 101 to 105
    event("injected", 5, what="kill", section="forward")  # 106
    event("start", 0)  # 107; where it goes on from is not known yet
    event("step", 5, seconds=1.0)
    event("step", 6, seconds=1.0)  # 109
    event("injected", 6, what="slow", section="forward")  # 110
    event("slow_rank", 6)  # 111
    event("step", 7, seconds=2.0)  # 112
    event("end", 7, status="completed")


def test_ledger(tmp_path: Path) -> None:
    write_run(tmp_path)
    (killed, slowed), ledger = read_outcomes(tmp_path)
    assert (killed.how, killed.detected_s, killed.recovered_s) == ("restart", 1.0, 2.0)
    assert killed.lost_steps == 1
    assert (slowed.how, slowed.detected_s, slowed.recovered_s) == ("slow_rank", 1.0, 2.0)
    assert slowed.lost_steps == 0
    # Of 13 seconds, 4 + 1 + 1 + 2 were spent on steps that were kept.
    assert table([killed, slowed], ledger).splitlines()[-1] == (
        "injected 2, detected 2, recovered 2; restarts 1, steps lost 1, goodput 62% of 13 s"
    )


def test_two_faults_at_once(tmp_path: Path) -> None:
    """Nobody gets on between them: what follows is put down to both."""
    write_run(tmp_path)
    log = EventLog(1)
    log.open(tmp_path)
    log.write("injected", t=105.5, step=5, what="hang", section="data")
    (hung, killed, _), _ = read_outcomes(tmp_path)
    assert (hung.how, hung.detected_s, hung.recovered_s) == ("restart", 1.5, 2.5)
    assert (killed.how, killed.recovered_s) == ("restart", 2.0)


def test_never_recovered(tmp_path: Path) -> None:
    write_run(tmp_path)
    [file] = (tmp_path / "events").iterdir()
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:7]))
    [outcome], _ = read_outcomes(tmp_path)
    assert outcome.recovered_s is None
    assert json.loads(file.read_text().splitlines()[-1])["what"] == "kill"


def test_timetable() -> None:
    def faults(seed: int) -> list[Any]:
        return random_faults(["kill", "nan_loss"], mean_s=10, duration_s=10_000, seed=seed)

    drawn = faults(4)
    assert drawn == faults(4) != faults(5)
    assert 900 < len(drawn) < 1100
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert len({fault.section for fault in drawn if fault.kind == "kill"}) == 4
    assert {fault.section for fault in drawn if fault.kind == "nan_loss"} == {*SECTIONS["nan_loss"]}
    assert [fault.after for fault in drawn] == sorted(fault.after for fault in drawn)
