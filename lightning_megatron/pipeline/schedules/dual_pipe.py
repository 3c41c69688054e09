"""dualpipev: a forward and a whole backward side by side, so that they can hide each other."""

from lightning_megatron.pipeline.actions import Action, Kind, v_shaped
from lightning_megatron.pipeline.schedules.v_shaped import Way, repeat
from lightning_megatron.pipeline.schedules.weights import Rows, fill_weights


def dualpipev(num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of dualpipev."""
    placement, limit = v_shaped(num_ranks), 2 * num_ranks + 1
    orders = [_split(order) for order in repeat(_way(num_ranks), num_microbatches)]
    ahead = fill_weights(orders, placement, limit, eager=True).rows
    return fill_weights([_join_pairs(row) for row in ahead], placement, limit).rows


def _way(num_ranks: int) -> Way:
    """Forwards and backwards of one microbatch.

    On every rank they start 0, 1, 3 and 4 units into the period of 6: forward of the first stage,
    backward of the second, forward of the second, backward of the first. From rank to rank every
    one of them starts 3 units later.
    """
    last, hop = num_ranks - 1, 3
    turn = hop * last + 3
    loss = turn + hop * last + 4
    home = loss + hop * last + 3
    return [
        [
            (hop * rank, Kind.FORWARD, rank),
            (turn + hop * (last - rank), Kind.FORWARD, last + 1 + last - rank),
            (loss + hop * rank, Kind.BACKWARD, last + 1 + last - rank),
            (home + hop * (last - rank), Kind.BACKWARD, rank),
        ]
        for rank in range(num_ranks)
    ]


def _split(order: list[Action]) -> list[Action]:
    return [
        action if action.kind is Kind.FORWARD else action._replace(kind=Kind.BACKWARD_INPUT)
        for action in order
    ]


def _join_pairs(row: tuple[Action, ...]) -> list[Action]:
    """Make whole again the backwards right behind a forward of the rank's other stage.

    The others belong to the ramps at both ends of the step and stay split.
    """
    order = [action for action in row if action.kind is not Kind.BACKWARD_WEIGHT]
    return [
        action._replace(kind=Kind.BACKWARD)
        if action.kind is Kind.BACKWARD_INPUT
        and before is not None
        and before.kind is Kind.FORWARD
        and before.stage != action.stage
        else action
        for before, action in zip([None, *order], order, strict=False)
    ]
