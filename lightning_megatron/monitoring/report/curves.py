"""Curves over steps, as SVG that stretches with the page and labels that do not.

A run of any length is thinned out to `BUCKETS` points, each the mean of the steps around it, with
the smallest and largest as a band, so that no peak is lost. What was done again later is a line of
its own for each attempt. Faults are numbered lines; their numbers stand in the table of faults.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_megatron.monitoring.report.run_history import Incident, Reading
from lightning_megatron.monitoring.report.text import number

BUCKETS = 480
_AGAIN_BUCKETS = 120
_WIDTH, _HEIGHT = 1000, 300
_TICKS = 4
_NEAR = 0.03
"""Share of the width; incidents that are nearer to each other have one label."""
_NEAR_END = 0.06
"""Share of the width around the labels of the first and the last step without other labels."""


@dataclass(frozen=True)
class Bucket:
    """Mean and range of the values of neighbouring steps."""

    step: float
    low: float
    mean: float
    high: float


def thin_out(
    values: Iterable[tuple[int, float]], first: int, last: int, count: int
) -> list[Bucket]:
    """Return at most ``count`` buckets of the finite values, which are steps and numbers."""
    width = max((last - first + 1) / count, 1.0)
    found: dict[int, list[float]] = {}
    for step, value in values:
        if math.isfinite(value):
            held = found.setdefault(int((step - first) / width), [0.0, 0.0, value, value])
            held[0] += 1
            held[1] += value
            held[2], held[3] = min(held[2], value), max(held[3], value)
    centre = first + (width - 1) / 2
    return [
        Bucket(centre + width * i, low, total / n, high)
        for i, (n, total, low, high) in sorted(found.items())
    ]


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return round numbers between two, about so many."""
    if not high > low:
        return [low]
    step = _distance(high - low, count)
    begin = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(begin, int(math.floor(high / step + 1e-9)) + 1)]


def _distance(span: float, count: int) -> float:
    """Round distance of ticks of which about ``count`` lie within ``span``."""
    unit: float = 10.0 ** math.floor(math.log10(span / count))
    return next(unit * m for m in (1, 2, 2.5, 5, 10) if span / (unit * m) <= count + 0.5)


@dataclass(frozen=True)
class Label:
    """Text beside the picture."""

    kind: str
    """CSS class."""
    text: str
    place: str = ""
    """CSS property."""


@dataclass(frozen=True)
class Curve:
    """A figure: SVG paths and the labels around them."""

    title: str
    notes: list[str]
    first: int
    last: int
    paths: list[tuple[str, str]]
    """CSS class and data of each path."""
    labels: list[Label]
    size: tuple[int, int] = (_WIDTH, _HEIGHT)

    def has(self, kind: str) -> bool:
        """Whether there is a path of this class."""
        return any(kind == k for k, _ in self.paths)


def curve(
    title: str,
    readings: Sequence[Reading],
    incidents: Sequence[Incident],
    steps: tuple[int, int],
    *,
    robust: bool = False,
    label: Callable[[float], str] = number,
) -> Curve | None:
    """Return a figure; None where there is nothing to draw.

    Args:
        title: of the figure.
        readings: values of steps, in the order of time.
        incidents: faults to be drawn.
        steps: the first and the last of the run, which all figures share.
        robust: whether a few large values may lie above the picture.
        label: makes the text of a value.
    """
    values = [(r, r.value) for r in readings if r.value is not None]
    finite = [v for _, v in values if math.isfinite(v)]
    if not finite:
        return None
    first, last = steps
    kept = thin_out(((p.step, v) for p, v in values if not p.redone), first, last, BUCKETS)
    again: dict[int, list[tuple[int, float]]] = {}
    for p, v in values:
        if p.redone:
            again.setdefault(p.attempt, []).append((p.step, v))
    frame = _Frame(first, last, *_range(finite, robust))
    paths = [("grid", frame.horizontal(y)) for y in frame.heights]
    paths += [("mean", frame.line(kept)), ("band", frame.band(kept))]
    for old in again.values():
        paths.append(("again", frame.line(thin_out(old, first, last, _AGAIN_BUCKETS))))
    paths += [("fault", frame.vertical(incident.step)) for incident in incidents]
    wild, beyond = len(values) - len(finite), sum(v > frame.high for v in finite)
    notes = [f"{wild} not finite and left out"] if wild else []
    notes += [f"{beyond} above the picture"] if beyond else []
    labels = _labels(frame, label) + _incident_labels(frame, incidents)
    return Curve(title, notes, first, last, [(k, data) for k, data in paths if data], labels)


