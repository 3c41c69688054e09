"""Which rank is it that all others wait for?

When one rank of a job stands still, all do: the others come to the next collective and stay there.
So a limit that is exceeded says that something hangs, not who. In the order of how sure they are:

1. a process that is gone, or stopped by a signal;
2. a process whose Python does not run: no thread of it gets Python's lock;
3. a rank that does not wait for anybody and has exceeded the limit of its own section;
4. a rank that has left training while the others still wait in it;
5. where all wait, the one that has not begun the collective in which the others have waited for the
   longest (`recorder`).

A rank that waits is never to blame, however long: its peer may save for minutes, which the limit of
the peer's own section allows. What "waits" means is seen in most places but not in all, so 3 is
checked against the flight recorder and the stacks before anything is said.

Each node of a run is watched by a monitor of its own. Where all ranks of a node wait, it may well
be for a rank of another node, whose monitor can tell why. So 4 and 5 are left to the monitor that
sees all nodes (`node_board`). A node that tells nothing at all any more is to blame itself.

This file runs in a process without torch, see `node_monitor`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_megatron.fault_tolerance.hangs.flight_recorder import Missing
from lightning_megatron.fault_tolerance.hangs.heartbeat import Beat, Member
from lightning_megatron.fault_tolerance.hangs.stack_dump import Frame, ProcessState

GONE = "its process is gone"
STOPPED = "its process is stopped by a signal"
LOCKED = "it holds Python's lock: no other thread of it runs"
BUSY = "it does not wait for any other rank"
ABSENT = "it has left training, while others wait for it"
BEHIND = "it has not begun a collective that others wait in"
ENTANGLED = "all ranks wait for each other, and it has for the longest"
SILENT = "nothing is heard from its node"

_INNERMOST = 4
_WAITING_CODE = ("/torch/distributed/", "/lightning_megatron/comm/")


@dataclass(frozen=True)
class View:
    """What is known about a rank from outside, at one moment.

    Attributes:
        member: who it is.
        beat: what its page says.
        process: what the kernel says.
        stall: seconds without progress.
        limit: of the section that it is in.
        silence: seconds without a sign of life from its watchdog thread.
    """

    member: Member
    beat: Beat
    process: ProcessState
    stall: float
    limit: float
    silence: float

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.member.rank

    @property
    def gone(self) -> bool:
        """Whether the process has ended without having left training."""
        same = self.process.exists and self.process.started == self.member.started
        return not same and not self.beat.left

    @property
    def late(self) -> bool:
        """Whether it has exceeded its limit."""
        return self.stall > self.limit and not self.beat.left


@dataclass(frozen=True)
class Suspicion:
    """Who seems to hang, and why.

    Attributes:
        ranks: the culprits.
        reason: one of this file's constants.
        certain: whether nothing else needs to be looked at.
    """

    ranks: tuple[int, ...]
    reason: str
    certain: bool


def suspect(
    views: Sequence[View], patience: float, *, whole: bool = True, asleep: bool | None = None
) -> Suspicion | None:
    """Who seems to hang by what is seen without disturbing anybody; None while nobody does.

    Args:
        views: all ranks that can be seen.
        patience: seconds without a sign of life after which Python's lock counts as held.
        whole: whether these are all ranks of the run.
        asleep: whether the whole run was suspended by signals, which is meant so; None if that is
            the case when all of these are stopped.
    """
    here = [v for v in views if not v.beat.left and not v.gone]
    late = [v for v in here if v.late]
    if asleep is None:
        asleep = all(v.process.stopped for v in here)
    if not late or asleep:
        return None
    tests: tuple[tuple[str, bool, Callable[[View], bool]], ...] = (
        (GONE, True, lambda v: v.gone),
        (STOPPED, True, lambda v: v.late and v.process.stopped),
        (LOCKED, True, lambda v: v.late and v.silence > patience),
        (BUSY, False, lambda v: v.late and not v.beat.waiting),
    )
    for reason, certain, test in tests:
        ranks = tuple(v.rank for v in views if test(v))
        if ranks:
            return Suspicion(ranks, reason, certain)
    if len(late) < len(here) or not whole:  # somebody works, within the limit, or may do so
        return None
    left = tuple(v.rank for v in views if v.beat.left)
    if left:
        return Suspicion(left, ABSENT, certain=True)
    longest = max(here, key=lambda v: v.stall)
    return Suspicion((longest.rank,), ENTANGLED, certain=False)


def confirm(
    suspicion: Suspicion,
    views: Sequence[View],
    missing: Missing | None,
    stacks: Mapping[int, Sequence[Frame]],
    *,
    whole: bool = True,
) -> Suspicion | None:
    """The suspicion in the light of collectives and stacks; None if nobody is to blame yet.

    Args:
        suspicion: of `suspect`.
        views: the same.
        missing: the collective that is waited in, if the flight recorders show one.
        stacks: frames of the training thread by rank, innermost first.
        whole: whether these are all ranks of the run.
    """
    if suspicion.certain:
        return suspicion
    late = {v.rank for v in views if v.late}
    if missing is not None:
        behind = tuple(rank for rank in missing.ranks if rank in late)
        if not behind:
            return None
        both = tuple(rank for rank in behind if rank in suspicion.ranks)
        if suspicion.reason == BUSY and both:
            return Suspicion(both, BUSY, certain=True)
        return Suspicion(behind, BEHIND, certain=True)
    busy = tuple(rank for rank in suspicion.ranks if not waits(stacks.get(rank, ())))
    if suspicion.reason == BUSY and busy:
        return Suspicion(busy, BUSY, certain=True)
    here = [v for v in views if not v.beat.left]
    if len(late) < len(here) or not whole:
        return None
    longest = max(here, key=lambda v: v.stall)
    return Suspicion((longest.rank,), ENTANGLED, certain=True)


def waits(frames: Sequence[Frame]) -> bool:
    """Whether a thread stands in code that waits for other ranks."""
    return any(part in frame.file for frame in frames[:_INNERMOST] for part in _WAITING_CODE)
