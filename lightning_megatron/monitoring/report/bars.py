"""Time of a run by what it was spent on: a bar for the run, and one for each attempt."""

from dataclasses import dataclass

from lightning_megatron.monitoring.report.run_history import RunHistory
from lightning_megatron.monitoring.report.text import duration, percent

PARTS = {
    "kept": "steps that count",
    "redone": "steps repeated, undone or lost",
    "save": "saving (training waits)",
    "check": "validation",
    "start": "starting",
    "other": "other, standing still after a fault included",
    "gap": "between attempts",
}
"""Kinds of time in the order in which they are drawn, with their titles."""

MAX_ATTEMPTS = 40
"""Most attempts that have a bar of their own; of more, the last."""


@dataclass(frozen=True)
class TimeSpent:
    """Time of an attempt, and of the pause until the next, by what it was spent on."""

    begin: float
    """Seconds since the first start."""
    parts: dict[str, float]
    """Seconds by kind."""


def time_spent(history: RunHistory) -> list[TimeSpent]:
    """Return how each attempt spent its time."""
    attempts, found = history.ledger.attempts, []
    for attempt in attempts:
        following = attempts[attempt.number + 1 : attempt.number + 2]
        last = attempt.last if following else history.end
        first = attempt.first_step_at
        parts = {
            "kept": attempt.kept_s,
            "redone": attempt.redone_s,
            "save": history.stall_s.get(attempt.number, 0.0),
            "check": history.validation_s.get(attempt.number, 0.0),
            "start": max((last if first is None else first) - attempt.started, 0.0),
        }
        parts["other"] = max(last - attempt.started - sum(parts.values()), 0.0)
        over = attempt.status == "completed"
        parts["gap"] = max(following[0].started - last, 0.0) if following and not over else 0.0
        found.append(TimeSpent(attempt.started - attempts[0].started, parts))
    return found


@dataclass(frozen=True)
class Segment:
    """Part of a bar."""

    part: str
    """Key of `PARTS`, the CSS class."""
    left: float
    """Percent of the bar's width at which it begins."""
    width: float
    """Percent of the bar's width."""
    title: str


@dataclass(frozen=True)
class Bar:
    """Line with a bar."""

    label: str
    segments: list[Segment]
    outcome: str


@dataclass(frozen=True)
class Bars:
    """A bar for the whole run, then one for each attempt, with their key."""

    rows: list[Bar]
    attempts: int
    key: list[tuple[str, str]]
    """CSS class and text."""

    @property
    def left_out(self) -> bool:
        """Whether the first attempts have no bar."""
        return self.attempts > MAX_ATTEMPTS


def goodput_bars(history: RunHistory) -> Bars:
    """Return the bars of a run with at least one attempt."""
    attempts, times = history.ledger.attempts, time_spent(history)
    total = {part: sum(time.parts[part] for time in times) for part in PARTS}
    goodput = history.ledger.goodput(history.end)
    rows = [Bar("all", _segments(total, 0.0, sum(total.values())), percent(goodput))]
    span = max(history.end - attempts[0].started, 1e-9)
    if len(times) > 1:
        for number in range(max(len(times) - MAX_ATTEMPTS, 0), len(times)):
            time, status = times[number], attempts[number].status
            outcome = status or ("no end" if number + 1 < len(times) else history.status)
            segments = _segments(time.parts, time.begin, span)
            rows.append(Bar(f"attempt {number + 1}", segments, outcome))
    key = [
        (part, f"{title}: {duration(total[part])}")
        for part, title in PARTS.items()
        if total[part] > 0
    ]
    return Bars(rows, len(times), key)


def _segments(parts: dict[str, float], begin: float, span: float) -> list[Segment]:
    found, left = [], 100 * begin / max(span, 1e-9)
    for part, title in PARTS.items():
        width = 100 * parts[part] / max(span, 1e-9)
        if width > 0.02:
            found.append(Segment(part, left, width, f"{title}: {duration(parts[part])}"))
        left += width
    return found
