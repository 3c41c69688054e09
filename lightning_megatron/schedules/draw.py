"""Pictures of timelines: image files, and traces for Perfetto.

Text is drawn by `simulate.render`. Works for simulated timelines and for measured ones.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.actions import Action, Kind, Schedule
from lightning_megatron.schedules.simulate import Span, Timeline

_COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#e8853a",
    Kind.BACKWARD_INPUT: "#54a24b",
    Kind.BACKWARD_WEIGHT: "#c9a8d8",
}
_MEANINGS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.BACKWARD_WEIGHT: "backward, weight half",
}
_PALE = 0.55
"""Opacity of the second of two stages that share a line."""
_MAX_LABELS = 2000
"""Labels of a picture; more would take minutes to draw."""
_MAX_WIDTH = 24.0
"""Inches; of a wider picture nothing is left on a page."""
_LINE = 1 / 3
"""Inches that a line is high."""
_LABEL_SIZE = 6.0
"""Points; a digit is about 0.65 of it wide."""


def draw_timeline(
    timeline: Timeline, path: str | Path, *, unit: str = "forwards of a stage"
) -> None:
    """Draw ``timeline`` as an image of coloured bars, which hold the numbers of the microbatches.

    A rank of one or two stages has one line, where its second stage is paler. A rank of more has a
    line for each stage. Numbers that do not fit into their bars are left out.

    Args:
        timeline: what to draw.
        path: where to; the ending (``.png``, ``.svg``, ``.pdf``) says in which format.
        unit: of the timeline's times.

    Raises:
        ConfigError: when matplotlib is not installed or cannot write this format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"{str(path)!r}: drawing needs matplotlib; nearest valid: "
            f"pip install 'lightning-megatron[monitor]', or a .json trace"
        ) from error
    schedule, lines = timeline.schedule, _lines(timeline.schedule)
    actions = max(len(row) for row in timeline.spans)
    width = min(max(6.0, 0.25 * actions), _MAX_WIDTH)
    figure = Figure(figsize=(width, 1.6 + _LINE * len(lines)))
    axes = figure.subplots()
    points = 0.9 * 72 * width / (timeline.step_time or 1.0)  # of a unit of time, on the safe side
    _draw_bars(axes, timeline, lines, points)
    numbered = _draw_labels(axes, timeline, lines, points)
    axes.set_xlim(0, timeline.step_time or 1.0)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_yticks(range(len(lines)), lines.values())
    for rank in range(1, schedule.num_ranks if len(lines) > schedule.num_ranks else 0):
        axes.axhline(rank * schedule.stages_per_rank - 0.5, color="#888888", linewidth=0.6)
    axes.set_xlabel(f"time ({unit})" + ("; numbers are microbatches" if numbered else ""))
    axes.set_title(
        f"{schedule.name}: step time {timeline.step_time:.6g} {unit}, "
        f"bubble {timeline.bubble_fraction:.1%}, "
        f"at most {max(timeline.peak_live, default=0)} live activations",
        wrap=True,
    )
    figure.legend(loc="outside lower center", ncols=3 if width < 9 else 6, frameon=False)
    figure.set_layout_engine("constrained")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: {error}; nearest valid: a .png or .svg file") from error


def _lines(schedule: Schedule) -> dict[tuple[int, int | None], str]:
    """Names of the lines from top to bottom, by rank and, where each has its own, stage."""
    ranks = range(schedule.num_ranks)
    if schedule.stages_per_rank <= 2:
        return {(rank, None): f"rank {rank}" for rank in ranks}
    return {
        (rank, stage): f"rank {rank}, stage {stage}"
        for rank in ranks
        for stage in schedule.stages_of_rank(rank)
    }


def _line_of(lines: dict[tuple[int, int | None], str], rank: int, stage: int) -> int:
    places = list(lines)
    return places.index((rank, None) if (rank, None) in lines else (rank, stage))


