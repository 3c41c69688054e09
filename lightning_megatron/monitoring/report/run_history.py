"""History of a run, read from its events.

Files are read twice: once for everything but the steps of most ranks, which gives the ledger, the
faults and the saves, and once as streams, rank by rank, for the figures of each rank; so memory
holds one number a step and not a dictionary.
"""

import os
import re
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.goodput import Ledger, runs_of
from lightning_megatron.monitoring.report.text import with_short_paths
from lightning_megatron.run_log.events import (
    FOLDER,
    PEER_LOST,
    event_files,
    iterate_events,
    read_events,
)
from lightning_megatron.run_log.redact import redact
from lightning_megatron.run_log.sections import CHECKPOINT, VALIDATION

_SAVES = "MegatronStrategy"
"""Name of the strategy that writes an event for each save."""
_RATE = re.compile(r"(^|/)lr([-_/]|$)")
"""Names of learning rates: ``optim/lr``, and ``lr-AdamW`` of Lightning's LearningRateMonitor."""
LOAD = "moe/load_max_over_mean"
"""Name of the load of experts, which has a curve."""
_STALE_S = 60.0
"""Silence after which an attempt that wrote no end counts as ended, if its steps are short."""
MAX_DUMP = 150_000
"""Characters that are shown of one report of a hang."""
MAX_DUMPS = 5


_APART = (CHECKPOINT, VALIDATION)
"""Sections that a line of the log tells beside the seconds of its steps."""


@dataclass
class RankFigures:
    """One rank, over all attempts."""

    rank: int
    host: str = ""
    steps: int = 0
    seconds: "array[float]" = field(default_factory=lambda: array("d"))
    """Seconds of each step."""
    sections: dict[str, float] = field(default_factory=dict)
    """Seconds in each section, over all steps."""
    memory_gib: dict[str, float] = field(default_factory=dict)
    """Peaks of memory by name."""
    last: dict[str, Any] = field(default_factory=dict)
    """Last event of the rank."""

    def add(self, event: dict[str, Any]) -> None:
        """Take an event into account."""
        self.last = event
        if event["kind"] == "start":
            self.host = str(event.get("host", ""))
        elif event["kind"] == "step":
            count = max(int(event.get("steps", 1)), 1)
            self.steps += count
            self.seconds.append(float(event.get("seconds", 0.0)) / count)
            for name, seconds in event.get("sections", {}).items():
                self.sections[name] = self.sections.get(name, 0.0) + float(seconds)
        for name, value in event.get("memory", {}).items():
            self.memory_gib[name] = max(self.memory_gib.get(name, 0.0), float(value))

    @property
    def median_s(self) -> float | None:
        """Median seconds of its steps."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def slow_s(self) -> float | None:
        """Exceeded by one step in twenty."""
        ordered = sorted(self.seconds)
        return ordered[int(0.95 * (len(ordered) - 1))] if ordered else None

    def share(self, section: str) -> float | None:
        """Share of a section in the time of all its steps."""
        total = self._in_steps_s
        return self.sections.get(section, 0.0) / total if total > 0 else None

    def share_beside(self, sections: Sequence[str]) -> float | None:
        """Share of all other sections in the time of its steps."""
        total = self._in_steps_s
        named = sum(self.sections.get(section, 0.0) for section in sections)
        return max(total - named, 0.0) / total if total > 0 else None

    @property
    def _in_steps_s(self) -> float:
        """Seconds of all sections but those that no step contains."""
        return sum(s for name, s in self.sections.items() if name not in _APART)


@dataclass
class Incident:
    """Fault, hang, failed save or end of an attempt."""

    t: float
    step: int
    kind: str
    ranks: list[int]
    text: str
    section: str = ""
    action: str = ""
    attempt: int = 0
    number: int = 0
    """Position among all incidents, from 1, which the curves show."""
    ends: bool = False
    """Whether it is the end of the attempt."""
    what: str = ""
    """Word by which a fault says what it is."""
    follows: int = 0
    """Number of the incident that this one is an effect of; 0 if it is none."""


@dataclass(frozen=True)
class Point:
    """A line of the log about steps, as the reference rank wrote it."""

    step: int
    seconds: float
    """Seconds of one step."""
    loss: float | None
    attempt: int
    redone: bool
    """Whether a later attempt did it again, or it was undone."""


@dataclass(frozen=True)
class Reading:
    """A logged number at a step."""

    step: int
    value: float | None
    """None where nothing is drawn."""
    attempt: int
    redone: bool
    """Whether the step was done again later."""


@dataclass
class RunHistory:
    """Everything that the page shows about a run."""

    run_dir: str
    run: str
    now: float
    """Time of reading."""
    ledger: Ledger
    other_runs: list[str] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[RankFigures] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    """Readings of validation metrics, learning rates and the load of experts, by name."""
    saves: list[dict[str, Any]] = field(default_factory=list)
    verified: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Event of the checkpoint that an attempt resumed from, by attempt."""
    validation_s: dict[int, float] = field(default_factory=dict)
    """Seconds of validation by attempt."""
    stall_s: dict[int, float] = field(default_factory=dict)
    """Seconds that training waited for saves, by attempt."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last window."""
    formula: str = ""
    alerts: list[dict[str, Any]] = field(default_factory=list)
    dumps: list[tuple[str, str]] = field(default_factory=list)
    """Title and text of reports of hangs."""
    states: dict[str, str] = field(default_factory=dict)
    """State on the disk, by path of a checkpoint."""

    @property
    def tells_saves(self) -> bool:
        """Whether a save would have left an event; other strategies write none."""
        return bool(self.saves) or any(s.get("strategy") == _SAVES for s in self.starts)

    @property
    def saved_step(self) -> int:
        """Step of the checkpoint that the run would go on from; 0 if there is none."""
        until = float("inf")
        for attempt in reversed(self.ledger.attempts):
            good = [
                save["step"]
                for save in self.saves
                if save.get("ok") and attempt.started <= save["t"] < until and _int(save["step"])
            ]
            if good:
                return int(max(good))
            if attempt.from_step is not None:
                return attempt.from_step
            until = attempt.started
        return 0

    @property
    def failed_saves(self) -> int:
        """Number of saves that raised an error."""
        return sum(_failed(save) for save in self.saves)

    @property
    def end(self) -> float:
        """Wall time of the last event of any rank."""
        lasts = [rank.last["t"] for rank in self.ranks if rank.last]
        return max([a.last for a in self.ledger.attempts] + lasts, default=self.now)

    @property
    def status(self) -> str:
        """Status of the last attempt; ``running`` or ``silent`` without an end."""
        last = self.ledger.attempts[-1]
        if last.status:
            return last.status
        usual = statistics.median(p.seconds for p in self.points) if self.points else 0.0
        return "running" if self.now - self.end < max(_STALE_S, 10 * usual) else "silent"


