"""`lightning-megatron chaos`: the command gets its faults, nothing outlives it, the sums agree."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_megatron.cli import main
from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.events import EventLog
from lightning_megatron.testing.chaos.faults import (
    KINDS,
    Fault,
    FaultLog,
    RunPosition,
    random_faults,
)
from lightning_megatron.testing.chaos.runner import read_result, run_command, table

_COMMAND = """
import json, os, subprocess, sys
from importlib.metadata import entry_points
[entry] = entry_points(group="lightning.pytorch.callbacks_factory")
left = subprocess.Popen(["sleep", "300"], start_new_session=True)
faults = os.environ["LIGHTNING_MEGATRON_CHAOS"]
print(json.dumps([entry.value, faults, left.pid]), flush=True)
sys.exit(3)
"""


def test_command_inherits_the_faults_and_leaves_nothing(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w") as output:
        command = [sys.executable, "-c", _COMMAND]
        code = run_command(command, [Fault(kind="kill", step=3)], tmp_path / "x", output=output)
    assert code == 3
    entry, faults, left = json.loads((tmp_path / "output").read_text())
    assert entry == "lightning_megatron.testing.chaos.monkey:chaos_from_environment"
    assert faults == "kill:step=3"
    deadline = time.monotonic() + 60
    while Path(f"/proc/{left}").exists() and time.monotonic() < deadline:
        if Path(f"/proc/{left}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{left}").exists()
    assert "LIGHTNING_MEGATRON_CHAOS" not in os.environ


def test_end_of_the_time(tmp_path: Path) -> None:
    assert run_command(["sleep", "3600"], [], tmp_path / "x", limit_s=0.2) is None


def test_a_terminated_rehearsal_leaves_nothing(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            run_command(
                ["sleep", "3600"],
                [],
                tmp_path / "x",
                on_start=lambda pid: os.write(writing, b"%d" % pid) and None,
            )
        finally:
            os._exit(0)
    slept = int(os.read(reading, 20))
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    assert not Path(f"/proc/{slept}").exists()


def write_run(directory: Path) -> None:
    """Steps 0 to 5, a kill, a restart from 4, a slow step noticed by the run, and its end."""
    clock = iter(float(second) for second in range(100, 1000))

    def tick() -> float:
        return next(clock)

    def event(log: EventLog, kind: str, step: int, **fields: Any) -> None:
        log.step = step
        log.write(kind, t=tick(), **fields)

    def inject(index: int, fault: Fault, step: int, attempt: int) -> None:
        now = RunPosition(rank=0, world_size=2, step=step, section=fault.section, attempt=attempt)
        assert FaultLog(directory, rank=0).claim(index, fault, now)
        [path] = directory.glob(f"rank00000-{index:03d}-*")
        path.write_text(json.dumps({**json.loads(path.read_text()), "t": tick()}))

    log = EventLog(0)
    log.identify(run="chaos")
    log.open(directory)
    own = EventLog(0)
    own.open(directory / "own")
    event(log, "start", 0, run_dir=str(directory / "own"))  # at 100 s
    for step in range(1, 6):
        event(log, "step", step, seconds=1.0)  # 101 to 105
    inject(0, Fault(kind="kill"), 5, 0)  # 106
    event(log, "start", 4, run_dir=str(directory / "own"))  # 107
    event(log, "step", 5, seconds=1.0)
    event(log, "step", 6, seconds=1.0)  # 109
    inject(1, Fault(kind="slow"), 6, 1)  # 110
    event(own, "slow_rank", 6)  # 111
    event(log, "step", 7, seconds=2.0)  # 112
    event(log, "end", 7, status="completed")


def test_ledger(tmp_path: Path) -> None:
    write_run(tmp_path)
    result = read_result(tmp_path)
    killed, slowed = result.outcomes
    assert (killed.how, killed.detected_s, killed.recovered_s) == ("restart", 1.0, 2.0)
    assert killed.lost_steps == 1
    assert (slowed.how, slowed.detected_s, slowed.recovered_s) == ("slow_rank", 1.0, 2.0)
    assert slowed.lost_steps == 0
    assert result.ledger.restarts == 1
    assert result.ledger.steps_lost == 1
    # Of 13 seconds, 4 + 1 + 1 + 2 were spent on steps that were kept.
    assert result.goodput == pytest.approx(8 / 13)
    assert result.recovered
    last = table(result).splitlines()[-1]
    assert last == (
        "injected 2, detected 2, recovered 2; restarts 1, steps lost 1, goodput 62% of 13 s"
    )


def test_two_faults_at_once(tmp_path: Path) -> None:
    """Nobody gets on between them: what follows is put down to both."""
    write_run(tmp_path)
    fault = Fault(kind="hang", section="data")
    now = RunPosition(rank=0, world_size=2, step=5, section="data")
    assert FaultLog(tmp_path, rank=0).claim(2, fault, now)
    [path] = tmp_path.glob("rank00000-002-*")
    path.write_text(json.dumps({**json.loads(path.read_text()), "t": 105.5}))
    hung, killed, _ = read_result(tmp_path).outcomes
    assert (hung.how, hung.detected_s, hung.recovered_s) == ("restart", 1.5, 2.5)
    assert (killed.how, killed.recovered_s) == ("restart", 2.0)


def test_never_recovered(tmp_path: Path) -> None:
    write_run(tmp_path)
    file = tmp_path / "events" / "rank_00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:6]))
    result = read_result(tmp_path)
    assert [outcome.recovered_s for outcome in result.outcomes] == [None, None]
    assert not result.recovered


def test_exit_codes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def chaos(*args: str) -> int:
        return main(["chaos", "--directory", str(tmp_path / "x"), *args])

    assert chaos("--faults", "kil", "--", "true") == 2
    assert "nearest valid: 'kill'" in capfd.readouterr().err
    assert chaos("--faults", "kill") == 2
    assert "no command" in capfd.readouterr().err
    assert chaos("--", "/no/such/command") == 2
    assert chaos("--", "false") == 1
    assert "injected 0" in capfd.readouterr().out
    assert chaos("--", "true") == 0
    assert main(["chaos", "--list"]) == 0
    listed = capfd.readouterr().out
    assert all(f"{name} " in listed for name in KINDS)
    (tmp_path / "x" / "started").touch()
    assert chaos("--", "true") == 2


def test_timetable() -> None:
    kinds = "kill stop:amount=8 slow:section=data,steps=2"
    faults = random_faults(kinds, mean_s=10, duration_s=10_000, seed=4)
    assert faults == random_faults(kinds, mean_s=10, duration_s=10_000, seed=4)
    assert faults != random_faults(kinds, mean_s=10, duration_s=10_000, seed=5)
    assert 900 < len(faults) < 1100
    assert {fault.kind for fault in faults} == {"kill", "stop", "slow"}
    assert {fault.amount for fault in faults if fault.kind == "stop"} == {8}
    assert {fault.section for fault in faults if fault.kind == "slow"} == {"data"}
    assert len({fault.section for fault in faults if fault.kind == "kill"}) == 4
    assert len({fault.ranks(4) for fault in faults}) == 4
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)


@pytest.mark.parametrize(
    ("options", "says"), [({"mean_s": 0}, "mean_s=0"), ({"duration_s": -1}, "duration_s=-1")]
)
def test_timetable_mistakes(options: dict[str, float], says: str) -> None:
    usual: dict[str, Any] = {"mean_s": 1, "duration_s": 1, "seed": 1}
    with pytest.raises(ConfigError, match=says):
        random_faults("kill", **{**usual, **options})
    with pytest.raises(ConfigError, match="no fault"):
        random_faults("", **usual)
