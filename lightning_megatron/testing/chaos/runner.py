"""A command with injected faults, and the outcome of each fault.

The command itself is not changed. Environment variables give it the faults, and PYTHONPATH a
directory with nothing but an entry point (``lightning.pytorch.callbacks_factory``), by which
Lightning gives every Trainer a `ChaosMonkey`. Only this command has that entry point; one in the
installed package would add the callback to every Trainer of production runs.

The processes leave files in the directory of the experiment: each injected fault, and the steps of
each rank as events. The outcomes follow from these and from the events of the run itself, if it
logs them (`EventLogWriter`, `Monitor`).
"""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megatron import env
from lightning_megatron.monitoring.events import read_events
from lightning_megatron.monitoring.goodput import Ledger
from lightning_megatron.testing.chaos.faults import KINDS, Fault, read_injected

_ENTRY_POINTS = """[lightning.pytorch.callbacks_factory]
chaos = lightning_megatron.testing.chaos.monkey:chaos_from_environment
"""
_METADATA = "Metadata-Version: 2.1\nName: lightning-megatron-chaos\nVersion: 1\n"
_GRACE_S = 20.0
"""Seconds between SIGTERM and SIGKILL at the end of the time."""
_NOTICES = {"fault", "hang", "slow_rank", "skip", "rollback", "preempted"}
"""Kinds of events that report a fault."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Detection of one fault, and recovery from it."""

    fault: dict[str, Any]
    """Record of `FaultLog`."""
    detected_s: float | None
    """Seconds until the run reported it or was restarted; None if neither."""
    how: str
    """Kind of the event that reported it, or ``restart``."""
    recovered_s: float | None
    """Seconds until the first step after it; None if there was none."""
    lost_steps: int
    """Steps that were done again."""


@dataclass(frozen=True, kw_only=True)
class ChaosResult:
    """Outcomes of all faults of a command."""

    outcomes: tuple[Outcome, ...]
    ledger: Ledger
    wall_s: float

    @property
    def goodput(self) -> float:
        """Time of the steps that were kept over time since the first start."""
        return self.ledger.goodput() or 0.0

    @property
    def recovered(self) -> bool:
        """Whether there were steps after every fault, or the run had come to its end."""
        ended = bool(self.ledger.attempts) and self.ledger.attempts[-1].status == "completed"
        return ended or all(outcome.recovered_s is not None for outcome in self.outcomes)


