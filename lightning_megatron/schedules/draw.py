"""Pictures of timelines: image files, and traces for Perfetto.

Text is drawn by `simulate.render`. Works for simulated timelines and for measured ones.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_megatron.errors import ConfigError
from lightning_megatron.schedules.actions import Action, Kind, Schedule
from lightning_megatron.schedules.simulate import Span, Timeline

_COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#e8853a",
    Kind.BACKWARD_INPUT: "#54a24b",
    Kind.BACKWARD_WEIGHT: "#b58fc9",
}
_MEANINGS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.BACKWARD_WEIGHT: "backward, weight half",
}
_IDLE = "#efefef"
_PALE = 0.5
"""Share of white in the colour of the second of two stages that share a line."""
_PAGE = 10.0
"""Inches of a picture that fits on a page; its numbers shrink to fit."""
_LEAST_WIDTH = 8.0
"""Inches; less has no room for the title."""
_MAX_WIDTH = 14.0
"""Inches of a picture whose numbers cannot shrink further."""
_MARGIN = 1.2
"""Inches beside the bars, for the names of the lines."""
_LINE = 1 / 3
"""Inches that a line is high."""
_LABEL_SIZES = (8.0, 7.0, 6.0)
"""Points; a digit is about 0.65 of it wide."""
_OUTSIDE_FIT = 0.1
"""Share of the numbers that need not fit into their bars."""
_BEGIN = 0.6
"""Share of the width for the beginning of a step whose middle is cut out."""


def draw_timeline(
    timeline: Timeline,
    path: str | Path,
    *,
    unit: str = "forwards of a stage",
    whole: bool = False,
) -> None:
    """Draw ``timeline`` as an image of coloured bars, which hold the numbers of the microbatches.

    A rank of one or two stages has one line, where its second stage is paler. A rank of more has a
    line for each stage. Of a timeline whose numbers would not fit into their bars the beginning and
    the end are drawn, and the picture says what is left out.

    Args:
        timeline: what to draw.
        path: where to; the ending (``.png``, ``.svg``, ``.pdf``) says in which format.
        unit: of the timeline's times.
        whole: draw also the middle of a large timeline; numbers that do not fit are left out.

    Raises:
        ConfigError: when matplotlib is not installed or cannot write this format.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"{str(path)!r}: drawing needs matplotlib; nearest valid: "
            f"pip install 'lightning-megatron[monitor]', or a .json trace"
        ) from error
    schedule, lines, scale = timeline.schedule, _lines(timeline.schedule), _scale(timeline, whole)
    figure = Figure(figsize=(scale.width, 1.7 + _LINE * len(lines)))
    parts = figure.subplots(
        1,
        len(scale.parts),
        squeeze=False,
        sharey=True,
        width_ratios=[last - first for first, last in scale.parts],
    )[0]
    numbered = 0
    for axes, part in zip(parts, scale.parts, strict=True):
        axes.set_facecolor(_IDLE)
        _draw_bars(axes, timeline, lines, part, scale)
        numbered += _draw_labels(axes, timeline, lines, part, scale)
        axes.set_xlim(*part)
        axes.xaxis.get_major_locator().set_params(integer=True)
        for rank in range(1, schedule.num_ranks if len(lines) > schedule.num_ranks else 0):
            axes.axhline(rank * schedule.stages_per_rank - 0.5, color="#888888", linewidth=0.6)
    parts[0].set_ylim(len(lines) - 0.5, -0.5)
    parts[0].set_yticks(range(len(lines)), lines.values())
    told = [f"time ({unit})", *(["numbers are microbatches"] if numbered else [])]
    if len(parts) > 1:
        told.append(_mark_cut(parts, scale.parts))
    parts[0].set_xlabel("; ".join(told), fontsize=9)
    held = max(timeline.peak_live, default=0) / schedule.stages_per_rank
    figure.suptitle(
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches\n"
        f"step time {timeline.step_time:.6g} {unit}, bubble {timeline.bubble_fraction:.1%}, "
        f"a rank holds activations of up to {held:.3g} microbatches",
        fontsize=9.5,
    )
    _draw_legend(figure, timeline)
    figure.set_layout_engine("constrained")
    # The same picture gives the same file; text stays text.
    fixed: Any = {"svg.hashsalt": schedule.name, "svg.fonttype": "none"}
    undated: dict[str, Any] = {"metadata": {"Date": None}} if str(path).endswith(".svg") else {}
    try:
        with mpl.rc_context(fixed):
            figure.savefig(path, dpi=150, **undated)
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: {error}; nearest valid: a .png or .svg file") from error


class _Scale(NamedTuple):
    """How much of the time is drawn, and how large."""

    width: float
    """Inches of the picture."""
    points: float
    """Points of one unit of time."""
    label_size: float
    """Points of the numbers."""
    parts: tuple[tuple[float, float], ...]
    """First and last time of what is drawn: one part, or the beginning and the end."""


