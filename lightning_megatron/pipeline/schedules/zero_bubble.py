"""zb-h1 and zb-h2: 1f1b whose idle time is filled with the weight halves of the backwards."""

from lightning_megatron.pipeline.actions import Action, Kind, looped
from lightning_megatron.pipeline.schedules.one_f_one_b import alternate, group_sizes, in_groups
from lightning_megatron.pipeline.schedules.weights import Rows, fill_weights


def zb_h1(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Rows:
    """Rows of zb-h1."""
    groups = group_sizes(num_ranks, num_microbatches)
    more_stages = (stages_per_rank - 1) * groups[0]
    orders = []
    for rank in range(num_ranks):
        forwards, backwards = (
            in_groups(kind, rank, num_ranks, stages_per_rank, groups)
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT)
        )
        orders.append(alternate(forwards, backwards, more_stages + num_ranks - 1 - rank))
    placement = looped(num_ranks, stages_per_rank)
    return fill_weights(orders, placement, limit=more_stages + num_ranks).rows


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
