"""A rank's state in a small mapped file, for others to read when the rank itself cannot speak.

A process whose lock is held by a C call runs no thread of its own, and a stopped one runs nothing
at all. What is known about them must therefore lie outside already. Each rank maps a page of a file
in memory shared by the node; a store into it costs a fraction of a microsecond, needs no system
call, and is seen by every process that maps the same file. Who writes what:

* the training thread, on every change: section, step, progress, and whether it waits for others;
* the watchdog thread of the rank, a few times a second: a sign of life, the limits, and how far
  each process group has come. Where these stand still while the process lives, Python's lock is
  held;
* the node's monitor: what it wants the rank to do.

There are no locks. The section's record carries the number of entries at both ends, and is read
again when these differ.

This file runs in a process without torch, see `node_monitor`.
"""

import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_megatron.monitoring.sections import SECTIONS, SectionClock

_SIZE = 8192
_SECTION = struct.Struct("<qqdBq")  # entries, step, since, section, entries
_WAITS = struct.Struct("<q")  # waits for other ranks, begun and ended
_WAITS_AT = 64
_ALIVE = struct.Struct("<dB")  # when, and in which state
_ALIVE_AT = 80
_LIMITS = struct.Struct(f"<{len(SECTIONS)}d")
_LIMITS_AT = 96
_ORDER = struct.Struct("<IB")  # number and kind
_ORDER_AT = 256
_HELD_AT = 272
_SAMPLE = struct.Struct("<I")  # length, then JSON
_SAMPLE_AT = 512
_INDEX = {name: index for index, name in enumerate(SECTIONS)}

_RUNNING, _LEFT = 0, 1
NOTHING, TELL, REPORTED, EXIT = range(4)
"""What the monitor may order: to write down the flight recorder, to read a report, or to end."""


@dataclass(frozen=True)
class Member:
    """What does not change about a rank: who and where it is."""

    rank: int
    pid: int
    started: int
    """When the process began, in the kernel's ticks: another with the same pid has another."""
    host: str
    thread: int
    """Identity of the training thread, as `threading.get_ident` and tracebacks have it."""


