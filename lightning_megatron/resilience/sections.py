"""What a rank is doing: one section at a time, and how long each has taken.

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

START = "start"
DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint"
VALIDATION = "validation"
OTHER = "other"

SECTIONS = (START, DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT, VALIDATION, OTHER)


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
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds = dict.fromkeys(SECTIONS, 0.0)
        self.longest = dict.fromkeys(SECTIONS, 0.0)
        self.current = START
        self.since = now()
        self.step = 0
        self.entries = 0

    def enter(self, name: str) -> None:
        """Leave the current section for ``name``, which may be the same one."""
        seconds, left, now = self._seconds, self.current, self._now()
        if name not in seconds:
            raise ValueError(f"{name!r} is no section; there are {', '.join(SECTIONS)}")
        stay = now - self.since
        seconds[left] += stay
        if stay > self.longest[left]:
            self.longest[left] = stay
        self.since = now
        self.current = name
        self.entries += 1

    def section(self, name: str) -> "Stay":
        """A context in ``name``; afterwards the section from before is entered again."""
        return Stay(self, name)

    def seconds(self) -> dict[str, float]:
        """Seconds in each section since the clock was made, the current stay included."""
        seconds, current, since = self._seconds.copy(), self.current, self.since
        seconds[current] += self._now() - since
        return seconds


class Stay:
    """Context of `SectionClock.section`."""

    def __init__(self, clock: SectionClock, name: str) -> None:
        self._clock, self._name = clock, name

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