def _scale(timeline: Timeline, whole: bool) -> _Scale:
    """Choose the largest numbers that fit on a page, then a wider picture, then to cut it."""
    step = timeline.step_time or 1.0
    spans = [span for rank in timeline.spans for span in rank if span.end > span.start]
    digits = sorted(len(str(span.action.microbatch)) / (span.end - span.start) for span in spans)
    needed = digits[int((1 - _OUTSIDE_FIT) * (len(digits) - 1))] if digits else 0.0
    shortest = min((span.end - span.start for span in spans), default=step)
    everything = ((0.0, step),)
    for size in _LABEL_SIZES:
        points = 0.65 * size * needed + 1 / shortest
        width = points * step / 72 + _MARGIN
        if width <= (_PAGE if size > _LABEL_SIZES[-1] else _MAX_WIDTH):
            width = max(width, _LEAST_WIDTH)
            return _Scale(width, 72 * (width - _MARGIN) / step, size, everything)
    drawn = 72 * (_MAX_WIDTH - _MARGIN)
    if whole:
        return _Scale(_MAX_WIDTH, drawn / step, size, everything)
    seen = drawn / points
    parts = (0.0, _BEGIN * seen), (step - (1 - _BEGIN) * seen, step)
    return _Scale(_MAX_WIDTH, points, size, parts)


def _mark_cut(parts: Any, times: Sequence[tuple[float, float]]) -> str:
    """Draw the sides of the cut as torn; returns the text that says what is left out."""
    (left, right), ((_, begin), (end, _)) = parts, times
    left.spines["right"].set_visible(False)
    right.spines["left"].set_visible(False)
    right.tick_params(left=False)
    torn = {"marker": [(-0.5, -1), (0.5, 1)], "markersize": 9, "linestyle": "none", "mew": 1}
    for axes, side in ((left, 1), (right, 0)):
        axes.plot([side] * 2, [0, 1], transform=axes.transAxes, color="k", clip_on=False, **torn)
    return f"{begin:.3g} to {end:.4g} are left out"


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


def _colour(schedule: Schedule, kind: Kind, second: bool) -> str:
    """Colour of an action, paler on the second of two stages that share a line."""
    colour = _COLOURS[kind]
    if not second or schedule.stages_per_rank != 2:
        return colour
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + _PALE * (255 - c)):02x}" for c in channels)


def _draw_bars(
    axes: Any,
    timeline: Timeline,
    lines: dict[tuple[int, int | None], str],
    part: tuple[float, float],
    scale: _Scale,
) -> None:
    bars: dict[tuple[int, Action], list[tuple[float, float]]] = {}
    for rank, spans in enumerate(timeline.spans):
        for start, end, action in spans:
            if start < part[1] and end > part[0]:
                extent = start, end - start
                bars.setdefault((rank, action._replace(microbatch=0)), []).append(extent)
    for (rank, (kind, stage, _)), extents in bars.items():
        second = stage != timeline.schedule.stages_of_rank(rank)[0]
        shortest = min(extent for _, extent in extents)
        axes.broken_barh(
            extents,
            (_line_of(lines, rank, stage) - 0.45, 0.9),
            facecolors=_colour(timeline.schedule, kind, second),
            edgecolor="white",
            linewidth=min(0.5, 0.1 * scale.points * shortest),  # not all of a narrow bar
        )


def _draw_legend(figure: Any, timeline: Timeline) -> None:
    """Explain every colour of the picture."""
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    kinds = {action.kind for row in schedule.actions for action in row}
    two = schedule.stages_per_rank == 2
    names = {False: ", first stage" if two else "", True: ", second stage"}
    patches = [
        Patch(facecolor=_colour(schedule, kind, second), label=_MEANINGS[kind] + names[second])
        for kind in Kind
        if kind in kinds
        for second in ((False, True) if two else (False,))
    ]
    idle = "idle" if schedule.stages_per_rank <= 2 else "idle, or at work on another stage"
    patches.append(Patch(facecolor=_IDLE, edgecolor="#888888", linewidth=0.5, label=idle))
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=-(-len(patches) // 2) if two else len(patches),  # both stages in one column
        frameon=False,
        fontsize=7.5,
    )


def _draw_labels(
    axes: Any,
    timeline: Timeline,
    lines: dict[tuple[int, int | None], str],
    part: tuple[float, float],
    scale: _Scale,
) -> int:
    """Write the numbers that fit into their bars; returns how many."""
    written = 0
    for rank, spans in enumerate(timeline.spans):
        for start, end, action in spans:
            label, middle = str(action.microbatch), (start + end) / 2
            room = scale.points * (end - start)
            inside = part[0] <= start and end <= part[1]
            if inside and 0.65 * scale.label_size * len(label) <= room:
                line = _line_of(lines, rank, action.stage)
                axes.text(middle, line, label, ha="center", va="center", fontsize=scale.label_size)
                written += 1
    return written


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
