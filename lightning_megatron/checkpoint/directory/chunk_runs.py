"""Runs: regular rectangles of a tensor, stored as a rule.

The parts of a tensor are regular: rank 17 of 1024 holds the rows from 17 x 64 on, rank 18 the next.
A thousand rectangles are thus one rectangle with a count, a distance and a step of ranks; two axes
of a layout (tp, dp) are repetitions of repetitions. Runs keep the root manifest small: it names
every chunk of every tensor, and its size grows with the number of tensors and not with that of
ranks. Rectangles that follow no rule are stored one by one.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeAlias

Rectangle: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, per dimension."""


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """Repetition of a rectangle, or of a repetition."""

    count: int
    """Number of times, the first one included."""
    part_step: int
    """Number that is added to that of the part, each time."""
    steps: tuple[int, ...]
    """Numbers that are added to the offsets, each time."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Rectangles of one tensor and of equal sizes, at regular distances.

    >>> run = Run(part=0, offsets=(0, 0), sizes=(2, 4), repeats=(
    ...     Repeat(count=2, part_step=1, steps=(2, 0)),))
    >>> list(run.rectangles())
    [(0, (0, 0)), (1, (2, 0))]
    """

    part: int
    """Part that holds the first rectangle: the rank that wrote it."""
    offsets: tuple[int, ...]
    """Index of the first element of the first rectangle, per dimension."""
    sizes: tuple[int, ...]
    """Elements of each rectangle, per dimension."""
    repeats: tuple[Repeat, ...] = ()
    """Repetitions, the innermost first."""

    @property
    def count(self) -> int:
        """Number of rectangles."""
        return math.prod(repeat.count for repeat in self.repeats)

    def rectangles(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield part and offsets of every rectangle."""
        for times in product(*(range(repeat.count) for repeat in reversed(self.repeats))):
            part, offsets = self.part, self.offsets
            for number, repeat in zip(reversed(times), self.repeats, strict=True):
                part += number * repeat.part_step
                pairs = zip(offsets, repeat.steps, strict=True)
                offsets = tuple(offset + number * step for offset, step in pairs)
            yield part, offsets

    def plain(self) -> list[Any]:
        """Return the run as JSON data."""
        repeats = [[r.count, r.part_step, list(r.steps)] for r in self.repeats]
        first = [self.part, list(self.offsets), list(self.sizes)]
        return [*first, repeats] if repeats else first


def compress(rectangles: Iterable[tuple[int, Rectangle]]) -> tuple[Run, ...]:
    """Return rectangles as runs.

    Args:
        rectangles: part, offsets and sizes of each; no two begin in one place.

    >>> rows = [(rank, ((4 * rank,), (4,))) for rank in range(1000)]
    >>> [run.plain() for run in compress([*rows, (1000, ((4000,), (1,)))])]
    [[0, [0], [4], [[1000, 1, [4]]]], [1000, [4000], [1]]]
    """
    ordered = sorted(rectangles, key=lambda item: item[1])
    runs = [Run(part=part, offsets=offsets, sizes=sizes) for part, (offsets, sizes) in ordered]
    while len(merged := _merged(runs)) < len(runs):
        runs = merged
    return tuple(runs)


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Join neighbours that are alike and at equal distances."""
    found: list[Run] = []
    begin = 0
    while begin < len(runs):
        first, end = runs[begin], begin + 1
        step = _step(first, runs[end]) if end < len(runs) else None
        while step is not None and end < len(runs) and _step(runs[end - 1], runs[end]) == step:
            end += 1
        if step is not None:
            part_step, steps = step
            repeat = Repeat(count=end - begin, part_step=part_step, steps=steps)
            first = replace(first, repeats=(*first.repeats, repeat))
        found.append(first)
        begin = end
    return found


def _step(one: Run, other: Run) -> tuple[int, tuple[int, ...]] | None:
    """Return the distance of two runs; None where they also differ in sizes or repetitions."""
    if one.sizes != other.sizes or one.repeats != other.repeats:
        return None
    pairs = zip(one.offsets, other.offsets, strict=True)
    return other.part - one.part, tuple(after - before for before, after in pairs)
