"""Pipeline schedules as data: in which order each rank works through its microbatches.

The network is cut into ``p`` *stages*, the batch into ``m`` *microbatches*. Stage ``s`` can run
the forward of a microbatch once stage ``s - 1`` has, and its backward once stage ``s + 1`` has. A
schedule is one list of actions per rank that respects these dependencies; the runner executes the
list, receiving before an action what it needs and sending afterwards what it made, and
`simulate` predicts what the list costs. All schedules compute the same gradients. They
differ in how long ranks stand idle (the *bubble*) and in how many microbatches they hold the
activations of between forward and backward (the *live activations*, which set the peak memory).

Drawings: 4 ranks, 6 microbatches, backward taking twice as long as forward, ``.`` idle.

**gpipe** (Huang et al., arXiv 1811.06965): all forwards, then all backwards. ::

    rank 0  F0 F1 F2 F3 F4 F5 ...........................B0--- B1--- B2--- B3--- B4--- B5---
    rank 1  ...F0 F1 F2 F3 F4 F5 ..................B0--- B1--- B2--- B3--- B4--- B5--- ......
    rank 2  ......F0 F1 F2 F3 F4 F5 .........B0--- B1--- B2--- B3--- B4--- B5--- ............
    rank 3  .........F0 F1 F2 F3 F4 F5 B0--- B1--- B2--- B3--- B4--- B5--- ..................

* bubble: ``(p - 1) / (m + p - 1)`` of the step (``(p - 1) / m`` of the ideal time) for even stages
* live activations: ``m`` on every rank

**1f1b** (PipeDream-flush; Narayanan et al., arXiv 2104.04473, section 2.2.1): a rank starts
backward as soon as it can and from then on alternates one forward with one backward. ::

    rank 0  F0 F1 F2 F3 ..................B0--- F4 B1--- F5 B2--- ...B3--- ...B4--- ...B5---
    rank 1  ...F0 F1 F2 ............B0--- F3 B1--- F4 B2--- F5 B3--- ...B4--- ...B5--- ......
    rank 2  ......F0 F1 ......B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- ...B5--- ............
    rank 3  .........F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- ..................

* bubble: the same as gpipe
* live activations: ``min(p - r, m)`` on rank ``r``, whatever the number of microbatches, so that a
  larger batch makes the bubble smaller at no cost in memory. This is why it is the default.

With transfers that take time 1f1b loses a little against gpipe, as every steady-state cycle waits
for a message; `simulate` shows how much.

**forward only** (validation, test, predict): gpipe without its second half, nothing stays live.

Any number of microbatches is legal, fewer than ranks included; a bubble is then unavoidable.
"""

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lightning_megatron.errors import raise_if_any


