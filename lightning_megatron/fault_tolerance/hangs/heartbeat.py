"""State of a rank in a small mapped file, which others can read while the rank hangs.

A process with a C call that holds the GIL runs no other thread, and a stopped process runs nothing.
So their state must be outside already. Each rank maps a page of a file in memory shared by the
node; a store into it takes a fraction of a microsecond, needs no system call, and is seen by every
process that maps the file. The page is written by

* the training thread, on every change: section, step, progress, and whether it waits for others;
* the watchdog thread of the rank, a few times a second: a heartbeat, the limits, the collectives of
  each process group, and whether the device waits in one. If these stand still while the process
  lives, the GIL is held;
* the node's monitor: orders to the rank.

There are no locks. The record of the section has the number of entries at both ends, and is read
again if these differ.

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

from lightning_megatron.run_log.sections import SECTIONS, SectionClock

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
_DEVICE_WAITS_AT = 280
_SAMPLE = struct.Struct("<I")  # length, then JSON
_SAMPLE_AT = 512
_INDEX = {name: index for index, name in enumerate(SECTIONS)}

_RUNNING, _LEFT = 0, 1
NOTHING, TELL, REPORTED, EXIT = range(4)
"""Orders of the monitor: write the evidence, read a report, end."""


@dataclass(frozen=True)
class Member:
    """Rank, process and host: what does not change."""

    rank: int
    pid: int
    started: int
    """Start of the process in the kernel's ticks, which tells it from a later one with its pid."""
    host: str
    thread: int
    """Identity of the training thread, as `threading.get_ident` and tracebacks have it."""


@dataclass(frozen=True)
class Beat:
    """Content of a rank's page; times by `time.monotonic`."""

    entries: int
    step: int
    since: float
    section: str
    waits: int
    """Number of begins and ends of waits for other ranks: odd while the rank waits."""
    alive: float
    left: bool
    limits: Mapping[str, float]
    collectives: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Collectives begun and completed, by group."""
    device_waits: bool = False
    """Whether the device of the rank waits for others, by two looks at the flight recorder."""

    @property
    def waiting(self) -> bool:
        """Whether the rank waits for others, as far as waits are seen."""
        return bool(self.waits % 2) or self.device_waits

    @property
    def progress(self) -> tuple[int, int]:
        """Numbers that change while the rank makes progress."""
        return self.entries, self.waits


class Page:
    """Page of a rank.

    Args:
        path: the file; made if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(descriptor).st_size < _SIZE:
                # On a full disk, the first store into a file that `ftruncate` made longer would
                # end the process. macOS has nothing else.
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
        """Write a heartbeat and the limits."""
        _LIMITS.pack_into(self._map, _LIMITS_AT, *(limits[name] for name in SECTIONS))
        _ALIVE.pack_into(self._map, _ALIVE_AT, time.monotonic(), _LEFT if left else _RUNNING)

    def sample(
        self, collectives: Mapping[str, Sequence[int]], *, device_waits: bool = False
    ) -> None:
        """Write the numbers of begun and completed collectives of each group.

        Groups that do not fit are left out, the oldest first: the recorder keeps all groups of a
        process, those of earlier runs included.
        """
        start = _SAMPLE_AT + _SAMPLE.size
        groups = list(collectives.items())
        while len(data := json.dumps(dict(groups)).encode()) > _SIZE - start:
            groups = groups[(len(groups) + 1) // 2 :]
        self._map[start : start + len(data)] = data
        _SAMPLE.pack_into(self._map, _SAMPLE_AT, len(data))
        self._map[_DEVICE_WAITS_AT] = device_waits

    @property
    def order(self) -> tuple[int, int]:
        """Number and kind of the monitor's latest order."""
        number, kind = _ORDER.unpack_from(self._map, _ORDER_AT)
        return number, kind

    @property
    def held(self) -> bool:
        """Whether the monitor is about to end the run, so that other ranks end because of it."""
        return bool(self._map[_HELD_AT])

    # The monitor's side --------------------------------------------------------------------------

    def hold(self) -> None:
        """Tell the rank that the run is about to be ended."""
        self._map[_HELD_AT] = 1

    def give(self, number: int, kind: int) -> None:
        """Order the rank to do something."""
        _ORDER.pack_into(self._map, _ORDER_AT, number, kind)

    def read(self) -> Beat:
        """Read the page."""
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
            device_waits=bool(self._map[_DEVICE_WAITS_AT]),
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
    """Pages of all ranks of a node; any process of the node may read them at any time.

    Args:
        directory: directory of the node's ranks.
        ranks: ranks whose pages are there.
    """

    def __init__(self, directory: Path, ranks: Sequence[int]) -> None:
        self._pages = {rank: Page(page_file(directory, rank)) for rank in ranks}

    def read(self) -> dict[int, Beat]:
        """Read all pages, by rank."""
        return {rank: page.read() for rank, page in self._pages.items()}


def page_file(directory: Path, rank: int) -> Path:
    """Return the file of a rank's page."""
    return directory / f"rank_{rank:05d}.page"


def stack_file(directory: Path, rank: int) -> Path:
    """Return the file of a rank's stacks."""
    return directory / f"rank_{rank:05d}.stacks"


def trace_file(directory: Path, rank: int, order: int) -> Path:
    """Return the file of a rank's flight recorder, the answer to an order."""
    return directory / f"rank_{rank:05d}.trace.{order}.json"


def report_file(directory: Path, order: int) -> Path:
    """Return the file of the report and action of an order."""
    return directory / f"report.{order}.json"


def write_whole(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value))
    draft.replace(path)