def _range(values: list[float], robust: bool) -> tuple[float, float, float]:
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    if robust:
        low, high = 0.0, min(high, 2.5 * ordered[int(0.98 * (len(ordered) - 1))])
    if not high > low:
        margin = abs(high) * 0.05 or 1.0
        low, high = low - (0.0 if robust else margin), high + margin
    # To the next ticks, so that there is one at either end.
    tick = _distance(high - low, _TICKS)
    return tick * math.floor(low / tick + 1e-9), tick * math.ceil(high / tick - 1e-9), tick


@dataclass(frozen=True)
class _Frame:
    """Mapping of steps and values to the coordinates of the picture."""

    first: int
    last: int
    low: float
    high: float
    tick: float
    """Distance of the values with a label; divides ``low`` and ``high``."""

    @property
    def heights(self) -> list[float]:
        """Values that have a tick, the lowest and the highest among them."""
        first, last = round(self.low / self.tick), round(self.high / self.tick)
        return [round(i * self.tick, 12) for i in range(first, last + 1)]

    def x(self, step: float) -> float:
        """Horizontal position of a step, from 0 to 1."""
        return min(max((step - self.first) / max(self.last - self.first, 1), 0.0), 1.0)

    def y(self, value: float) -> float:
        """Height of a value, from 0 at the bottom to 1."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def at(self, step: float, value: float) -> str:
        return f"{_WIDTH * self.x(step):.5g} {_HEIGHT * (1 - self.y(value)):.4g}"

    def line(self, buckets: Sequence[Bucket]) -> str:
        if len(buckets) == 1:  # would be no line at all
            only, half = buckets[0], max(0.3, 0.003 * (self.last - self.first))
            return f"M{self.at(only.step - half, only.mean)}L{self.at(only.step + half, only.mean)}"
        return "M" + "L".join(self.at(b.step, b.mean) for b in buckets) if buckets else ""

    def band(self, buckets: Sequence[Bucket]) -> str:
        if not any(b.high > b.low for b in buckets):
            return ""
        there = [self.at(b.step, b.high) for b in buckets]
        back = [self.at(b.step, b.low) for b in reversed(buckets)]
        return "M" + "L".join([*there, *back]) + "Z"

    def vertical(self, step: float) -> str:
        x = f"{_WIDTH * self.x(step):.5g}"
        return f"M{x} 0L{x} {_HEIGHT:g}"

    def horizontal(self, value: float) -> str:
        y = f"{_HEIGHT * (1 - self.y(value)):.4g}"
        return f"M0 {y}L{_WIDTH:g} {y}"


def _labels(frame: _Frame, label: Callable[[float], str]) -> list[Label]:
    found = [Label("y", label(y), f"bottom:{100 * frame.y(y):.2f}%") for y in frame.heights]
    ends = {frame.first, frame.last}
    inner = (t for t in ticks(frame.first, frame.last, 6) if t == int(t))
    steps = ends.union(t for t in inner if _NEAR_END < frame.x(t) < 1 - _NEAR_END)
    found += [Label("x", f"{int(x):,}", f"left:{100 * frame.x(x):.2f}%") for x in sorted(steps)]
    return [*found, Label("axis", "step")]


def _incident_labels(frame: _Frame, incidents: Sequence[Incident]) -> list[Label]:
    groups: list[list[Incident]] = []
    for one in sorted(incidents, key=lambda one: (frame.x(one.step), one.number)):
        if groups and frame.x(one.step) - frame.x(groups[-1][0].step) < _NEAR:
            groups[-1].append(one)
        else:
            groups.append([one])
    return [
        Label(
            "m",
            _numbers([incident.number for incident in group]),
            f"left:{100 * frame.x(group[0].step):.2f}%",
        )
        for group in groups
    ]


def _numbers(found: list[int]) -> str:
    low, high = min(found), max(found)
    if len(found) < 3:
        return ",".join(map(str, sorted(found)))
    return f"{low}–{high}" if high - low == len(found) - 1 else f"{low}…"
