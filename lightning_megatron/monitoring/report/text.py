"""Numbers, times and foreign text, as the page shows them."""

import html
import math
import os
import re
import time
from typing import Any


def escape(value: Any) -> str:
    """Text that cannot be taken for HTML."""
    return html.escape(str(value), quote=True)


_PATH = re.compile(r"(: )?(['\"]?)((?<![\w./])/(?:[^\s/:'\"]+/)+[^\s/:'\",;()]+)\2")


def with_short_paths(text: str, run_dir: str | os.PathLike[str]) -> str:
    """A message in which each absolute path stands once, seen from the run's directory.

    >>> with_short_paths("/a/run/x.ckpt: Disk full: '/a/run/x.ckpt'", "/a/run")
    'x.ckpt: Disk full'
    """
    seen: set[str] = set()

    def shorten(match: re.Match[str]) -> str:
        colon, quote, path = match[1] or "", match[2], match[3]
        if path in seen:
            return "" if colon else "it"
        seen.add(path)
        return f"{colon}{quote}{seen_from(path, run_dir)}{quote}"

    return _PATH.sub(shorten, text)


def seen_from(path: str, run_dir: str | os.PathLike[str]) -> str:
    """The path relative to the run's directory, if it is below it."""
    return path.removeprefix(os.path.join(os.path.abspath(run_dir), ""))


def middle_cut(text: str, count: int) -> str:
    """At most ``count`` characters; what is longer loses its middle.

    >>> middle_cut("runs/an-experiment/step=100.ckpt", 20)
    'runs/an-e…p=100.ckpt'
    """
    if len(text) <= count:
        return text
    tail = count // 2
    return f"{text[: count - 1 - tail]}…{text[-tail:]}"


def plural(count: int, noun: str) -> str:
    """``1 step``, ``2,000 steps``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def duration(seconds: float | None) -> str:
    """``35 ms``, ``14.2 s``, ``3 min 5 s``, ``2 h 3 min``, ``4 d 1 h``."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, unit, small, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {part}"
    return f"{whole // 60} min {whole % 60} s"


def number(value: float | None, digits: int = 4) -> str:
    """A number of so many digits, with thousands apart."""
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
    """A share of one in percent."""
    return "–" if share is None else f"{100 * share:.1f} %"


def size(count: float | None) -> str:
    """Bytes."""
    if not count:
        return "–"
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    power = min(int(math.log(max(count, 1), 1000)), len(units) - 1)
    return f"{count / 1000**power:.3g} {units[power]}"


def moment(t: float) -> str:
    """Wall time, in the time zone of this machine."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
