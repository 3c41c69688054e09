"""The tables of the page."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from markupsafe import Markup

from lightning_megatron.monitoring.report.run_history import Incident, RankFigures, RunHistory
from lightning_megatron.monitoring.report.text import (
    duration,
    middle_cut,
    number,
    percent,
    seen_from,
    size,
    timestamp,
)

MAX_ROWS = 200
"""Most rows of a table; of more, the last are shown."""
_SIGNS = 120
_PATH_CHARACTERS = 34
"""Room of a path beside the other columns on a page of 1100 pixels."""
_HOST_CHARACTERS = 16
_OF_LAYERS = "moe_layers/"
"""Beginning of the names of metrics of each layer with experts."""
_OUTLIER = 1.2
"""Multiple of the median of all ranks above which a figure is marked."""

SYMBOLS = {
    "failed": "✕ failed",
    "silent": "✕ no end",
    "fault": "✕ fault",
    "save": "✕ failed save",
    "hang": "‖ hang",
    "slow_rank": "▼ slow rank",
    "rollback": "← rollback",
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
"""Texts of the states of a checkpoint on the disk."""


Cell: TypeAlias = str | Markup
"""Text, which the template escapes, or HTML."""


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    kinds: str
    """A letter for each column: ``n`` for numbers, ``t`` for long texts, ``-`` for others."""
    note: str = ""

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Kind and title of each column."""
        return list(zip(self.kinds, self.header, strict=True))

    @property
    def shown_rows(self) -> Sequence[Sequence[Cell]]:
        """The last `MAX_ROWS` rows."""
        return self.rows[-MAX_ROWS:]

    @property
    def caption(self) -> str:
        """Text above the table, which says whether rows are left out."""
        if len(self.rows) <= MAX_ROWS:
            return self.note
        return f"{self.note} The last {MAX_ROWS} of {len(self.rows)}.".strip()


def attempts_table(history: RunHistory) -> Table:
    """Return the attempts and what restarts cost."""
    rows = []
    attempts = history.ledger.attempts
    for attempt in attempts:
        last = attempt.number + 1 == len(attempts)
        steps = "–"
        if attempt.from_step is not None and attempt.to_step is not None:
            steps = f"{attempt.from_step:,} → {attempt.to_step:,}"
        until = history.end if last else attempt.last
        rows.append([
            str(attempt.number + 1),
            timestamp(attempt.started),
            duration(until - attempt.started),
            steps,
            duration(attempt.kept_s),
            duration(attempt.redone_s) if attempt.redone_s else "–",
            attempt.status or (history.status if last else "no end"),
            duration(attempt.detect_s),
            duration(attempt.recover_s),
        ])  # fmt: skip
    header = ["Attempt", "Started", "Lasted", "Steps", "Time of steps kept"]
    header += ["Time of steps repeated or lost", "End", "Detected after", "Resumed after"]
    return Table(header, rows, "n-n-nn-nn")


def incidents_table(incidents: Sequence[Incident]) -> Table:
    """Return the incidents, with the numbers that the curves show."""
    rows = [
        [
            Markup("<b>{}</b>").format(incident.number),
            Markup("<b>{}</b>").format(SYMBOLS.get(incident.kind, incident.kind)),
            f"{incident.step:,}",
            _ranks(incident),
            incident.section or "–",
            incident.text[:500],
            incident.action or "–",
            timestamp(incident.t),
        ]
        for incident in incidents
    ]
    header = ["No.", "What", "Step", "Rank", "Section", "Detail", "Action", "When"]
    return Table(header, rows, "n-n--t--")


def _ranks(incident: Incident) -> str:
    """Ranks of an incident; for an end, the first to report it, as the others follow from it."""
    first, more = incident.ranks[:1], len(incident.ranks) - 1
    if incident.kind in ("failed", "interrupted", "stopped") and more > 0:
        return f"{first[0]}, then {more} more"
    shown = ", ".join(map(str, incident.ranks[:4])) or "–"
    return f"{shown}, … ({more + 1})" if more > 3 else shown


