"""Texts of numbers, times and paths, as the page shows them."""

import math
import os
import re
import time

_PATH = re.compile(r"(: )?(['\"]?)((?<![\w./])/(?:[^\s/:'\"]+/)+[^\s/:'\",;()]+)\2")

_DRAFT = re.compile(r"/\.([^/]+)\.tmp-.*")
"""A checkpoint that is being written, and what is in it."""


def with_short_paths(text: str, run_dir: str | os.PathLike[str]) -> str:
    """Message with each absolute path once, relative to the run's directory.

    >>> with_short_paths("/a/run/x.ckpt: Disk full: '/a/run/x.ckpt'", "/a/run")
    'x.ckpt: Disk full'
    >>> with_short_paths("saving /a/run/x.ckpt: /a/run/.x.ckpt.tmp-1f/0.distcp: Full", "/a/run")
    'saving x.ckpt: Full'
    """
    seen: set[str] = set()

    def shorten(match: re.Match[str]) -> str:
        colon, quote, path = match[1] or "", match[2], match[3]
        meant = _DRAFT.sub(r"/\1", path)
        if meant in seen:
            return "" if colon else "it"
        seen.add(meant)
        return f"{colon}{quote}{seen_from(path, run_dir)}{quote}"

    return _PATH.sub(shorten, text)


def seen_from(path: str, run_dir: str | os.PathLike[str]) -> str:
    """The path relative to the run's directory, if it is below it."""
    return path.removeprefix(os.path.join(os.path.abspath(run_dir), ""))


def middle_cut(text: str, count: int) -> str:
    """Text of at most ``count`` characters; a longer one loses its middle.

    >>> middle_cut("runs/an-experiment/step=100.ckpt", 20)
    'runs/an-e…p=100.ckpt'
    """
    if len(text) <= count:
        return text
    tail = count // 2
    return f"{text[: count - 1 - tail]}…{text[-tail:]}"


def plural(count: int, noun: str) -> str:
    """Count with its noun: ``1 step``, ``2,000 steps``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def duration(seconds: float | None) -> str:
    """Time in words: ``35 ms``, ``14.2 s``, ``3 min 5 s``, ``2 h 3 min``, ``4 d 1 h``."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{round(1000 * seconds, 6):.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, unit, small, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {part}"
    return f"{whole // 60} min {whole % 60} s"


def number(value: float | None, digits: int = 4) -> str:
    """Number with ``digits`` significant digits and commas between thousands."""
    if value is None:
        return "–"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    """Share in percent: ``12.5 %``."""
    return "–" if share is None else f"{100 * share:.1f} %"


def size(count: float | None) -> str:
    """Bytes in the largest fitting unit: ``1.5 MB``."""
    if not count:
        return "–"
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = min(int(math.log(max(count, 1), 1000)), len(units) - 1)
    return f"{count / 1000**power:.3g} {units[power]}"


def timestamp(t: float) -> str:
    """Wall time in the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
