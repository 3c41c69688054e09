"""Pictures of timelines: image files, and traces for Perfetto.

Text is drawn by `simulate.render`. Works for simulated timelines and for measured ones.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_megatron.errors import ConfigError
from lightning_megatron.pipeline.actions import Action, Kind
from lightning_megatron.pipeline.simulate import Span, Timeline

_COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#72b7b2",
    Kind.BACKWARD_INPUT: "#54a24b",
    Kind.BACKWARD_WEIGHT: "#eeca3b",
}
_MEANINGS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input half",
    Kind.BACKWARD_WEIGHT: "backward, weight half",
}
_MAX_LABELS = 2000
"""Actions beyond which labels would only be a grey haze, and take minutes to draw."""


def draw_timeline(timeline: Timeline, path: str | Path) -> None:
    """Draw ``timeline`` as an image, a line of coloured bars for every rank.

    Later stages of a rank are drawn in paler colours than its first.

    Args:
        timeline: what to draw.
        path: where to; the ending (``.png``, ``.svg``, ``.pdf``) says in which format.

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
    schedule = timeline.schedule
    count = sum(map(len, timeline.spans))
    width = min(max(6.0, 0.25 * count / schedule.num_ranks), 40.0)
    figure = Figure(figsize=(width, 1.2 + schedule.num_ranks / 3))
    axes = figure.subplots()
    _draw_bars(axes, timeline)
    if count <= _MAX_LABELS:
        _draw_labels(axes, timeline)
    axes.set_xlim(0, timeline.step_time or 1.0)
    axes.set_ylim(schedule.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.num_ranks), [f"rank {r}" for r in range(schedule.num_ranks)])
    axes.set_xlabel("time")
    axes.set_title(
        f"{schedule.name}: step time {timeline.step_time:.6g}, "
        f"bubble {timeline.bubble_fraction:.1%}, "
        f"at most {max(timeline.peak_live, default=0)} live activations"
    )
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.set_layout_engine("constrained")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: {error}; nearest valid: a .png or .svg file") from error


def _draw_bars(axes: Any, timeline: Timeline) -> None:
    bars: dict[tuple[int, Action], list[tuple[float, float]]] = {}
    for rank, spans in enumerate(timeline.spans):
        for start, end, action in spans:
            bars.setdefault((rank, action._replace(microbatch=0)), []).append((start, end - start))
    for (rank, (kind, stage, _)), extents in bars.items():
        stages = timeline.schedule.stages_of_rank(rank)
        axes.broken_barh(
            extents,
            (rank - 0.45, 0.9),
            facecolors=_COLOURS[kind],
            alpha=1.0 - 0.6 * stages.index(stage) / len(stages),
            edgecolor="white",
            linewidth=0.5,
        )
    kinds = {action.kind for _, action in bars}
    for kind in (kind for kind in Kind if kind in kinds):
        axes.broken_barh([], (0, 0), facecolors=_COLOURS[kind], label=_MEANINGS[kind])


def _draw_labels(axes: Any, timeline: Timeline) -> None:
    for rank, spans in enumerate(timeline.spans):
        for start, end, action in spans:
            label = str(action.microbatch)
            axes.text((start + end) / 2, rank, label, ha="center", va="center", fontsize=6)


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
