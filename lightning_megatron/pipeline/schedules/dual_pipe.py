"""dualpipev: a forward and a whole backward side by side, so that they can hide each other."""

from lightning_megatron.pipeline.actions import Action, Kind, v_shaped
from lightning_megatron.pipeline.schedules.v_shaped import Way, repeat
from lightning_megatron.pipeline.schedules.weights import Rows, fill_weights


def dualpipev(num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of dualpipev."""
    orders = [_split_unpaired(order) for order in repeat(_way(num_ranks), num_microbatches)]
    return fill_weights(orders, v_shaped(num_ranks), limit=2 * num_ranks + 1).rows


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


def _split_unpaired(order: list[Action]) -> list[Action]:
    """Split the backwards before which no forward stands: they belong to the ramps."""
    pairs = zip([None, *order], order, strict=False)
    return [
        action._replace(kind=Kind.BACKWARD_INPUT)
        if action.kind is Kind.BACKWARD and (before is None or before.kind is not Kind.FORWARD)
        else action
        for before, action in pairs
    ]