@dataclass(frozen=True)
class Beat:
    """What a rank's page says at one moment; times by `time.monotonic`."""

    entries: int
    step: int
    since: float
    section: str
    waits: int
    """Waits for other ranks, begun and ended: an odd number while the rank waits."""
    alive: float
    left: bool
    limits: Mapping[str, float]
    collectives: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By group: begun, completed."""

    @property
    def waiting(self) -> bool:
        """Whether the rank waits for others, as far as that is seen."""
        return bool(self.waits % 2)

    @property
    def progress(self) -> tuple[int, int]:
        """Something that changes while the rank moves on."""
        return self.entries, self.waits


class Page:
    """A rank's page.

    Args:
        path: the file; made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < _SIZE:
                # Where there is no room left, the first store into a file that `ftruncate` made
                # long would end the process. macOS has nothing else.
                if sys.platform == "darwin":
                    os.ftruncate(descriptor, _SIZE)
                else:
                    os.posix_fallocate(descriptor, 0, _SIZE)
            self._map = mmap.mmap(descriptor, _SIZE)
        finally:
            os.close(descriptor)
        self._count = 0

    # The rank's side -----------------------------------------------------------------------------

    def entered(self, clock: SectionClock) -> None:
        """Write the current section; see `sections.Mirror`."""
        entries = clock.entries
        index = _INDEX[clock.current]
        _SECTION.pack_into(self._map, 0, entries, clock.step, clock.since, index, entries)

    def waits(self, depth: int) -> None:
        """Write whether the rank waits for others; see `sections.Mirror`."""
        if depth > 1 or (depth == 1) == bool(self._count % 2):
            return  # only the outermost of nested waits counts
        self._count += 1
        _WAITS.pack_into(self._map, _WAITS_AT, self._count)

    def live(self, limits: Mapping[str, float], *, left: bool = False) -> None:
        """Give a sign of life."""
        _LIMITS.pack_into(self._map, _LIMITS_AT, *(limits[name] for name in SECTIONS))
        _ALIVE.pack_into(self._map, _ALIVE_AT, time.monotonic(), _LEFT if left else _RUNNING)

    def sample(self, collectives: Mapping[str, Sequence[int]]) -> None:
        """Write how many collectives of each group have begun and completed.

        Where there is no room for all, the first are left out. The recorder forgets no group, so
        in a process that trains again and again those of old runs come first.
        """
        start = _SAMPLE_AT + _SAMPLE.size
        groups = list(collectives.items())
        while len(data := json.dumps(dict(groups)).encode()) > _SIZE - start:
            groups = groups[(len(groups) + 1) // 2 :]
        self._map[start : start + len(data)] = data
        _SAMPLE.pack_into(self._map, _SAMPLE_AT, len(data))

    @property
    def order(self) -> tuple[int, int]:
        """Number and kind of the monitor's latest order."""
        number, kind = _ORDER.unpack_from(self._map, _ORDER_AT)
        return number, kind

    @property
    def held(self) -> bool:
        """Whether the monitor is about to end the run; others that die now do so for that."""
        return bool(self._map[_HELD_AT])

    # The monitor's side --------------------------------------------------------------------------

    def hold(self) -> None:
        """Let the rank know that the run is about to be ended."""
        self._map[_HELD_AT] = 1

    def give(self, number: int, kind: int) -> None:
        """Order the rank to do something."""
        _ORDER.pack_into(self._map, _ORDER_AT, number, kind)

    def read(self) -> Beat:
        """What the page says."""
        for _ in range(100):
            entries, step, since, section, again = _SECTION.unpack_from(self._map, 0)
            if entries == again:
                break
        alive, state = _ALIVE.unpack_from(self._map, _ALIVE_AT)
        limits = dict(zip(SECTIONS, _LIMITS.unpack_from(self._map, _LIMITS_AT), strict=True))
        return Beat(
            entries=entries,
            step=step,
            since=since,
            section=SECTIONS[section],
            waits=_WAITS.unpack_from(self._map, _WAITS_AT)[0],
            alive=alive,
            left=state == _LEFT,
            limits=limits,
            collectives=self._collectives(),
        )

    def _collectives(self) -> dict[str, list[int]]:
        (length,) = _SAMPLE.unpack_from(self._map, _SAMPLE_AT)
        start = _SAMPLE_AT + _SAMPLE.size
        try:
            found: dict[str, list[int]] = json.loads(self._map[start : start + length] or b"{}")
        except ValueError:  # caught while it was written
            return {}
        return found

    def close(self) -> None:
        """Unmap the page."""
        self._map.close()


class Pages:
    """What all ranks of a node say of themselves; any process of the node may read it at any time.

    Args:
        directory: of the node's ranks.
        ranks: who they are; their pages are there.
    """

    def __init__(self, directory: Path, ranks: Sequence[int]) -> None:
        self._pages = {rank: Page(page_file(directory, rank)) for rank in ranks}

    def read(self) -> dict[int, Beat]:
        """By rank."""
        return {rank: page.read() for rank, page in self._pages.items()}


def page_file(directory: Path, rank: int) -> Path:
    """Return where a rank's page lies."""
    return directory / f"rank_{rank:05d}.page"


def stack_file(directory: Path, rank: int) -> Path:
    """Return where a rank's stacks go."""
    return directory / f"rank_{rank:05d}.stacks"


def trace_file(directory: Path, rank: int, order: int) -> Path:
    """Return where a rank writes its flight recorder, as the answer to an order."""
    return directory / f"rank_{rank:05d}.trace.{order}.json"


def report_file(directory: Path, order: int) -> Path:
    """Return where the monitor writes what the ranks are to do, before it orders them to."""
    return directory / f"report.{order}.json"


def write_whole(path: Path, value: Any) -> None:
    """Write JSON so that a reader finds all of it or nothing."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value))
    draft.replace(path)