def run_command(
    command: Sequence[str],
    faults: Sequence[Fault],
    directory: Path,
    *,
    limit_s: float | None = None,
    output: Any = None,
    on_start: Callable[[int], None] = lambda pid: None,
) -> int | None:
    """Run a command with faults, to its end or that of the time; leaves no process behind.

    Args:
        command: with its arguments.
        faults: to be injected.
        directory: directory of the experiment.
        limit_s: seconds that it may take.
        output: file for standard output and error; those of this process by default.
        on_start: told the command's process id.

    Returns:
        The exit code of the command, negative if a signal ended it; None if its time was over.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as path:
        entry = Path(path, "lightning_megatron_chaos-1.dist-info")
        entry.mkdir()
        (entry / "entry_points.txt").write_text(_ENTRY_POINTS)
        (entry / "METADATA").write_text(_METADATA)
        # The path is unique, so it marks the processes of this command.
        environment = env.with_chaos("; ".join(map(str, faults)), str(directory.absolute()), path)
        process = subprocess.Popen(
            list(command), env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            with _interrupted_by_sigterm():
                on_start(process.pid)
                return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return None
        finally:
            _sweep(path)
            process.wait()


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that the command is cleaned up."""

    def leave(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(process: "subprocess.Popen[Any]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _sweep(mark: str) -> None:
    """Kill the processes of a command that are left: torchrun's workers have their own sessions."""
    needle = mark.encode()
    for _ in range(20):  # a process may be starting another one while we look
        left = [pid for pid in _processes() if needle in _environment_of(pid)]
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.1)


def _processes() -> list[int]:
    return [int(p.name) for p in Path("/proc").glob("[0-9]*") if int(p.name) != os.getpid()]


def _environment_of(pid: int) -> bytes:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return b"" if state == "Z" else Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def read_result(directory: Path) -> ChaosResult:
    """Read the outcomes from the files that the processes left."""
    steps = read_events(directory)
    ledger = Ledger()
    for event in steps:
        ledger.add(event)
    injected = read_injected(directory)
    places = {event["run_dir"] for event in steps if event.get("run_dir")}
    reports = [
        event for place in places for event in read_events(place) if event["kind"] in _NOTICES
    ]
    ends = [*(fault["t"] for fault in injected), float("inf")][1:]
    outcomes = [
        _outcome(fault, end, steps, reports) for fault, end in zip(injected, ends, strict=False)
    ]
    wall = ledger.wall_s() if ledger.attempts else 0.0
    return ChaosResult(outcomes=tuple(outcomes), ledger=ledger, wall_s=wall)


def _outcome(
    fault: dict[str, Any], end: float, steps: list[dict[str, Any]], reports: list[dict[str, Any]]
) -> Outcome:
    """Outcome of a fault; the next one is at ``end``.

    The run has recovered with the first step after that of the fault or, if processes were
    restarted before, with their first step. Until then every restart and report counts for this
    fault, even if another one was injected meanwhile.
    """
    at, mine = fault["t"], [event for event in steps if event["rank"] == 0]
    before = [event["step"] for event in mine if event["t"] <= at and event["kind"] == "step"]
    restart: dict[str, Any] | None = None
    step: dict[str, Any] | None = None
    for event in mine:
        if event["t"] <= at:
            continue
        if event["kind"] == "start" and restart is None:
            restart = event
        dead = KINDS[fault["what"]].ends and restart is None
        beyond = event["step"] > fault["step"] and not dead
        if event["kind"] == "step" and (restart is not None or beyond):
            step = event
            break
    until = max(end, step["t"]) if step is not None else float("inf")
    told = [event for event in reports if at < event["t"] < (restart["t"] if restart else until)]
    detected, how = None, ""
    if told:
        detected, how = told[0]["t"] - at, told[0]["kind"]
    elif restart is not None:
        detected, how = restart["t"] - at, "restart"
    return Outcome(
        fault=fault,
        detected_s=detected,
        how=how,
        recovered_s=None if step is None else step["t"] - at,
        lost_steps=0 if restart is None else max(max(before, default=0) - restart["step"], 0),
    )


def table(result: ChaosResult) -> str:
    """Return the outcomes as a table for a terminal."""
    rows = [("at", "fault", "rank", "step", "section", "detected by", "after", "recovered", "lost")]
    first = result.outcomes[0].fault["t"] if result.outcomes else 0.0
    if result.ledger.attempts:
        first = result.ledger.attempts[0].started
    for outcome in result.outcomes:
        fault = outcome.fault
        rows.append(
            (
                f"{fault['t'] - first:.0f} s",
                fault["what"],
                str(fault["rank"]),
                str(fault["step"]),
                fault["section"],
                outcome.how or "-",
                _seconds(outcome.detected_s),
                _seconds(outcome.recovered_s),
                str(outcome.lost_steps),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), "", _totals(result)])


def _totals(result: ChaosResult) -> str:
    outcomes, ledger = result.outcomes, result.ledger
    detected = sum(outcome.detected_s is not None for outcome in outcomes)
    recovered = sum(outcome.recovered_s is not None for outcome in outcomes)
    return (
        f"injected {len(outcomes)}, detected {detected}, recovered {recovered}; "
        f"restarts {ledger.restarts}, steps lost {ledger.steps_lost}, "
        f"goodput {result.goodput:.0%} of {result.wall_s:.0f} s"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
