"""The page: summary, use of time, incidents, curves and tables."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from lightning_megatron.monitoring.report.bars import goodput_bars
from lightning_megatron.monitoring.report.curves import Curve, curve
from lightning_megatron.monitoring.report.run_history import LOAD, Reading, RunHistory
from lightning_megatron.monitoring.report.tables import (
    MAX_ROWS,
    alerts_table,
    attempts_table,
    experts_table,
    incidents_table,
    metrics_table,
    ranks_table,
    save_signs,
    saves_table,
)
from lightning_megatron.monitoring.report.text import (
    duration,
    number,
    percent,
    plural,
    seen_from,
    size,
    timestamp,
)
from lightning_megatron.topology.degrees import divided_axes

_INCIDENTS = 60
"""Faults that are drawn into the curves; of more, the last."""

_VALIDATIONS = 4
"""Curves of validations; of more metrics, those whose names speak of a loss first."""

_ENDS = {
    "completed": ("good", "✓ Completed"),
    "running": ("", "… Running"),
    "silent": ("bad", "✕ Stopped without an end: killed, or standing still"),
    "failed": ("bad", "✕ Failed"),
    "interrupted": ("", "■ Interrupted"),
    "preempted": ("", "■ Preempted"),
    "stopped": ("", "■ Stopped"),
}


def page(history: RunHistory) -> str:
    """Return the page, complete in itself."""
    headline, _, summary = summarize(history).partition(". ")
    facts = _facts(history)
    curves = _curves(history)
    name = history.run_dir.rstrip("/").rpartition("/")[2] or history.run_dir
    start = history.starts[-1] if history.starts else {}
    return _template().render(
        history=history,
        name=name,
        tone="bad" if _nothing_saved(history) else _ENDS.get(history.status, ("", ""))[0],
        headline=headline,
        summary=summary,
        cause=_cause(history),
        facts=facts,
        # As many in each row as leave the fewest places of the last one empty.
        fact_columns=min((6, 5, 4, 3), key=lambda count: -len(facts) % count),
        goodput_bars=goodput_bars(history),
        attempts=attempts_table(history),
        incidents=incidents_table(history.incidents) if history.incidents else None,
        curves=curves,
        curve_key=_curve_key(curves),
        ranks=ranks_table(
            history.ranks, history.end, pipeline=(start.get("layout") or {}).get("pp", 1) > 1
        ),
        verified=[
            {
                "attempt": attempt + 1,
                "path": seen_from(str(event.get("path", "")), history.run_dir),
                "seconds": event.get("seconds"),
                "bytes": event.get("bytes"),
            }
            for attempt, event in sorted(history.verified.items())[-MAX_ROWS:]
        ],
        saves=saves_table(history) if history.saves else None,
        save_signs=save_signs(history),
        alerts=alerts_table(history.alerts) if history.alerts else None,
        experts=experts_table(history.metrics),
        metrics=metrics_table(history.metrics) if history.metrics else None,
        software=", ".join(
            f"{key} {start[key]}"
            for key in ("strategy", "device", "torch", "python")
            if key in start
        ),
    )


def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(duration=duration, size=size, timestamp=timestamp)
    environment.globals["zip"] = zip
    return environment.get_template("page.html")


def summarize(history: RunHistory) -> str:
    """Return how the run ended and what became of its time and of its steps."""
    ledger, end = history.ledger, history.end
    step = max((a.to_step or 0 for a in ledger.attempts), default=0)
    title = _ENDS.get(history.status, ("", history.status))[1]
    if history.status == "completed" and _nothing_saved(history):
        title = "✕ Completed without a checkpoint"
    return (
        f"{title} at step {step:,}. Goodput {percent(ledger.goodput(end))}: "
        f"{duration(ledger.productive_s)} of {duration(ledger.wall_s(end))} went into steps "
        f"that count; {plural(ledger.restarts, 'restart')}, "
        f"{plural(ledger.steps_lost, 'step')} lost.{_saved(history)}"
    )


def _saved(history: RunHistory) -> str:
    """Say what is left of a run whose saves did not go well, or which ended without its last."""
    if history.status == "running" or not history.tells_saves:
        return ""
    tried = f" ({plural(history.failed_saves, 'save')} failed)" if history.failed_saves else ""
    if history.saved_step == 0:
        return f" No checkpoint was written{tried}."
    if history.status != "completed":
        return f" The newest checkpoint holds step {history.saved_step:,}{tried}."
    return f" {plural(history.failed_saves, 'save')} failed." if history.failed_saves else ""


def _nothing_saved(history: RunHistory) -> bool:
    """Whether a run has tried to save, and no checkpoint is left."""
    return bool(history.failed_saves) and history.saved_step == 0


def _cause(history: RunHistory) -> str:
    """Last incident of a run that failed."""
    if history.status not in ("failed", "silent") or not history.incidents:
        return ""
    last = history.incidents[-1]
    if last.follows:
        last = history.incidents[last.follows - 1]
    ranks = ", ".join(map(str, last.ranks[:4]))
    return (f"Rank {ranks}: " if ranks else "") + last.text[:300]


def _facts(history: RunHistory) -> dict[str, str]:
    """Titles and values of the boxes below the verdict."""
    ledger, last = history.ledger, history.starts[-1] if history.starts else {}
    layout = last.get("layout")
    shape = divided_axes(layout).replace(" ", ", ") if layout else ""
    losses = [p.loss for p in history.points if p.loss is not None and not p.redone]
    times = [p.seconds for p in history.points]
    facts = {
        "Steps": number(float(max((a.to_step or 0 for a in ledger.attempts), default=0))),
        "Last loss": number(losses[-1]) if losses else None,
        "Median step": duration(statistics.median(times)) if times else None,
        "Tokens/s": _metric(history, "perf/tokens_per_s", number),
        "MFU": _metric(history, "perf/mfu", percent),
        "Goodput": percent(ledger.goodput(history.end)),
        "Restarts": str(ledger.restarts),
        "Steps lost": number(float(ledger.steps_lost)),
        "Ranks": f"{last.get('world', len(history.ranks))}",
        "Layout": shape or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _metric(history: RunHistory, name: str, written: object) -> str | None:
    value = history.metrics.get(name)
    if value is None or not math.isfinite(value):
        return None
    return percent(value) if written is percent else number(value)


def _curves(history: RunHistory) -> list[Curve]:
    incidents = history.incidents[-_INCIDENTS:]
    losses = [Reading(p.step, p.loss, p.attempt, p.redone) for p in history.points]
    seconds = [Reading(p.step, p.seconds, p.attempt, p.redone) for p in history.points]
    validations = sorted(
        (name for name in history.readings if name.startswith("val")),
        key=lambda name: ("loss" not in name, name),
    )
    rates = sorted(name for name in history.readings if not name.startswith("val") and name != LOAD)
    every = [r.step for readings in (seconds, *history.readings.values()) for r in readings]
    steps = (min(every, default=0), max(every, default=0))
    found = [curve("Loss", losses, incidents, steps)]
    for name in (*validations[:_VALIDATIONS], *rates[:1]):
        title = f"Learning rate, {name}" if name in rates else f"Validation, {name}"
        found.append(curve(title, history.readings[name], incidents, steps))
    if LOAD in history.readings:
        title = f"Most used expert over the mean, {LOAD}"
        found.append(curve(title, history.readings[LOAD], incidents, steps))
    found.append(curve("Time of a step", seconds, incidents, steps, robust=True, label=duration))
    return [figure for figure in found if figure is not None]


def _curve_key(curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """CSS class and text of what the curves show."""
    key = []
    if any(curve.has("band") for curve in curves):
        key.append(("stroke line", "mean of the steps around"))
        key.append(("fill", "from the smallest to the largest of them"))
    if any(curve.has("again") for curve in curves):
        key.append(("stroke dash", "repeated later, or undone"))
    if any(curve.has("fault") for curve in curves):
        key.append(("stroke dots", "a fault, by its number above"))
    return key
