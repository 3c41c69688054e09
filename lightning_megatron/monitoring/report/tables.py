"""The tables of the page."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from lightning_megatron.monitoring.report.run_history import Mark, RankFigures, Story
from lightning_megatron.monitoring.report.text import (
    duration,
    escape,
    middle_cut,
    moment,
    number,
    percent,
    seen_from,
    size,
)

MAX_ROWS = 200
"""Rows of a table; of more, the last."""
_SIGNS = 120
_PATH_CHARACTERS = 34
"""Room for a path beside the other columns on a page of 1100 pixels."""
_HOST_CHARACTERS = 16
_OUTLIER = 1.2
"""Times the median of all ranks, from which on a figure is pointed out."""

SYMBOLS = {
    "failed": "✕ failed",
    "silent": "✕ no end",
    "fault": "✕ fault",
    "save": "✕ failed save",
    "hang": "‖ hang",
    "slow_rank": "▼ slow rank",
    "rollback": "← rollback",
    "injected": "! injected",
    "preempted": "■ preempted",
    "interrupted": "■ interrupted",
    "stopped": "■ stopped",
}
STATES = {
    "verified": "✓ verified",
    "complete": "✓ complete",
    "damaged": "✕ damaged",
    "torn": "✕ torn",
    "gone": "– deleted",
    "unknown": "? cannot be read from here",
}
"""What stands on the disk."""


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], kinds: str = "", caption: str = ""
) -> str:
    """Return a table of cells that are HTML.

    Args:
        header: titles of the columns.
        rows: cells.
        kinds: a letter for each column: ``n`` for numbers, ``t`` for long texts, ``-`` for others.
        caption: said before it.
    """
    classes = [f' class="{k}"' if k in "nt" else "" for k in kinds.ljust(len(header), "-")]
    head = "".join(f"<th{c}>{escape(h)}</th>" for h, c in zip(header, classes, strict=True))
    lines = list(rows)
    more = len(lines) - MAX_ROWS
    if more > 0:
        caption = f"{caption} The last {MAX_ROWS} of {len(lines)}.".strip()
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{v}</td>" for v, c in zip(row, classes, strict=True)) + "</tr>"
        for row in lines[-MAX_ROWS:]
    )
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide"><table>{said}<thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def attempts_table(story: Story) -> str:
    """Return the attempts and what restarts cost."""
    rows = []
    attempts = story.ledger.attempts
    for attempt in attempts:
        last = attempt.number + 1 == len(attempts)
        steps = "–"
        if attempt.from_step is not None and attempt.to_step is not None:
            steps = f"{attempt.from_step:,} → {attempt.to_step:,}"
        until = story.end if last else attempt.last
        rows.append([
            str(attempt.number + 1),
            moment(attempt.started),
            duration(until - attempt.started),
            steps,
            duration(attempt.kept_s),
            duration(attempt.redone_s) if attempt.redone_s else "–",
            escape(attempt.status or (story.status if last else "no end")),
            duration(attempt.detect_s),
            duration(attempt.recover_s),
        ])  # fmt: skip
    header = ["Attempt", "Started", "Lasted", "Steps", "Time of steps kept"]
    header += ["Time of steps repeated or lost", "End", "Detected after", "Resumed after"]
    return table(header, rows, "n-n-nn-nn")


def faults_table(marks: Sequence[Mark]) -> str:
    """Return the faults, with the numbers that the plots show."""
    rows = [
        [
            f"<b>{mark.number}</b>",
            f"<b>{escape(SYMBOLS.get(mark.kind, mark.kind))}</b>",
            f"{mark.step:,}",
            escape(_ranks(mark)),
            escape(mark.section or "–"),
            escape(mark.text[:500]),
            escape(mark.action or "–"),
            moment(mark.t),
        ]
        for mark in marks
    ]
    header = ["No.", "What", "Step", "Rank", "Section", "Detail", "Action", "When"]
    return table(header, rows, "n-n--t--")


def _ranks(mark: Mark) -> str:
    """Who; of an end, the first that told of it, as the others mostly follow from it."""
    first, more = mark.ranks[:1], len(mark.ranks) - 1
    if mark.kind in ("failed", "interrupted", "stopped") and more > 0:
        return f"{first[0]}, then {more} more"
    shown = ", ".join(map(str, mark.ranks[:4])) or "–"
    return f"{shown}, … ({more + 1})" if more > 3 else shown


def ranks_table(ranks: Sequence[RankFigures], now: float) -> str:
    """Return the figures of each rank; those that stand out are marked with a triangle."""
    columns: list[tuple[str, Callable[[RankFigures], float | None], Callable[[float], str]]] = [
        ("Step, median", lambda r: r.median_s, duration),
        ("95 % below", lambda r: r.slow_s, duration),
    ]
    for section in ("data", "forward", "backward", "optimizer"):
        if any(section in rank.sections for rank in ranks):
            columns.append(
                (section.capitalize(), lambda r, s=section: r.share(s), percent)  # type: ignore[misc]
            )
    for name, title in (("peak_rss_gib", "Peak RSS"), ("peak_allocated_gib", "Peak on device")):
        if any(name in rank.memory_gib for rank in ranks):
            columns.append(
                (title, lambda r, n=name: r.memory_gib.get(n), lambda v: f"{v:.2f} GiB")  # type: ignore[misc]
            )
    cells: list[list[str]] = [[] for _ in ranks]
    for _, value, written in columns:
        values = [value(rank) for rank in ranks]
        known = [v for v in values if v is not None]
        usual = statistics.median(known) if known else 0.0
        for row, v in zip(cells, values, strict=True):
            stands_out = v is not None and len(known) > 1 and v > _OUTLIER * usual > 0
            text = "–" if v is None else written(v)
            row.append(f'<span class="stand">▲ {text}</span>' if stands_out else text)
    rows = [
        [
            str(rank.rank),
            _cut(rank.host, _HOST_CHARACTERS),
            f"{rank.steps:,}",
            *row,
            f"{escape(rank.last['kind'])} at step {escape(rank.last.get('step', ''))}, "
            f"{duration(max(now - rank.last['t'], 0.0))} before the end",
        ]
        for rank, row in zip(ranks, cells, strict=True)
    ]
    header = [
        "Rank",
        "Host",
        "Steps",
        *(title for title, _, _ in columns),
        "Last event",
    ]
    caption = f"▲ more than {_OUTLIER} times the median of all ranks."
    return table(header, rows, "n-n" + "n" * len(columns) + "t", caption)


def checkpoints_table(story: Story) -> str:
    """Return the saves in their order, with what stands on the disk now."""
    rows, seen = [], set()
    numbers = {mark.t: mark.number for mark in story.marks if mark.kind == "save"}
    for save in reversed(story.saves):
        path = str(save.get("path", ""))
        latest = path not in seen  # an earlier save under the same name is no more
        seen.add(path)
        rows.append([
            f"{save.get('step', 0):,}",
            moment(save["t"]),
            _outcome(save, numbers.get(save["t"])),
            STATES.get(story.states.get(path, ""), "–") if latest and save.get("ok") else "–",
            size(save.get("bytes")),
            duration(save.get("seconds")),
            duration(save.get("stall")),
            _cut(seen_from(path, story.run_dir), _PATH_CHARACTERS),
        ])  # fmt: skip
    header = ["Step", "When", "Save", "Now on the disk", "Size", "Took", "Training waited", "Path"]
    caption = "Verified: all hashes agree. Complete: sizes agree, hashes were not compared."
    return table(header, reversed(rows), "n---nnn-", caption)


def verified_list(story: Story) -> str:
    """Return which checkpoints attempts went on from, and how long it took to verify them."""
    items = [
        f"<li>Attempt {attempt + 1} went on from "
        f"<code>{escape(seen_from(str(event.get('path', '')), story.run_dir))}</code>, verified in "
        f"{duration(event.get('seconds'))} ({size(event.get('bytes'))}).</li>"
        for attempt, event in sorted(story.verified.items())[-MAX_ROWS:]
    ]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _cut(text: str, count: int) -> str:
    """A cell of so many characters, which shows the whole text to who points at it."""
    short = middle_cut(text, count)
    if short == text:
        return escape(text)
    return f'<span title="{escape(text)}">{escape(short)}</span>'


def checkpoints_strip(story: Story) -> str:
    """Return the saves on the axis of time."""
    begin = story.ledger.attempts[0].started
    span = max(story.end - begin, 1e-9)
    signs = []
    for save in story.saves[-_SIGNS:]:
        kind, sign = ("good", "✓") if save.get("ok") else ("bad", "✕")
        if not save.get("ok") and not save.get("error"):
            kind, sign = "", "○"
        title = f"step {save.get('step', 0):,}, {moment(save['t'])}"
        at = 100 * (save["t"] - begin) / span
        place = f'style="left:{at:.2f}%" title="{escape(title)}"'
        signs.append(f'<span class="{kind}" {place}>{sign}</span>')
    return f'<div class="strip">{"".join(signs)}</div>'


def _outcome(save: dict[str, object], fault: int | None) -> str:
    if save.get("ok"):
        return "✓ written"
    if save.get("error"):
        return f'<span class="stand">✕ failed</span>, see {fault}'
    return '<span title="given up for a newer one">○ given up</span>'


def metrics_table(metrics: dict[str, float]) -> str:
    """Return what was logged last."""
    rows = [[f"<code>{escape(name)}</code>", number(v)] for name, v in sorted(metrics.items())]
    return table(["Metric", "Last value"], rows, "-n")


def alerts_table(alerts: Sequence[dict[str, object]]) -> str:
    """Return the rules that came true."""
    rows = [
        [
            escape(alert.get("step", "")),
            "over" if alert.get("resolved") else "<b>! alert</b>",
            f"<code>{escape(alert.get('rule', ''))}</code>",
            escape(alert.get("value", "")),
        ]
        for alert in alerts
    ]
    return table(["Step", "What", "Rule", "Value"], rows, "n--n")
