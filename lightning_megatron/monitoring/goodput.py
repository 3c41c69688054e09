"""Goodput: the share of a run's time that went into steps that count, by its events.

``goodput = time of the steps that were kept / time since the first start`` (the "effective training
time ratio" of arXiv 2410.21680). Below the line stands everything: starting, saving, validating,
standing still after a fault, the time between attempts. Not counted is only the time after an
attempt that ended as it should, until somebody extends the run. Above it stand steps, from the end
of the one before (waiting for data included), which later attempts did not redo.

What was redone follows from the steps themselves: a step that begins below where the run had come
to undoes what lies above, whether processes were restarted or weights rolled back. So nothing
needs to be written at the moment of a fault, when there may be nobody left to write.

A restart takes two times. *Detection* goes from the last step of the rank that stopped first until
any rank says that something is wrong; where nobody did, until the next start. It therefore holds up
to one step that was under way. *Recovery* goes from there until the first new step is done.

Everything is a fold over events: `Ledger.add`, one by one while training runs, or all at once.
"""

import math
import os
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lightning_megatron.run_log.events import read_events

ALARMS = frozenset({"fault", "hang", "preempted", "rollback"})
"""Kinds of events that say that something is wrong; so does an end other than ``completed``."""


@dataclass
class Attempt:
    """Time from one start of the processes to the next."""

    number: int
    """Position in the run, from 0."""
    started: float
    """Wall time of the first event."""
    last: float
    """Wall time of the last event."""
    status: str = ""
    """Status of its end; empty while it runs, or if nothing could be written."""
    first_step_at: float | None = None
    """Wall time at which its first step began."""
    from_step: int | None = None
    """Steps that were done when it took its first one; None if it took none."""
    to_step: int | None = None
    """Steps that are done after its last one."""
    kept_s: float = 0.0
    """Seconds of steps that no later one redid."""
    redone_s: float = 0.0
    """Seconds of steps that were done again later."""
    noticed: float | None = None
    """Wall time of the first sign that something is wrong, or of the next start."""
    detect_s: float | None = None
    """Seconds from the last step of the rank that stopped first to `noticed`; None unless the run
    was restarted."""
    recover_s: float | None = None
    """Seconds from `noticed` to the first step of the next attempt."""
    last_steps: dict[int, float] = field(default_factory=dict)
    """Wall time of the last step of each rank."""
    reached: dict[int, int] = field(default_factory=dict)
    """Steps that are done after it."""


class _Kept:
    """The steps that count, as spans ``(from, to, seconds, attempt)`` that do not overlap."""

    def __init__(self) -> None:
        self.low = array("q")
        self.high = array("q")
        self.attempt = array("l")
        self.seconds = array("d")

    @property
    def position(self) -> int | None:
        return self.high[-1] if self.high else None

    def cut(self, step: int) -> Iterable[tuple[int, float]]:
        """Drop what lies above ``step``; of a span across it, the share. Yields what went."""
        while self.high and self.high[-1] > step:
            low, high = self.low.pop(), self.high.pop()
            attempt, seconds = self.attempt.pop(), self.seconds.pop()
            stays = seconds * max(step - low, 0) / (high - low)
            if low < step:
                self.push(low, step, stays, attempt)
            yield attempt, seconds - stays

    def push(self, low: int, high: int, seconds: float, attempt: int) -> None:
        self.low.append(low)
        self.high.append(high)
        self.seconds.append(seconds)
        self.attempt.append(attempt)