def _draw_bars(
    axes: Any, timeline: Timeline, lines: dict[tuple[int, int | None], str], points: float
) -> None:
    bars: dict[tuple[int, Action], list[tuple[float, float]]] = {}
    for rank, spans in enumerate(timeline.spans):
        for start, end, action in spans:
            bars.setdefault((rank, action._replace(microbatch=0)), []).append((start, end - start))
    shared = len(lines) == timeline.schedule.num_ranks
    for (rank, (kind, stage, _)), extents in bars.items():
        second = shared and stage != timeline.schedule.stages_of_rank(rank)[0]
        shortest = min(extent for _, extent in extents)
        axes.broken_barh(
            extents,
            (_line_of(lines, rank, stage) - 0.45, 0.9),
            facecolors=_COLOURS[kind],
            alpha=_PALE if second else 1.0,
            edgecolor="white",
            linewidth=min(0.5, 0.1 * points * shortest),  # not all of a narrow bar
        )
    kinds = {action.kind for _, action in bars}
    for kind in (kind for kind in Kind if kind in kinds):
        axes.broken_barh([], (0, 0), facecolors=_COLOURS[kind], label=_MEANINGS[kind])
    if shared and timeline.schedule.stages_per_rank == 2:
        for name, alpha in (("first stage of a rank", 1.0), ("second stage (paler)", _PALE)):
            axes.broken_barh([], (0, 0), facecolors="#555555", alpha=alpha, label=name)


def _draw_labels(
    axes: Any, timeline: Timeline, lines: dict[tuple[int, int | None], str], points: float
) -> int:
    """Write the numbers that fit into their bars; returns how many."""
    fitting = [
        (_line_of(lines, rank, span.action.stage), span)
        for rank, spans in enumerate(timeline.spans)
        for span in spans
        if 0.65 * _LABEL_SIZE * len(str(span.action.microbatch)) + 1
        <= points * (span.end - span.start)
    ]
    if len(fitting) > _MAX_LABELS:
        return 0
    for line, (start, end, action) in fitting:
        middle, label = (start + end) / 2, str(action.microbatch)
        axes.text(middle, line, label, ha="center", va="center", fontsize=_LABEL_SIZE)
    return len(fitting)


def write_trace(timeline: Timeline, path: str | Path, *, unit: float = 1e3) -> None:
    """Write ``timeline`` as a trace that Perfetto (ui.perfetto.dev) and ``chrome://tracing`` open.

    Every rank is a thread with its actions, and a counter shows its live activations.

    Args:
        timeline: what to write.
        path: a ``.json`` file.
        unit: microseconds that one unit of the timeline's time stands for; 1e6 for seconds.
    """
    trace = {"traceEvents": list(_events(timeline, unit)), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def _events(timeline: Timeline, unit: float) -> Iterator[dict[str, Any]]:
    name = timeline.schedule.name
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"pipeline {name}"}}
    for rank, spans in enumerate(timeline.spans):
        thread = {"pid": 0, "tid": rank}
        yield {"ph": "M", **thread, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", **thread, "name": "thread_sort_index", "args": {"sort_index": rank}}
        for span in spans:
            kind, stage, microbatch = span.action
            yield {
                "ph": "X",
                **thread,
                "name": str(span.action),
                "cat": _MEANINGS[kind],
                "ts": span.start * unit,
                "dur": (span.end - span.start) * unit,
                "args": {"stage": stage, "microbatch": microbatch},
            }
        for time, live in _live(spans):
            counter = {"name": f"live activations, rank {rank}", "args": {"live": live}}
            yield {"ph": "C", "pid": 0, "ts": time * unit, **counter}


def _live(spans: tuple[Span, ...]) -> Iterator[tuple[float, int]]:
    """Number of live activations after each change."""
    live = 0
    for start, end, action in spans:
        if action.kind is Kind.FORWARD:
            live += 1
            yield start, live
        elif action.kind is not Kind.BACKWARD_INPUT:
            live -= 1
            yield end, live
