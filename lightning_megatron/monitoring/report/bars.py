"""Where the time of a run went: a bar for all of it, and one for each attempt on a common axis."""

from dataclasses import dataclass

from lightning_megatron.monitoring.report.run_history import Story
from lightning_megatron.monitoring.report.text import duration, escape, percent

PARTS = {
    "kept": "steps that count",
    "redone": "steps repeated, undone or lost",
    "save": "saving (training waits)",
    "check": "validation",
    "start": "starting",
    "other": "other, standing still after a fault included",
    "gap": "between attempts",
}
"""Kinds of time, in the order in which they are drawn, and what they are called."""

MAX_ATTEMPTS = 40
"""Attempts that have a bar of their own: the last ones."""


@dataclass(frozen=True)
class Time:
    """How the time of an attempt, and until the next, was spent."""

    begin: float
    """Seconds since the first start."""
    parts: dict[str, float]
    """Seconds by kind."""


def spent(story: Story) -> list[Time]:
    """Return how each attempt spent its time."""
    attempts, found = story.ledger.attempts, []
    for attempt in attempts:
        following = attempts[attempt.number + 1 : attempt.number + 2]
        last = attempt.last if following else story.end
        first = attempt.first_step_at
        parts = {
            "kept": attempt.kept_s,
            "redone": attempt.redone_s,
            "save": story.stall_s.get(attempt.number, 0.0),
            "check": story.validation_s.get(attempt.number, 0.0),
            "start": max((last if first is None else first) - attempt.started, 0.0),
        }
        parts["other"] = max(last - attempt.started - sum(parts.values()), 0.0)
        over = attempt.status == "completed"
        parts["gap"] = max(following[0].started - last, 0.0) if following and not over else 0.0
        found.append(Time(attempt.started - attempts[0].started, parts))
    return found


def goodput_bars(story: Story) -> str:
    """Return the bars with their key."""
    times = spent(story)
    total = {part: sum(time.parts[part] for time in times) for part in PARTS}
    goodput = story.ledger.goodput(story.end)
    rows = [_row("all", _segments(total, 0.0, sum(total.values())), percent(goodput))]
    span = max(story.end - story.ledger.attempts[0].started, 1e-9)
    if len(times) > 1:
        for number in range(max(len(times) - MAX_ATTEMPTS, 0), len(times)):
            time, attempt = times[number], story.ledger.attempts[number]
            how = attempt.status or ("no end" if number + 1 < len(times) else story.status)
            label = f"attempt {number + 1}"
            rows.append(_row(label, _segments(time.parts, time.begin, span), how))
    note = ""
    if len(times) > MAX_ATTEMPTS:
        note = f"<p><small>The last {MAX_ATTEMPTS} of {len(times)} attempts.</small></p>"
    key = "".join(
        f'<li><i class="{part}"></i>{escape(PARTS[part])}: {duration(total[part])}</li>'
        for part in PARTS
        if total[part] > 0
    )
    return f'<div class="bars">{"".join(rows)}</div>{note}<ul class="key">{key}</ul>'


def _row(label: str, segments: str, how: str) -> str:
    return (
        f'<b>{escape(label)}</b><div class="bar">{segments}</div>'
        f'<span class="how">{escape(how)}</span>'
    )


def _segments(parts: dict[str, float], begin: float, span: float) -> str:
    found, at = [], 100 * begin / max(span, 1e-9)
    for part, title in PARTS.items():
        width = 100 * parts[part] / max(span, 1e-9)
        if width > 0.02:
            found.append(
                f'<span class="{part}" style="left:{at:.3f}%;width:{width:.3f}%" '
                f'title="{escape(title)}: {duration(parts[part])}"></span>'
            )
        at += width
    return "".join(found)
