"""Comparison of ranks that do the same work, without the time in which they wait.

In a synchronous step all ranks take equally long, because the fast ones wait for the slowest in the
next collective. So ranks are compared by their *own work*: the time in a section minus the time in
which they waited for others (`run_log.sections`). The score of a rank in a section is ::

    score = fastest peer's median / own median          over the steps of a window

It is 1 for the fastest and 0.5 for one that takes twice as long (as in NVIDIA's resiliency
extension). Medians leave out the odd slow step. Peers are the ranks of the same pipeline stage, as
other stages have other work. A difference of at most a tenth of the step's work has score 1: a rank
that costs its peers less is not worth a report, and a busy machine delays short sections by more
than they take.

Work and waiting are measured on the host. On a GPU forward and backward last as long as the host
takes to launch their kernels, so that a slow GPU shows in no section.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from lightning_megatron.run_log import sections as names
from lightning_megatron.run_log.sections import SectionClock

WATCHED = (names.DATA, names.FORWARD, names.BACKWARD, names.OPTIMIZER)
_MATTERS = 0.1


class OwnWork:
    """Seconds of own work by section, for every batch of a window.

    Args:
        clock: of this rank.
    """

    def __init__(self, clock: SectionClock) -> None:
        self._clock = clock
        self._rows: list[tuple[float, ...]] = []
        self._before = self._read()

    def __len__(self) -> int:
        """Batches in the window."""
        return len(self._rows)

    def begin(self) -> None:
        """Start a batch here; what was before belongs to none."""
        self._before = self._read()

    def end(self) -> None:
        """A batch has ended, and the next one starts."""
        now = self._read()
        self._rows.append(tuple(b - a for a, b in zip(self._before, now, strict=True)))
        self._before = now

    def take(self) -> list[float]:
        """Medians of the window's batches, in the order of `WATCHED`; starts a new window."""
        columns = list(zip(*self._rows, strict=True))
        self._rows = []
        return [max(median(column), 0.0) for column in columns]

    def _read(self) -> tuple[float, ...]:
        spent, waited = self._clock.seconds(), self._clock.waited_seconds()
        return tuple(spent[name] - waited[name] for name in WATCHED)


@dataclass(frozen=True)
class Score:
    """Speed of a rank in a section, compared with its fastest peer."""

    rank: int
    section: str
    score: float
    seconds: float
    fastest: float
    """Seconds of the fastest peer."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} in {self.section}: score {self.score:.2f}, "
            f"{1e3 * self.seconds:.1f} ms of own work in the median step, "
            f"{1e3 * self.fastest:.1f} ms on the fastest rank with the same work"
        )


def scores(work: Sequence[Sequence[float]], kinds: Sequence[float]) -> list[Score]:
    """Scores of all ranks and sections, the worst first.

    Args:
        work: medians by rank, in the order of `WATCHED`.
        kinds: kind of work by rank; only ranks of the same kind are compared.
    """
    found = []
    for rank, mine in enumerate(work):
        peers = [work[r] for r, kind in enumerate(kinds) if kind == kinds[rank]]
        whole = max(sum(peer) for peer in peers)
        for index, section in enumerate(WATCHED):
            fastest = min(peer[index] for peer in peers)
            matters = mine[index] - fastest > _MATTERS * whole
            score = fastest / mine[index] if matters else 1.0
            found.append(Score(rank, section, score, mine[index], fastest))
    return sorted(found, key=lambda s: s.score)


class SlowRanks:
    """Ranks that were slow for some windows in a row.

    Args:
        threshold: scores below it count as slow.
        windows: windows in a row after which a rank counts as slow.
    """

    def __init__(self, threshold: float, windows: int) -> None:
        self._threshold = threshold
        self._windows = windows
        self._in_a_row: dict[tuple[int, str], int] = {}

    def add(self, window: Sequence[Score]) -> list[Score]:
        """Ranks that have become slow in this window; each once, until it recovers."""
        slow = {(s.rank, s.section): s for s in window if s.score < self._threshold}
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in slow}
        return [slow[key] for key, count in self._in_a_row.items() if count == self._windows]

    @property
    def current(self) -> Mapping[tuple[int, str], int]:
        """Number of slow windows in a row, by rank and section that were slow in the last one."""
        return self._in_a_row
