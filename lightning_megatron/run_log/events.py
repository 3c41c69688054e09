"""Events of a run: one JSON line each, in files that outlive the process.

Every rank appends to a file of its own, ``RUN_DIR/events/rank_00000.jsonl``, one JSON object a
line: each is handed to the operating system by one ``write`` call as soon as it happens, so that a
process that is killed in the next moment has left it behind (only the machine's own death takes
what the disk has not yet got). Attempts of a run append to the same files. Common to all events:

======= ==========================================================================================
v       version of the format, 1
t       wall time, seconds since 1970
mono    monotonic time of the machine, for differences
run     id of the run, which it keeps when it is resumed from a checkpoint
attempt how often its processes were restarted
rank    global rank
step    optimizer steps done
kind    what happened; the other fields depend on it
======= ==========================================================================================

Kinds: ``start verified resumed step window save local_save validation fault hang slow_rank
rollback skip preempted alert formula end``, and ``renamed`` (the run turned out to go on from
another, ``was``). Writing never raises: what cannot be written is counted, and said once. Neither
the environment nor hyper-parameters are written, and texts pass through `redact`. Numbers that JSON
does not know are words ("NaN").
"""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_megatron.errors import ConfigError
from lightning_megatron.run_log.redact import REDACTED, is_secret_name, plain

logger = logging.getLogger(__name__)

VERSION = 1
FOLDER = "events"
PEER_LOST = "peer lost"
"""``what`` of a fault by which a rank says that another one has gone."""
_EARLY = 500
"""Events that are kept until a directory is known; of more, the last."""

_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def event_file(run_dir: str | os.PathLike[str], rank: int) -> Path:
    """Return where a rank writes its events."""
    return Path(run_dir) / FOLDER / f"rank_{rank:05d}.jsonl"


