"""Sections of a step: the present section of a rank, and the time in each.

A training loop has few kinds of work, and whoever watches a run from the outside asks the same of
all of them: which is it at, since when, does it move on? `SectionClock` answers from plain
attributes. The training thread writes them, other threads read them without a lock: each is
replaced by one store, so a reader sees a value before or after a change and never half of one. Two
attributes read one after the other may belong to neighbouring sections; a reader who cares compares
`entries` before and after.

Entering a section reads the clock once and adds to a dictionary, less than a microsecond.

```
start -> (data -> forward -> backward -> optimizer)* -> other
              checkpoint, validation: anywhere, and then back
```
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

START = "start"
DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint"
VALIDATION = "validation"
OTHER = "other"

SECTIONS = (START, DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, VALIDATION, OTHER)


class Mirror(Protocol):
    """Somebody who follows a clock; called by the training thread, so it must be quick."""

    def entered(self, clock: "SectionClock") -> None:
        """A section was entered."""
        ...

    def waits(self, depth: int) -> None:
        """A wait for other ranks has begun or ended; ``depth`` of them go on."""
        ...


class SectionClock:
    """The section a rank is in, and the seconds it has spent in each.

    Args:
        now: the clock, in seconds.

    Attributes:
        current: one of `SECTIONS`.
        since: when it was entered, by ``now`` (`time.monotonic`).
        step: optimizer steps before the current batch.
        entries: how often a section was entered, the same one again included: it grows while the
            rank makes progress.
        longest: the longest stay so far in each section, in seconds, but for the current stay.
        visits: completed stays in each section.
        waits: how many calls that wait for other ranks the rank is in at the moment.
        mirror: told of every change, by the training thread, if somebody wants to know.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self._waited = dict.fromkeys(SECTIONS, 0.0)
        self.longest = dict.fromkeys(SECTIONS, 0.0)
        self.visits = dict.fromkeys(SECTIONS, 0)
        self.current = START
        self.since = now()
        self.step = 0
        self.entries = 0
        self.waits = 0
        self.mirror: Mirror | None = None

    def enter(self, name: str) -> None:
        """Leave the current section for ``name``, which may be the same one."""
        seconds, left, now = self._seconds, self.current, self._now()
        if name not in seconds:
            raise ValueError(f"{name!r} is no section; there are {', '.join(SECTIONS)}")
        stay = now - self.since
        seconds[left] += stay
        if stay > self.longest[left]:
            self.longest[left] = stay
        self.visits[left] += 1
        self.since = now
        self.current = name
        self.entries += 1
        if self.mirror is not None:
            self.mirror.entered(self)

    def began_to_wait(self) -> float:
        """Another rank is waited for from now on; returns what `waited` wants."""
        self.waits += 1
        if self.mirror is not None:
            self.mirror.waits(self.waits)
        return self._now()

    def waited(self, began: float) -> None:
        """The wait is over that began then."""
        self.waits -= 1
        if not self.waits:  # of nested waits the outermost counts
            self._waited[self.current] += self._now() - began
        if self.mirror is not None:
            self.mirror.waits(self.waits)

    def section(self, name: str) -> "Stay":
        """A context in ``name``; afterwards the section from before is entered again."""
        return Stay(self, name)

    def seconds(self) -> dict[str, float]:
        """Seconds in each section since the clock was made, the current stay included."""
        seconds, current, since = self._seconds.copy(), self.current, self.since
        seconds[current] += self._now() - since
        return seconds

    def seconds_in(self, name: str) -> float:
        """Seconds in one section."""
        now = self._now() - self.since if name == self.current else 0.0
        return self._seconds[name] + now

    def waited_seconds(self) -> dict[str, float]:
        """Part of `seconds` in which the rank waited for others, as far as waits are seen."""
        return self._waited.copy()


class Stay:
    """Context of `SectionClock.section`."""

    def __init__(self, clock: SectionClock, name: str) -> None:
        self._clock = clock
        self._name = name

    def __enter__(self) -> None:
        self._before = self._clock.current
        self._clock.enter(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clock.enter(self._before)