class Ledger:
    """Adds up the events of one run.

    Args:
        rank: whose steps are counted; the other ranks' events tell when they stopped.

    Attributes:
        attempts: in their order.
        steps_lost: steps that had to be done again, or that were undone.
        rollbacks: how often weights went back.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.attempts: list[Attempt] = []
        self.steps_lost = self.rollbacks = 0
        self._reports: set[str] = set()
        self._kept = _Kept()
        self._idle_s = 0.0

    @property
    def restarts(self) -> int:
        """Number of restarts of a run that had not ended as it should."""
        return sum(a.detect_s is not None for a in self.attempts)

    @property
    def hangs(self) -> int:
        """Reports of hangs, of the ranks whose events were added."""
        return len(self._reports)

    @property
    def detect_s(self) -> float | None:
        """Detection time of the last restart."""
        return next((a.detect_s for a in reversed(self.attempts) if a.detect_s is not None), None)

    @property
    def recover_s(self) -> float | None:
        """Recovery time of the last restart that has recovered."""
        return next((a.recover_s for a in reversed(self.attempts) if a.recover_s is not None), None)

    @property
    def productive_s(self) -> float:
        """Seconds of the steps that count."""
        return math.fsum(a.kept_s for a in self.attempts)

    def wall_s(self, now: float | None = None) -> float:
        """Seconds since the first start, until ``now`` or the last event."""
        if not self.attempts:
            return 0.0
        end = self.attempts[-1].last if now is None else now
        return max(end - self.attempts[0].started - self._idle_s, 0.0)

    def goodput(self, now: float | None = None) -> float | None:
        """Share of the wall time until ``now``, or the last event; None before there is any."""
        wall = self.wall_s(now)
        return min(self.productive_s / wall, 1.0) if wall > 0 else None

    def metrics(self, now: float | None = None) -> dict[str, float]:
        """The figures under the names by which they are logged; what is unknown is left out."""
        known = {
            "ft/goodput": self.goodput(now),
            "ft/restarts_total": float(self.restarts),
            "ft/steps_lost_total": float(self.steps_lost),
            "ft/hangs_total": float(self.hangs),
            "ft/rollbacks_total": float(self.rollbacks),
            "ft/detect_s": self.detect_s,
            "ft/recover_s": self.recover_s,
        }
        return {name: value for name, value in known.items() if value is not None}

    def add(self, event: dict[str, Any]) -> None:
        """Take an event, by its time, into account."""
        mine, kind = event["rank"] == self.rank, event["kind"]
        if not mine and not self.attempts:
            return
        if not self.attempts or (mine and kind == "start"):
            self._begin(event["t"])
        attempt = self.attempts[-1]
        if kind == "step":
            attempt.last_steps[event["rank"]] = event["t"]
            attempt.reached[event["rank"]] = int(event["step"])
            if mine:
                self._step(attempt, event)
        back = event.get("updates_back")  # weights went back while steps are counted on
        if mine and kind == "rollback" and isinstance(back, int) and self._kept.position:
            self.undo(max(self._kept.position - back, 0))
        self.rollbacks += mine and kind == "rollback"
        if kind == "hang":  # an event for each of its culprits
            self._reports.add(f"{event.get('attempt')} {event.get('report') or event['t']}")
        alarm = kind in ALARMS or (kind == "end" and event.get("status") != "completed")
        if alarm and attempt.noticed is None:
            attempt.noticed = event["t"]
        if mine:
            attempt.last = max(attempt.last, event["t"])
            if kind == "end":
                attempt.status = str(event.get("status", ""))

    def _begin(self, now: float) -> None:
        if self.attempts:
            before = self.attempts[-1]
            if before.status == "completed":
                self._idle_s += max(now - before.last, 0.0)
            else:
                stopped = min(before.last_steps.values(), default=before.last)
                if before.noticed is None or before.noticed < stopped:
                    before.noticed = now
                before.detect_s = max(before.noticed - stopped, 0.0)
        self.attempts.append(Attempt(len(self.attempts), started=now, last=now))

    def _step(self, attempt: Attempt, event: dict[str, Any]) -> None:
        high, count = int(event["step"]), int(event.get("steps", 1))
        seconds = float(event.get("seconds", 0.0))
        low = high - count
        if attempt.from_step is None:
            self._begin_anew_if_over(low)
        self.undo(low)
        self._kept.push(low, high, seconds, attempt.number)
        attempt.kept_s += seconds
        attempt.to_step = high
        if attempt.from_step is None:
            attempt.from_step = low
            attempt.first_step_at = event["t"] - seconds
            if (
                attempt.number
                and (before := self.attempts[attempt.number - 1]).detect_s is not None
            ):
                assert before.noticed is not None
                before.recover_s = max(event["t"] - before.noticed, 0.0)

    def _begin_anew_if_over(self, low: int) -> None:
        """A process that trains again from below what it has completed has begun another run."""
        position = self._kept.position
        over = len(self.attempts) > 1 and self.attempts[-2].status == "completed"
        if over and position is not None and low < position:
            self.attempts = self.attempts[-1:]
            self.attempts[0].number = 0
            self.steps_lost = 0
            self._idle_s = 0.0
            self._kept = _Kept()
            self.rollbacks = 0
            self._reports = set()

    def undo(self, step: int) -> None:
        """Take back what was done above ``step``: it does not count any more."""
        position = self._kept.position
        if position is None or step >= position:
            return
        self.steps_lost += position - step
        for number, gone in self._kept.cut(step):
            self.attempts[number].kept_s -= gone
            self.attempts[number].redone_s += gone


def runs_of(events: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return, for each id, that of the run which it belongs to.

    An attempt writes under an id of its own until the checkpoint tells which run it goes on with;
    then it is renamed.
    """
    final: dict[str, str] = {}
    for event in events:
        run = str(event.get("run", ""))
        final.setdefault(run, run)
        if event["kind"] == "renamed":
            final[str(event["was"])] = run
    return {run: _follow(run, final) for run in final}


def _follow(run: str, final: dict[str, str]) -> str:
    seen = {run}
    while (further := final.get(run, run)) not in seen:
        run = further
        seen.add(run)
    return run


def ledger_of(run_dir: str | os.PathLike[str], run: str, rank: int = 0) -> Ledger:
    """Return the ledger of a run so far, from its directory.

    Args:
        run_dir: where the events are.
        run: id of the run, or what it once was.
        rank: whose steps are counted. For rank 0, what the others say is read as well.
    """
    # If each of many ranks read all files, these would be read too often.
    events = read_events(run_dir, None if rank == 0 else rank, steps_of=rank)
    names = runs_of(events)
    ledger = Ledger(rank)
    for event in events:
        if names[str(event.get("run", ""))] == names.get(run, run):
            ledger.add(event)
    return ledger
