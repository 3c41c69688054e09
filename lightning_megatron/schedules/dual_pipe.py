"""dualpipev: a forward and a whole backward side by side, so that they can hide each other.

DeepSeek-AI, *DeepSeek-V3 Technical Report*, arXiv 2412.19437, section 3.2.1 (DualPipe), cut in half
so that every stage exists once: a rank holds two, the network running down and up again. In the
middle of the step every forward on one of them stands directly before a whole backward of another
microbatch on the other: where a stage spends much time in transfers of its own (the all-to-all of
experts), one can compute while the other transfers. In the ramps at both ends backwards are split,
and weight halves fill idle time.

3 ranks with 2 stages each (small letters: the second), 4 microbatches, forward and both halves of
the backward taking equal times, ``.`` idle. ::

    rank 0  F0 F1 F2 F3 ...f0 i0 f1 i1 f2 i2 w0 w1 f3 w2 ...B0--- i3 I1 w3 I2 W1 I3 W2 W3
    rank 1  ...F0 F1 F2 f0 F3 f1 i0 f2 i1 w0 w1 f3 ...B0--- i2 I1 w2 i3 I2 W1 I3 w3 W2 W3
    rank 2  ......F0 f0 F1 f1 F2 f2 F3 b0--- f3 B0--- i1 I1 w1 i2 I2 W1 i3 I3 w2 W2 w3 W3

* bubble: ``(p - 1) T / 6`` for even times, where ``T`` is the time of a microbatch on a rank
* live activations: ``2 p + 1`` of a stage, half a rank's more than under 1f1b

The order is made like those of `v_shaped`, with starts on a rank that leave room for whole
backwards, and with 3 units from rank to rank in either direction. The simulator lets a pair run one
after the other, so it does not show what overlapping gains.
"""

from lightning_megatron.schedules.actions import Action, Kind, Rows, v_shaped
from lightning_megatron.schedules.v_shaped import Route, repeat
from lightning_megatron.schedules.wgrad_placement import fill_weights


def dualpipev(num_ranks: int, num_microbatches: int) -> Rows:
    """Rows of dualpipev."""
    placement, limit = v_shaped(num_ranks), 2 * num_ranks + 1
    orders = [_split(order) for order in repeat(_way(num_ranks), num_microbatches)]
    ahead = fill_weights(orders, placement, limit, eager=True).rows
    return fill_weights([_join_pairs(row) for row in ahead], placement, limit).rows


def _way(num_ranks: int) -> Route:
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