def read_run_history(
    run_dir: str | os.PathLike[str], run: str | None = None, now: float | None = None
) -> RunHistory:
    """Gather what is in the directory about a run.

    Args:
        run_dir: where `EventLogWriter` wrote.
        run: id of the run; by default the one with the newest event.
        now: wall time, to tell a run that is under way from one that was killed.

    Raises:
        ConfigError: there are no events, or none of this run.
    """
    files = event_files(run_dir)
    if not files:
        raise ConfigError(
            f"RUN_DIR={os.fspath(run_dir)}: has no {FOLDER}/rank_*.jsonl; nearest valid: the "
            "run_dir of EventLogWriter, or the default_root_dir of its Trainer"
        )
    reference = min(files)
    events = read_events(run_dir, steps_of=reference)
    names = runs_of(events)
    known = list(dict.fromkeys(names[str(e.get("run", ""))] for e in reversed(events)))
    if not known or (run is not None and names.get(run) not in known):
        raise ConfigError(
            f"run={run}: {os.fspath(run_dir)} has no events of it; nearest valid: "
            f"{', '.join(known) or 'another directory'}"
        )
    run = known[0] if run is None else names[run]
    mine = [e for e in events if names[str(e.get("run", ""))] == run]
    lowest = min(e["rank"] for e in mine)
    if lowest != reference:  # whose events are of other runs
        reference = lowest
        events = read_events(run_dir, steps_of=reference)
        mine = [e for e in events if names[str(e.get("run", ""))] == run]
    history = RunHistory(os.fspath(run_dir), run, now or time.time(), Ledger(reference))
    history.other_runs = [other for other in known if other != run]
    for event in mine:
        history.ledger.add(event)
    begun = history.ledger.attempts[0].started if history.ledger.attempts else 0.0
    _Sorter(history, reference).tell([e for e in mine if e["t"] >= begun])
    of_run = {name for name, final in names.items() if final == run}
    for rank, file in sorted(files.items()):
        figures = RankFigures(rank)
        for event in iterate_events(file):
            known = event["t"] >= begun or event["kind"] == "start"
            if known and str(event.get("run", "")) in of_run:
                figures.add(event)
        if figures.last:
            history.ranks.append(figures)
    _add_silent_ends(history)
    if history.tells_saves and history.status not in ("completed", "running"):
        # Whoever goes on begins at the checkpoint.
        history.ledger.undo(history.saved_step)
    # What ends an attempt comes last, also where the cause was found out after it.
    history.incidents.sort(key=lambda incident: (incident.attempt, incident.ends, incident.t))
    for number, incident in enumerate(history.incidents, 1):
        incident.number = number
    _explain_echoes(history)
    return history


