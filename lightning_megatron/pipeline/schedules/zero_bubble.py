"""zb-h1 and zb-h2: 1f1b whose idle time is filled with the weight halves of the backwards."""

from collections import deque

from lightning_megatron.pipeline.actions import Action, Kind, looped
from lightning_megatron.pipeline.schedules.one_f_one_b import alternate, group_sizes, in_groups
from lightning_megatron.pipeline.schedules.weights import Rows, fill_weights


def zb_h1(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Rows:
    """Rows of zb-h1."""
    groups = group_sizes(num_ranks, num_microbatches)
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = (
            in_groups(kind, rank, num_ranks, stages_per_rank, groups)
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT)
        )
        ahead = (stages_per_rank - 1) * groups[0] + num_ranks - 1 - rank
        rows.append(_with_late_weights(alternate(forwards, backwards, ahead), lag=rank))
    return tuple(rows)


def _with_late_weights(order: tuple[Action, ...], lag: int) -> tuple[Action, ...]:
    """Insert the ``W`` of every ``I``, behind the ``I`` that is ``lag`` later."""
    row: list[Action] = []
    owed: deque[Action] = deque()
    for action in order:
        row.append(action)
        if action.kind is Kind.BACKWARD_INPUT:
            owed.append(action._replace(kind=Kind.BACKWARD_WEIGHT))
            if len(owed) > lag:
                row.append(owed.popleft())
    return (*row, *owed)


def zb_h2(num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of zb-h2."""
    orders = [
        alternate(
            [Action(Kind.FORWARD, rank, i) for i in range(num_microbatches)],
            [Action(Kind.BACKWARD_INPUT, rank, i) for i in range(num_microbatches)],
            ahead=2 * (num_ranks - 1 - rank),
        )
        for rank in range(num_ranks)
    ]
    return fill_weights(orders, looped(num_ranks), limit=2 * num_ranks - 1).rows
