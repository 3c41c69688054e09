"""The vocabulary of pipeline schedules: kinds of work, actions, and tables of them.

The network is cut into ``n`` *stages*, the batch into ``m`` *microbatches*. Work on one stage and
one microbatch is

* ``F``, the *forward*;
* ``B``, the *backward*, which makes the gradients of the stage's input and of its parameters;
* or, instead of ``B``, its two halves: ``I``, the gradient of the *input*, which is all that the
  stage before waits for, and ``W``, the gradient of the parameters (*weights*), for which nobody
  waits, so that it can fill time in which a rank would stand idle (zero bubble, arXiv 2401.10241).

A schedule may split the backward of some microbatches on some stages and not of others.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class Kind(Enum):
    """Kind of work that a rank does with one microbatch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both halves of the backward at once."""
    BACKWARD_INPUT = "I"
    """The half of the backward that the previous stage waits for."""
    BACKWARD_WEIGHT = "W"
    """The half of the backward that makes the gradients of the parameters."""


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


Rows = tuple[tuple[Action, ...], ...]
"""Actions of every rank, in order."""


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, and which rank holds which stage.

    Stages are counted along the network, over all ranks; ``stage_ranks`` is the only place that
    says where a stage lives, so that placements that visit a rank more than once (looped, V) need
    no other change.
    """

    name: str
    """Name in the options of users."""
    num_microbatches: int
    """Pieces of one batch."""
    stage_ranks: tuple[int, ...]
    """Rank of every stage (a coordinate on the pp axis)."""
    actions: Rows
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

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward is split into its two halves."""
        return bool(self._split)

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        """Stage and microbatch of every backward in two halves."""
        return frozenset(
            (action.stage, action.microbatch)
            for actions in self.actions
            for action in actions
            if action.kind is Kind.BACKWARD_INPUT
        )

    def is_split(self, stage: int, microbatch: int) -> bool:
        """Whether this backward runs in two halves."""
        return (stage, microbatch) in self._split

    def row(self, rank: int) -> tuple[Action, ...]:
        """Work of ``rank``, in order."""
        return self.actions[rank]

    def rank_of_stage(self, stage: int) -> int:
        """Rank that holds ``stage``."""
        return self.stage_ranks[stage]

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """Stages that ``rank`` holds, in network order."""
        return tuple(stage for stage, owner in enumerate(self.stage_ranks) if owner == rank)

    def input_gradient(self, stage: int, microbatch: int) -> Action:
        """Action that makes the gradient of the stage's input: ``I`` where split, else ``B``."""
        split = self.is_split(stage, microbatch)
        return Action(Kind.BACKWARD_INPUT if split else Kind.BACKWARD, stage, microbatch)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Actions, on this or a neighbouring stage, that must end before ``action`` starts.

        A forward needs the forward of the stage before; ``B`` and ``I`` need the stage's own
        forward and the input's gradient of the stage behind; ``W`` needs the stage's own ``I``.

        >>> row = (Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0))
        >>> schedule = Schedule("own", 1, (0, 0), (row,))
        >>> [str(a) for a in schedule.needs(Action(Kind.BACKWARD, 0, 0))]
        ['F0.0', 'B1.0']
        """
        kind, stage, microbatch = action
        if kind is Kind.FORWARD:
            return (Action(kind, stage - 1, microbatch),) if stage else ()
        if kind is Kind.BACKWARD_WEIGHT:
            return (Action(Kind.BACKWARD_INPUT, stage, microbatch),)
        own_forward = Action(Kind.FORWARD, stage, microbatch)
        if stage == self.num_stages - 1:
            return (own_forward,)
        return own_forward, self.input_gradient(stage + 1, microbatch)


def looped(num_ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Rank of every stage when the network visits the ranks round after round.

    >>> looped(3, stages_per_rank=2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(num_ranks)) * stages_per_rank


def v_shaped(num_ranks: int) -> tuple[int, ...]:
    """Rank of every stage when the network visits the ranks down and up again.

    Rank 0 holds the first and the last stage, so the loss is where the data are.

    >>> v_shaped(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))
