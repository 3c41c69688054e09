"""The page: a verdict, where the time went, what went wrong, and the figures behind it."""

import math
import statistics

from lightning_megatron.monitoring.report.bars import goodput_bars
from lightning_megatron.monitoring.report.curves import curve
from lightning_megatron.monitoring.report.run_history import Reading, Story
from lightning_megatron.monitoring.report.style import CSS
from lightning_megatron.monitoring.report.tables import (
    alerts_table,
    attempts_table,
    checkpoints_strip,
    checkpoints_table,
    faults_table,
    metrics_table,
    ranks_table,
    verified_list,
)
from lightning_megatron.monitoring.report.text import (
    duration,
    escape,
    moment,
    number,
    percent,
    plural,
)

_MARKS = 60
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


def page(story: Story) -> str:
    """Return the page, complete in itself."""
    name = story.run_dir.rstrip("/").rpartition("/")[2] or story.run_dir
    parts = [
        f"<h1>Run <code>{escape(story.run)}</code> in {escape(name)}</h1>",
        _verdict(story),
        _facts(story),
        _section("Where the time went", goodput_bars(story) + attempts_table(story)),
        _section("What went wrong", _faults(story)),
        _section("Loss, learning rate and time of a step", _curves(story)),
        _section("Ranks", ranks_table(story.ranks, story.end)),
        _section("Checkpoints", _checkpoints(story)),
    ]
    if story.alerts:
        parts.append(_section("Alerts", alerts_table(story.alerts)))
    if story.dumps:
        parts.append(_section("Reports of hangs", _dumps(story)))
    if story.metrics:
        inner = f"<details><summary>All {len(story.metrics)} metrics</summary>"
        inner += f"{metrics_table(story.metrics)}</details>"
        parts.append(_section("What was logged last", inner))
    parts.append(_footer(story))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Run {escape(story.run)}</title><style>{CSS}</style></head>\n"
        f"<body>{chr(10).join(parts)}</body></html>\n"
    )


def verdict(story: Story) -> str:
    """Return how the run ended and what became of its time and of its steps."""
    ledger = story.ledger
    step = max((a.to_step or 0 for a in ledger.attempts), default=0)
    title = _ENDS.get(story.status, ("", story.status))[1]
    return (
        f"{title} at step {step:,}. Goodput {percent(ledger.goodput(story.end))}: "
        f"{duration(ledger.productive_s)} of {duration(ledger.wall_s(story.end))} went into steps "
        f"that count; {plural(ledger.restarts, 'restart')}, "
        f"{plural(ledger.steps_lost, 'step')} lost.{_saved(story)}"
    )


def _saved(story: Story) -> str:
    """Say what is left of a run whose saves did not go well, or which ended without its last."""
    if story.status == "running" or not story.tells_saves:
        return ""
    tried = f" ({plural(story.failed_saves, 'save')} failed)" if story.failed_saves else ""
    if story.saved_step == 0:
        return f" No checkpoint was written{tried}."
    if story.status != "completed":
        return f" The newest checkpoint holds step {story.saved_step:,}{tried}."
    return ""


def _verdict(story: Story) -> str:
    tone = _ENDS.get(story.status, ("", ""))[0]
    first, _, rest = verdict(story).partition(". ")
    why = ""
    if story.status in ("failed", "silent") and story.marks:
        last = story.marks[-1]
        ranks = ", ".join(map(str, last.ranks[:4]))
        who = f"Rank {ranks}: " if ranks else ""
        why = f"<p>{escape(who)}{escape(last.text[:300])}</p>"
    first, rest = escape(first), escape(rest)
    return f'<div class="verdict {tone}"><strong>{first}.</strong>{why}<p>{rest}</p></div>'