class _Sorter:
    """Sorts events into a history."""

    def __init__(self, history: RunHistory, reference: int) -> None:
        self._history = history
        self._reference = reference
        self._starts = [a.started for a in history.ledger.attempts]
        self._told: dict[tuple[Any, ...], Incident] = {}
        self._failed_saves: list[Incident] = []

    def tell(self, events: Sequence[dict[str, Any]]) -> None:
        history = self._history
        for event in events:
            kind, mine = event["kind"], event["rank"] == self._reference
            if kind in _FAULTS or (kind == "end" and event.get("status") != "completed"):
                self._add_incident(event)
            elif kind == "start" and mine:
                history.starts.append(event)
            elif kind == "save" and mine:
                history.saves.append(event)
                if _failed(event):
                    self._add_failed_save(event)
                _count(history.stall_s, self._attempt(event), event.get("stall"))
            elif kind == "verified" and mine:
                history.verified[self._attempt(event)] = event
            elif kind == "validation" and mine and not event.get("sanity"):
                _count(history.validation_s, self._attempt(event), event.get("seconds"))
            elif kind == "window" and mine:
                history.metrics = {k: _float(v) for k, v in event.get("metrics", {}).items()}
            elif kind == "formula":
                history.formula = str(event.get("text", ""))
            elif kind == "alert":
                history.alerts.append(event)
        failed = self._failed_saves
        for count, incident in enumerate(failed if len(failed) > 1 else [], 1):
            incident.text = f"save {count} of {len(failed)} that failed: {incident.text}"
        self._read_steps([e for e in events if e["rank"] == self._reference])
        self._read_dumps(events)

    def _attempt(self, event: dict[str, Any]) -> int:
        t = event["t"]
        return max((i for i, start in enumerate(self._starts) if start <= t), default=0)

    def _add_incident(self, event: dict[str, Any]) -> None:
        attempt, kind = self._attempt(event), event["kind"]
        who = event.get("rank_of_fault")
        ranks = who if isinstance(who, list) else [event["rank"] if who is None else who]
        ranks = [rank for rank in ranks if isinstance(rank, int)]
        if kind == "end":
            key: tuple[Any, ...] = (kind, attempt)
            text = str(event.get("error") or f"exit code {event.get('exit_code')}")
            kind = str(event.get("status"))
        else:
            key = (kind, attempt, event.get("step"), str(event.get("what")), str(who))
            what, detail, reason = (str(event.get(k) or "") for k in ("what", "detail", "reason"))
            text = ": ".join(filter(None, (what, detail, reason))) or _details(event)
        before = self._told.get(key)
        if before is not None:  # other ranks tell of the same
            before.ranks += [rank for rank in ranks if rank not in before.ranks]
            return
        incident = Incident(
            t=event["t"],
            step=_int(event.get("step")),
            kind=kind,
            ranks=ranks,
            text=with_short_paths(text, self._history.run_dir),
            section=str(event.get("section") or ""),
            action=str(event.get("action") or ""),
            attempt=attempt,
            ends=event["kind"] == "end",
            what=str(event.get("what") or ""),
        )
        self._told[key] = incident
        self._history.incidents.append(incident)

    def _add_failed_save(self, event: dict[str, Any]) -> None:
        text = with_short_paths(str(event["error"]), self._history.run_dir)
        incident = Incident(
            t=event["t"],
            step=_int(event.get("step")),
            kind="save",
            ranks=[],
            text=text,
            section="checkpoint",
            attempt=self._attempt(event),
        )
        self._failed_saves.append(incident)
        self._history.incidents.append(incident)

    def _read_steps(self, mine: Sequence[dict[str, Any]]) -> None:
        """Gather the numbers over steps; what a later event of the log repeats is marked."""
        lowest, redone = float("inf"), []
        for event in reversed(mine):
            high = _int(event.get("step"))
            redone.append(high > lowest)
            if event["kind"] == "step":
                lowest = min(lowest, high - max(_int(event.get("steps", 1)), 1))
        for event, again in zip(mine, reversed(redone), strict=True):
            step, attempt = _int(event.get("step")), self._attempt(event)
            if event["kind"] == "step":
                loss = event.get("loss")
                self._history.points.append(
                    Point(
                        step=step,
                        seconds=_float(event.get("seconds")) / max(_int(event.get("steps", 1)), 1),
                        loss=None if loss is None else _float(loss),
                        attempt=attempt,
                        redone=again,
                    )
                )
            for name, value in _drawn(event).items():
                reading = Reading(step, _float(value), attempt, again)
                self._history.readings.setdefault(name, []).append(reading)

    def _read_dumps(self, events: Sequence[dict[str, Any]]) -> None:
        paths = [e["report"] for e in events if e["kind"] == "hang" and e.get("report")]
        for path in list(dict.fromkeys(map(str, paths)))[:MAX_DUMPS]:
            self._history.dumps.append((path, _dump(Path(path), self._history.run_dir)))