def ranks_table(ranks: Sequence[RankFigures], now: float, *, pipeline: bool = False) -> Table:
    """Return the figures of each rank; a triangle marks those far above the median.

    Args:
        ranks: figures.
        now: wall time at which the run ended, or was read.
        pipeline: whether ranks hold different stages, whose forwards and backwards, and waiting in
            them, differ as they should.
    """
    columns: list[tuple[str, Callable[[RankFigures], float | None], Callable[[float], str]]] = [
        ("Median step", lambda r: r.median_s, duration),
        ("95 % below", lambda r: r.slow_s, duration),
    ]
    named = [s for s in _SHARES if any(s in rank.sections for rank in ranks)]
    if named:
        columns += [(s.capitalize(), lambda r, s=s: r.share(s), percent) for s in named]  # type: ignore[misc]
        columns.append(("Other", lambda r: r.share_beside(named), percent))
    for name, title in (("peak_rss_gib", "Peak RAM"), ("peak_allocated_gib", "Peak on device")):
        if any(name in rank.memory_gib for rank in ranks):
            columns.append(
                (title, lambda r, n=name: r.memory_gib.get(n), lambda v: f"{v:.2f} GiB")  # type: ignore[misc]
            )
    by_stage = ("Forward", "Backward", "Other") if pipeline else ("Other",)
    cells: list[list[Cell]] = [[] for _ in ranks]
    for title, value, written in columns:
        values = [value(rank) for rank in ranks]
        known = [v for v in values if v is not None]
        usual = statistics.median(known) if known else 0.0
        compared = len(known) > 1 and title not in by_stage
        for row, v in zip(cells, values, strict=True):
            stands_out = v is not None and compared and v > _OUTLIER * usual > 0
            text = "–" if v is None else written(v)
            row.append(
                Markup('<span class="stand">▲ {}</span>').format(text) if stands_out else text
            )
    rows = [
        [
            str(rank.rank),
            _cut(rank.host, _HOST_CHARACTERS),
            f"{rank.steps:,}",
            *row,
            _last_event(rank, now),
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
    if named:
        shares = "Data to Other: shares of the time of a step, waiting for other ranks included"
        stages = "; under a pipeline stages differ in forward and backward" if pipeline else ""
        caption = f"{shares}{stages}. {caption}"
    return Table(header, rows, "n-n" + "n" * len(columns) + "t", caption)


_SHARES = ("data", "forward", "backward", "optimizer")
"""Sections of a step that have a column."""
_TOGETHER_S = 1.0
"""Seconds before the end of a run within which ranks have ended together."""


def _last_event(rank: RankFigures, now: float) -> str:
    """Last event of a rank, and how long before the end it was, where that tells anything."""
    text, before = f"{rank.last['kind']}, step {rank.last.get('step', 0):,}", now - rank.last["t"]
    return text if before < _TOGETHER_S else f"{text}, {duration(before)} before the end"


def saves_table(history: RunHistory) -> Table:
    """Return the saves in the order of time, with the present state of their checkpoints."""
    rows: list[list[Cell]] = []
    seen = set()
    numbers = {one.t: one.number for one in history.incidents if one.kind == "save"}
    for save in reversed(history.saves):
        path = str(save.get("path", ""))
        latest = path not in seen  # an earlier save under the same name is no more
        seen.add(path)
        rows.append([
            f"{save.get('step', 0):,}",
            timestamp(save["t"]),
            _outcome(save, numbers.get(save["t"])),
            STATES.get(history.states.get(path, ""), "–") if latest and save.get("ok") else "–",
            size(save.get("bytes")),
            duration(save.get("seconds")),
            duration(save.get("stall")),
            _cut(seen_from(path, history.run_dir), _PATH_CHARACTERS),
        ])  # fmt: skip
    header = ["Step", "When", "Save", "Now on the disk", "Size", "Took", "Training waited", "Path"]
    caption = "Verified: all hashes agree. Complete: sizes agree, hashes were not compared."
    return Table(header, rows[::-1], "n---nnn-", caption)


def _cut(text: str, count: int) -> Cell:
    """Cell of at most ``count`` characters; its title is the whole text."""
    short = middle_cut(text, count)
    if short == text:
        return text
    return Markup('<span title="{}">{}</span>').format(text, short)


@dataclass(frozen=True)
class SaveSign:
    """A save on the axis of time."""

    kind: str
    """CSS class."""
    text: str
    left: float
    """Percent of the axis."""
    title: str


def save_signs(history: RunHistory) -> list[SaveSign]:
    """Return the last saves on the axis of time."""
    begin = history.ledger.attempts[0].started
    span = max(history.end - begin, 1e-9)
    signs = []
    for save in history.saves[-_SIGNS:]:
        kind, sign = ("good", "✓") if save.get("ok") else ("bad", "✕")
        if not save.get("ok") and not save.get("error"):
            kind, sign = "", "○"
        title = f"step {save.get('step', 0):,}, {timestamp(save['t'])}"
        signs.append(SaveSign(kind, sign, 100 * (save["t"] - begin) / span, title))
    return signs


def _outcome(save: dict[str, object], number: int | None) -> Cell:
    if save.get("ok"):
        return "✓ written"
    if save.get("error"):
        return Markup('<span class="stand">✕ failed</span>, see {}').format(number)
    return Markup('<span title="given up for a newer one">○ given up</span>')


def experts_table(metrics: dict[str, float]) -> Table | None:
    """Return the use of experts in each layer; None where there are none."""
    layers: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if name.startswith(_OF_LAYERS):
            _, what, layer = name.split("/", 2)
            layers.setdefault(layer, {})[what] = value
    if not layers:
        return None
    columns = (
        ("Most used over mean", "load_max_over_mean", number),
        ("Without a token", "dead_experts", number),
        ("Choices dropped", "dropped_fraction", percent),
        ("Entropy, nats", "entropy", number),
    )
    rows = [
        [
            Markup("<code>{}</code>").format(layer),
            *(text(of.get(what)) for _, what, text in columns),
        ]
        for layer, of in layers.items()
    ]
    return Table(["Layer", *(title for title, _, _ in columns)], rows, "-nnnn")


def metrics_table(metrics: dict[str, float]) -> Table:
    """Return the last value of each metric, without those of layers."""
    rows = [
        [Markup("<code>{}</code>").format(name), number(v)]
        for name, v in sorted(metrics.items())
        if not name.startswith(_OF_LAYERS)
    ]
    return Table(["Metric", "Last value"], rows, "-n")


def alerts_table(alerts: Sequence[dict[str, object]]) -> Table:
    """Return the alerts and their ends."""
    rows = [
        [
            str(alert.get("step", "")),
            "over" if alert.get("resolved") else Markup("<b>! alert</b>"),
            Markup("<code>{}</code>").format(alert.get("rule", "")),
            str(alert.get("value", "")),
        ]
        for alert in alerts
    ]
    return Table(["Step", "What", "Rule", "Value"], rows, "n--n")