class EventLog:
    """Appends this rank's events to its file, once there is a directory for it.

    May be called from any thread; no lock is held, so that a thread that hangs keeps none from
    reporting it.

    Attributes:
        rank: global rank, part of every event and of the file's name.
        run: id of the run.
        attempt: how often the run's processes were restarted.
        step: optimizer steps done; whoever knows sets it.
        run_dir: where events go; None while they are only kept.
        failures: events that could not be written.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.run = ""
        self.attempt = 0
        self.step = 0
        self.run_dir: Path | None = None
        self.failures = 0
        self._file: int | None = None
        self._torn = False
        self._early: deque[dict[str, Any]] = deque(maxlen=_EARLY)
        self._forgotten = 0
        self._followers: list[Callable[[dict[str, Any]], None]] = []

    def subscribe(self, follower: Callable[[dict[str, Any]], None]) -> None:
        """Have ``follower`` called with every event, in the thread that writes it."""
        if follower not in self._followers:
            self._followers.append(follower)

    def unsubscribe(self, follower: Callable[[dict[str, Any]], None]) -> None:
        """Call ``follower`` no more."""
        if follower in self._followers:
            self._followers.remove(follower)

    def identify(
        self, *, rank: int | None = None, run: str | None = None, attempt: int | None = None
    ) -> None:
        """Say whose events these are; what is not given stays."""
        was = self.run
        self.rank = self.rank if rank is None else rank
        self.attempt = self.attempt if attempt is None else attempt
        if run is not None and run != was:
            self.run = run
            if was and self._file is not None:
                self.write("renamed", was=was)

    def open(self, run_dir: str | os.PathLike[str]) -> None:
        """Write to ``run_dir/events`` from now on, beginning with what was kept until now.

        A directory that cannot be written costs one warning; to open it again changes nothing.

        Raises:
            ConfigError: the directory is a URL: no store of objects can append a line.
        """
        if "://" in os.fspath(run_dir):
            raise ConfigError(
                f"run_dir={os.fspath(run_dir)}: events are appended line by line, which needs a "
                "directory of this machine; nearest valid: run_dir='runs/events'"
            )
        path = event_file(run_dir, self.rank)
        if self._file is not None and self.run_dir == Path(run_dir):
            return
        self.close()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            size = os.fstat(self._file).st_size
            self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"
        except OSError as error:
            self._fail(error)
            return
        self.run_dir = Path(run_dir)
        if self._forgotten:
            self.write("forgotten", count=self._forgotten)
        while self._early:
            event = self._early.popleft()
            self._append({**event, "run": self.run, "attempt": self.attempt, "rank": self.rank})

    def close(self) -> None:
        """Keep events again instead of writing them."""
        file, self._file, self.run_dir = self._file, None, None
        if file is not None:
            os.close(file)

    def write(self, kind: str, **fields: Any) -> None:
        """Write one event; never raises.

        Args:
            kind: what happened.
            fields: more about it: numbers, texts, lists and dictionaries of them. ``step`` replaces
                `step`.
        """
        try:
            event: dict[str, Any] = {
                "v": VERSION,
                "t": time.time(),
                "mono": time.monotonic(),
                "run": self.run,
                "attempt": self.attempt,
                "rank": self.rank,
                "step": self.step,
                "kind": kind,
            }
            for name, value in fields.items():
                event[name] = REDACTED if is_secret_name(name) else plain(value)
            if self._file is None:
                self._forgotten += len(self._early) == _EARLY
                self._early.append(event)
            else:
                self._append(event)
            for follower in tuple(self._followers):
                follower(event)
        except Exception as error:  # whatever a field is or a follower does, training goes on
            self._fail(error)

    def _append(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        line = (_encode(event) + "\n").encode("utf-8", "backslashreplace")
        try:
            done = os.write(self._file, b"\n" + line if self._torn else line)
        except OSError as error:
            self._fail(error)
            return
        # A disk that fills up takes part of a line; what follows begins a new one.
        full = len(line) + self._torn
        self._torn = done != full
        if self._torn:
            self._fail(OSError(f"{done} of {full} bytes were written"))

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            where = "nowhere" if self.run_dir is None else event_file(self.run_dir, self.rank)
            logger.warning(
                "rank %d: an event could not be written (to %s): %s; training goes on, and later "
                "failures are only counted",
                self.rank,
                where,
                error,
            )


def read_events(
    run_dir: str | os.PathLike[str], rank: int | None = None, *, steps_of: int | None = None
) -> list[dict[str, Any]]:
    """Return the events of a run directory, of all ranks or of one, by time.

    Lines that are torn, as the last one of a process that died may be, are left out.

    Args:
        run_dir: what `EventLog.open` was given.
        rank: whose events; None for those of all.
        steps_of: the only rank whose steps are all wanted; of the others there is the last before
            each other event.
    """
    files = event_files(run_dir)
    wanted = files if rank is None else {r: f for r, f in files.items() if r == rank}
    events = [
        event
        for owner, file in wanted.items()
        for event in iterate_events(file, thin=steps_of is not None and owner != steps_of)
    ]
    # Stable: events of a rank stay in their order where the clock stands.
    return sorted(events, key=lambda event: event["t"])


def event_files(run_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Return the files of a run directory by rank."""
    found = {}
    for file in sorted((Path(run_dir) / FOLDER).glob("rank_*.jsonl")):
        number = file.stem.removeprefix("rank_")
        if number.isdecimal():
            found[int(number)] = file
    return found


def iterate_events(file: Path, *, thin: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the events of a file in its order; ``thin`` leaves out most steps, as above."""
    lines = _lines(file)
    return _parsed(_without_steps(lines) if thin else lines)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        yield from lines


def _without_steps(lines: Iterator[bytes]) -> Iterator[bytes]:
    last = b""
    for line in lines:
        if b'"kind":"step"' in line:
            last = line
            continue
        if last:
            yield last
            last = b""
        yield line
    if last:
        yield last


def _parsed(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and _has_common_fields(event):
            yield event


def _has_common_fields(event: dict[str, Any]) -> bool:
    return (
        isinstance(event.get("t"), int | float)
        and isinstance(event.get("rank"), int)
        and isinstance(event.get("kind"), str)
    )