def _drawn(event: dict[str, Any]) -> dict[str, Any]:
    """Metrics of an event that curves show."""
    metrics: dict[str, Any] = event.get("metrics") or {}
    if event["kind"] == "validation":
        return {} if event.get("sanity") else metrics
    if event["kind"] == "window":
        return {
            name: value for name, value in metrics.items() if name == LOAD or _RATE.search(name)
        }
    return {}


def _failed(save: dict[str, Any]) -> bool:
    """Whether a save failed, and was not merely replaced by a newer one."""
    return not save.get("ok") and bool(save.get("error"))


_FAULTS = frozenset({"fault", "hang", "rollback", "slow_rank", "preempted"})


def _explain_echoes(history: RunHistory) -> None:
    """Say of ends that a lost peer caused that they did, instead of how a connection broke."""
    lost = {i.attempt: i.number for i in history.incidents if i.what == PEER_LOST}
    for incident in history.incidents:
        if incident.ends and incident.kind == "failed" and incident.attempt in lost:
            incident.follows = lost[incident.attempt]
            incident.text = f"follows from {incident.follows}: lost its connections"


def _add_silent_ends(history: RunHistory) -> None:
    """Add incidents for attempts without an end: they were killed, or hang."""
    attempts = history.ledger.attempts
    for attempt in attempts:
        last = attempt.number == len(attempts) - 1
        if attempt.status or (last and history.status != "silent"):
            continue
        step = attempt.to_step or 0
        # Who fell behind; nobody, where all came as far.
        least = min(attempt.reached.values(), default=0)
        ranks = [rank for rank, reached in sorted(attempt.reached.items()) if reached == least]
        ranks = ranks if len(ranks) < len(attempt.reached) else []
        text = "no end was written: the processes were killed, or could not go on"
        history.incidents.append(
            Incident(attempt.last, step, "silent", ranks, text, attempt=attempt.number, ends=True)
        )


def _dump(path: Path, run_dir: str) -> str:
    """The text of a report, which may have moved with the run's directory."""
    for place in (path, Path(run_dir) / path, Path(run_dir) / path.parent.name / path.name):
        try:
            text = place.read_text("utf-8", "replace")
        except OSError:
            continue
        more = "" if len(text) <= MAX_DUMP else f"\n... {len(text) - MAX_DUMP} more characters"
        lines = [redact(line) for line in text[:MAX_DUMP].splitlines()]
        return "\n".join(lines) + more
    return "The file is gone."


def _details(event: dict[str, Any]) -> str:
    common = {"v", "t", "mono", "run", "attempt", "rank", "step", "kind", "rank_of_fault"}
    left = {k: v for k, v in event.items() if k not in common | {"section", "action", "report"}}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in left.items())


def _count(totals: dict[int, float], attempt: int, seconds: Any) -> None:
    totals[attempt] = totals.get(attempt, 0.0) + _float(seconds)


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


def _int(value: Any) -> int:
    return value if isinstance(value, int) else 0
