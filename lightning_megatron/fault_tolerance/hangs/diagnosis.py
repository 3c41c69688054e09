"""Diagnosis of a hang: the rank that all others wait for.

When one rank stands still, all others stop in the next collective. So an exceeded limit says that
something hangs, but not which rank. The rank that hangs is, the surest sign first,

1. a process that is gone, or stopped by a signal;
2. a process whose Python does not run: no thread of it gets the GIL;
3. a rank that waits for no other rank and has exceeded the limit of its section;
4. a rank that has left training while the others still wait for it;
5. if all wait, the one that has not begun the collective in which the others have waited for the
   longest (`flight_recorder`).

A rank that waits is never the cause, however long it waits: its peer may save for minutes, within
the limit of the peer's section. On a CPU it waits in a method of torch's, which is observed; on a
GPU the host goes on, and the flight recorder shows that a collective was begun and does not
complete. Most but not all waits are seen, so case 3 is checked by the flight recorder and the
stacks before it is reported.

Each node has a monitor of its own. If all ranks of a node wait, a rank of another node may be the
cause, whose monitor knows why. So cases 4 and 5 are decided by the monitor that sees all nodes
(`node_board`). A node that sends nothing any more is the cause itself.

This file runs in a process without torch, see `node_monitor`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_megatron.fault_tolerance.hangs.flight_recorder import Missing
from lightning_megatron.fault_tolerance.hangs.heartbeat import Beat, Member
from lightning_megatron.fault_tolerance.hangs.stack_dump import Frame, ProcessState

GONE = "its process is gone"
STOPPED = "its process is stopped by a signal"
LOCKED = "it holds the GIL: no other thread of it runs"
BUSY = "it does not wait for any other rank"
ABSENT = "it has left training while others wait for it"
BEHIND = "it has not begun a collective in which others wait"
ENTANGLED = "all ranks wait for each other, and it has waited the longest"
SILENT = "its node sends nothing"

_INNERMOST = 4
_WAITING_CODE = (
    "/torch/distributed/",
    "/lightning_megatron/comm/",
    "/lightning_megatron/_torch/collectives.py",
    "/lightning_megatron/topology/meter.py",
)
"""Where transfers are waited for; a ring of attention waits by the meter."""


@dataclass(frozen=True)
class RankView:
    """State of a rank, as seen from outside.

    Attributes:
        member: rank and process.
        beat: content of its page.
        process: state of the process by the kernel.
        stall: seconds without progress.
        limit: limit of its section in seconds.
        silence: seconds since the last heartbeat of its watchdog thread.
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
        """Whether the process has ended before it left training."""
        same = self.process.exists and self.process.started == self.member.started
        return not same and not self.beat.left

    @property
    def late(self) -> bool:
        """Whether it has exceeded the limit of its section."""
        return self.stall > self.limit and not self.beat.left


@dataclass(frozen=True)
class Diagnosis:
    """Ranks that hang, and the reason.

    Attributes:
        ranks: ranks that hang.
        reason: one of this file's constants.
        certain: whether no further evidence is needed.
    """

    ranks: tuple[int, ...]
    reason: str
    certain: bool


def suspect(
    views: Sequence[RankView], patience: float, *, whole: bool = True, asleep: bool | None = None
) -> Diagnosis | None:
    """Diagnose by what is seen without asking the ranks; None while no rank hangs.

    Args:
        views: ranks that can be seen.
        patience: seconds without a heartbeat after which the GIL counts as held.
        whole: whether ``views`` are all ranks of the run.
        asleep: whether the whole run is suspended by signals, which is no hang; None: it is if all
            of ``views`` are stopped.
    """
    here = [v for v in views if not v.beat.left and not v.gone]
    late = [v for v in here if v.late]
    if asleep is None:
        asleep = all(v.process.stopped for v in here)
    if not late or asleep:
        return None
    tests: tuple[tuple[str, bool, Callable[[RankView], bool]], ...] = (
        (GONE, True, lambda v: v.gone),
        (STOPPED, True, lambda v: v.late and v.process.stopped),
        (LOCKED, True, lambda v: v.late and v.silence > patience),
        (BUSY, False, lambda v: v.late and not v.beat.waiting),
    )
    for reason, certain, test in tests:
        ranks = tuple(v.rank for v in views if test(v))
        if ranks:
            return Diagnosis(ranks, reason, certain)
    if len(late) < len(here) or not whole:  # some rank works within its limit, or may do so
        return None
    left = tuple(v.rank for v in views if v.beat.left)
    if left:
        return Diagnosis(left, ABSENT, certain=True)
    longest = max(here, key=lambda v: v.stall)
    return Diagnosis((longest.rank,), ENTANGLED, certain=False)


def confirm(
    suspicion: Diagnosis,
    views: Sequence[RankView],
    missing: Missing | None,
    stacks: Mapping[int, Sequence[Frame]],
    *,
    whole: bool = True,
) -> Diagnosis | None:
    """Confirm a diagnosis by collectives and stacks; None while it is not certain.

    Args:
        suspicion: result of `suspect`.
        views: ranks that can be seen.
        missing: collective in which ranks wait, if the flight recorders show one.
        stacks: frames of the training thread by rank, innermost first.
        whole: whether ``views`` are all ranks of the run.
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
            return Diagnosis(both, BUSY, certain=True)
        return Diagnosis(behind, BEHIND, certain=True)
    busy = tuple(rank for rank in suspicion.ranks if not waits(stacks.get(rank, ())))
    if suspicion.reason == BUSY and busy:
        return Diagnosis(busy, BUSY, certain=True)
    here = [v for v in views if not v.beat.left]
    if len(late) < len(here) or not whole:
        return None
    longest = max(here, key=lambda v: v.stall)
    return Diagnosis((longest.rank,), ENTANGLED, certain=True)


def waits(frames: Sequence[Frame]) -> bool:
    """Whether a thread is in code that waits for other ranks."""
    return any(part in frame.file for frame in frames[:_INNERMOST] for part in _WAITING_CODE)