class Kind(Enum):
    """What a rank does with one microbatch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """One piece of work.

    >>> print(Action(Kind.BACKWARD, stage=1, microbatch=2))
    B1.2
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, and which rank holds which stage.

    Stages are counted along the network, over all ranks; ``stage_ranks`` is the only place that
    says where a stage lives, so that placements that visit a rank more than once (looped, V) need
    no other change.
    """

    name: str
    """What users call it."""
    num_microbatches: int
    """Pieces of one batch."""
    stage_ranks: tuple[int, ...]
    """Rank of every stage (a coordinate on the pp axis)."""
    actions: tuple[tuple[Action, ...], ...]
    """Work of every rank, in order."""

    @property
    def num_ranks(self) -> int:
        """Degree of pipeline parallelism."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Parts of the network, over all ranks."""
        return len(self.stage_ranks)

    @property
    def stages_per_rank(self) -> int:
        """Parts of the network that one rank holds."""
        return self.num_stages // self.num_ranks

    @property
    def last_stage_rank(self) -> int:
        """Rank that computes the loss."""
        return self.stage_ranks[-1]

    def rank_of_stage(self, stage: int) -> int:
        """Rank that holds ``stage``."""
        return self.stage_ranks[stage]

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Stages that ``rank`` holds, in network order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Actions, on this or a neighbouring stage, that must end before ``action`` starts.

        >>> schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=1)
        >>> [str(a) for a in schedule.needs(Action(Kind.BACKWARD, 0, 0))]
        ['F0.0', 'B1.0']
        """
        kind, stage, microbatch = action
        if kind is Kind.FORWARD:
            return (Action(kind, stage - 1, microbatch),) if stage else ()
        own_forward = Action(Kind.FORWARD, stage, microbatch)
        if stage == self.num_stages - 1:
            return (own_forward,)
        return own_forward, Action(kind, stage + 1, microbatch)


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1
) -> Schedule:
    """Generate the schedule ``name``.

    Raises:
        ConfigError: when `schedule_problems` finds a fault.

    >>> schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    >>> print(*schedule.actions[0])
    F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
    """
    raise_if_any(schedule_problems(name, num_ranks, num_microbatches, stages_per_rank))
    order = _ORDERS[name]
    actions = tuple(tuple(order(rank, num_ranks, num_microbatches)) for rank in range(num_ranks))
    return Schedule(name, num_microbatches, tuple(range(num_ranks)), actions)


def forward_only(
    num_ranks: int, num_microbatches: int, stage_ranks: Sequence[int] | None = None
) -> Schedule:
    """Schedule of an evaluation: every stage forwards every microbatch once.

    Args:
        num_ranks: degree of pipeline parallelism.
        num_microbatches: pieces of the batch; any number, it need not equal that of training.
        stage_ranks: rank of every stage, as in the `Schedule` used for training; one stage per
            rank by default. A rank with several stages finishes the earlier one first, which is
            free of deadlocks for every placement.
    """
    placement = tuple(range(num_ranks)) if stage_ranks is None else tuple(stage_ranks)
    actions = tuple(
        tuple(
            Action(Kind.FORWARD, stage, microbatch)
            for stage, owner in enumerate(placement)
            if owner == rank
            for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
    return Schedule("forward_only", num_microbatches, placement, actions)


def _gpipe(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    del num_ranks  # the order is the same for any number of stages
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for microbatch in range(num_microbatches):
            yield Action(kind, rank, microbatch)


def _one_f_one_b(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[Action]:
    ahead = min(num_ranks - 1 - rank, num_microbatches)
    for microbatch in range(ahead):
        yield Action(Kind.FORWARD, rank, microbatch)
    for microbatch in range(num_microbatches):
        if microbatch + ahead < num_microbatches:
            yield Action(Kind.FORWARD, rank, microbatch + ahead)
        yield Action(Kind.BACKWARD, rank, microbatch)


_ORDERS: dict[str, Callable[[int, int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
}

SCHEDULES = tuple(_ORDERS)
"""Names that `make_schedule` knows."""


def schedule_problems(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1
) -> list[str]:
    """Faults of a choice of schedule; empty when `make_schedule` will work.

    >>> print(*schedule_problems("1f1", 4, 8))
    schedule='1f1': the schedule is one of gpipe, 1f1b; nearest valid: schedule='1f1b'
    """
    problems = [
        f"{option}={value!r}: {what} is a whole number of at least 1; nearest valid: {option}=1"
        for option, value, what in (
            ("pp", num_ranks, "the number of pipeline ranks"),
            ("num_microbatches", num_microbatches, "the number of microbatches"),
            ("stages_per_rank", stages_per_rank, "the number of stages on a rank"),
        )
        if not isinstance(value, int) or isinstance(value, bool) or value < 1
    ]
    if name not in _ORDERS:
        problems.append(
            f"schedule={name!r}: the schedule is one of {', '.join(SCHEDULES)}; "
            f"nearest valid: schedule={_nearest_name(name)!r}"
        )
    elif not problems and stages_per_rank != 1:
        problems.append(
            f"schedule={name!r}, stages_per_rank={stages_per_rank}: {name} runs one stage per "
            f"rank; nearest valid: stages_per_rank=1"
        )
    return problems


def _nearest_name(name: object) -> str:
    close = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1, cutoff=0.4)
    return close[0] if close else "1f1b"
