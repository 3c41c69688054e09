"""What became of each fault of a run, by the events of the run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.monitoring.goodput import Ledger
from lightning_megatron.run_log.events import read_events
from tests.faults.acts import FATAL

_NOTICES = {"fault", "hang", "slow_rank", "skip", "rollback", "preempted"}
"""Kinds of events that report a fault."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Detection of one fault, and recovery from it."""

    fault: dict[str, Any]
    """The event of its injection."""
    detected_s: float | None
    """Seconds until the run reported it or was restarted; None if neither."""
    how: str
    """Kind of the event that reported it, or ``restart``."""
    recovered_s: float | None
    """Seconds until the first step after it; None if there was none."""
    lost_steps: int
    """Steps that were done again."""


def read_outcomes(run_dir: Path) -> tuple[list[Outcome], Ledger]:
    """The outcomes of all faults of a run, and what its time went into."""
    events, ledger = read_events(run_dir), Ledger()
    for event in events:
        ledger.add(event)
    injected = [event for event in events if event["kind"] == "injected"]
    ends = [*(fault["t"] for fault in injected), float("inf")][1:]
    return [_outcome(*pair, events) for pair in zip(injected, ends, strict=True)], ledger


def _outcome(fault: dict[str, Any], end: float, events: Sequence[dict[str, Any]]) -> Outcome:
    """Outcome of a fault; the next one is at ``end``.

    The run has recovered with the first step after that of the fault or, if processes were
    restarted before, with their first step. Until then every restart and report counts for this
    fault, even if another one was injected meanwhile.
    """
    at, mine = fault["t"], [event for event in events if event["rank"] == 0]
    before = [event["step"] for event in mine if event["t"] <= at and event["kind"] == "step"]
    restart: dict[str, Any] | None = None
    step: dict[str, Any] | None = None
    for event in mine:
        if event["t"] <= at:
            continue
        if event["kind"] == "start" and restart is None:
            restart = event
        dead = fault["what"] in FATAL and restart is None
        beyond = event["step"] > fault["step"] and not dead
        if event["kind"] == "step" and (restart is not None or beyond):
            step = event
            break
    until = max(end, step["t"]) if step is not None else float("inf")
    until = until if restart is None else restart["t"]
    told = [event for event in events if event["kind"] in _NOTICES and at < event["t"] < until]
    detected, how = None, ""
    if told:
        detected, how = told[0]["t"] - at, told[0]["kind"]
    elif restart is not None:
        detected, how = restart["t"] - at, "restart"
    lost = 0
    if restart is not None and step is not None:
        lost = max(max(before, default=0) - (step["step"] - 1), 0)
    return Outcome(
        fault=fault,
        detected_s=detected,
        how=how,
        recovered_s=None if step is None else step["t"] - at,
        lost_steps=lost,
    )


def table(outcomes: Sequence[Outcome], ledger: Ledger) -> str:
    """The outcomes as a table for a terminal."""
    rows = [("at", "fault", "rank", "step", "section", "noticed by", "after", "recovered", "lost")]
    first = ledger.attempts[0].started if ledger.attempts else 0.0
    for outcome in outcomes:
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
    totals = (
        f"injected {len(outcomes)}, "
        f"detected {sum(outcome.detected_s is not None for outcome in outcomes)}, "
        f"recovered {sum(outcome.recovered_s is not None for outcome in outcomes)}; "
        f"restarts {ledger.restarts}, steps lost {ledger.steps_lost}, "
        f"goodput {ledger.goodput() or 0.0:.0%} of {ledger.wall_s():.0f} s"
    )
    return "\n".join([*(line.rstrip() for line in lines), "", totals])


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