def _facts(story: Story) -> str:
    ledger, last = story.ledger, story.starts[-1] if story.starts else {}
    layout = last.get("layout")
    shape = ", ".join(f"{k}={v}" for k, v in layout.items() if v > 1) if layout else ""
    losses = [p.loss for p in story.points if p.loss is not None and not p.redone]
    times = [p.seconds for p in story.points]
    facts = {
        "Steps": number(float(max((a.to_step or 0 for a in ledger.attempts), default=0))),
        "Last loss": number(losses[-1]) if losses else None,
        "Step, median": duration(statistics.median(times)) if times else None,
        "Tokens/s": _metric(story, "perf/tokens_per_s", number),
        "MFU": _metric(story, "perf/mfu", percent),
        "Goodput": percent(ledger.goodput(story.end)),
        "Restarts": str(ledger.restarts),
        "Steps lost": number(float(ledger.steps_lost)),
        "Ranks": f"{last.get('world', len(story.ranks))}",
        "Layout": shape or None,
    }
    items = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts.items()
        if value is not None
    ]
    # As many in each row as leave the fewest places of the last one empty.
    columns = min((6, 5, 4, 3), key=lambda count: -len(items) % count)
    return f'<dl class="facts" style="--columns:{columns}">{"".join(items)}</dl>'


def _metric(story: Story, name: str, written: object) -> str | None:
    value = story.metrics.get(name)
    if value is None or not math.isfinite(value):
        return None
    return percent(value) if written is percent else number(value)


def _curves(story: Story) -> str:
    marks = story.marks[-_MARKS:]
    losses = [Reading(p.step, p.loss, p.attempt, p.redone) for p in story.points]
    seconds = [Reading(p.step, p.seconds, p.attempt, p.redone) for p in story.points]
    validations = sorted(
        (name for name in story.readings if name.startswith("val")),
        key=lambda name: ("loss" not in name, name),
    )
    rates = sorted(name for name in story.readings if not name.startswith("val"))
    every = [r.step for readings in (seconds, *story.readings.values()) for r in readings]
    steps = (min(every, default=0), max(every, default=0))
    drawn = curve("Loss", losses, marks, steps)
    for name in (*validations[:_VALIDATIONS], *rates[:1]):
        title = f"Learning rate, {name}" if name in rates else f"Validation, {name}"
        drawn += curve(title, story.readings[name], marks, steps)
    drawn += curve("Time of a step", seconds, marks, steps, robust=True, label=duration)
    if not drawn:
        return "<p>No step was recorded.</p>"
    key = []
    if 'class="band"' in drawn:
        key.append(("stroke line", "mean of the steps around"))
        key.append(("fill", "from the smallest to the largest of them"))
    if 'class="again"' in drawn:
        key.append(("stroke dash", "repeated later, or undone"))
    if marks:
        key.append(("stroke dots", "a fault, by its number above"))
    items = "".join(f'<li><i class="{kind}"></i>{text}</li>' for kind, text in key)
    return drawn + (f'<ul class="key">{items}</ul>' if items else "")


def _faults(story: Story) -> str:
    if not story.marks:
        return "<p>No fault, hang, rollback or failed save was recorded.</p>"
    return faults_table(story.marks)


def _dumps(story: Story) -> str:
    return "".join(
        f"<details><summary><code>{escape(title)}</code></summary><pre>{escape(text)}</pre></details>"
        for title, text in story.dumps
    )


def _checkpoints(story: Story) -> str:
    found = verified_list(story)
    if not story.saves:
        none = "No checkpoint was written."
        unknown = "Saves are recorded under MegatronStrategy only."
        return f"{found}<p>{none if story.tells_saves else unknown}</p>"
    return found + checkpoints_strip(story) + checkpoints_table(story)


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inner}</section>"


def _footer(story: Story) -> str:
    last = story.starts[-1] if story.starts else {}
    facts = [
        f"{key} {last[key]}" for key in ("strategy", "device", "torch", "python") if key in last
    ]
    lines = [
        f"Events of {escape(story.run_dir)}, read {moment(story.now)}. {escape(', '.join(facts))}.",
        "Goodput: time of the steps that were kept over the time since the first start, pauses "
        "after an attempt that ended as it should left out. A step lasts from the end of the one "
        "before, waiting for data included.",
        "Detected after: from the last step of the rank that stopped first until any rank reported "
        "the failure, or the next start; the step that was under way is in it. Resumed after: from "
        "there until the first step of the next attempt was done. Steps lost: those that had to be "
        "repeated, were undone, or stand in no checkpoint of a run that did not complete.",
    ]
    if story.formula:
        lines.append(f"FLOPs: {escape(story.formula)}")
    if story.other_runs:
        others = ", ".join(f"<code>{escape(run)}</code>" for run in story.other_runs[:20])
        lines.append(f"Other runs in this directory, for <code>--run</code>: {others}.")
    return f"<footer>{''.join(f'<p>{line}</p>' for line in lines)}</footer>"
