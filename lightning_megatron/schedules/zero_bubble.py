"""zb-h1 and zb-h2: 1f1b whose idle time is filled with the weight halves of the backwards.

Qi et al., *Zero Bubble Pipeline Parallelism*, arXiv 2401.10241. A backward in two halves hands the
input's gradient on after the first, so that the ramps at both ends of the step are shorter, and the
second halves are put where a rank would stand idle. Drawings: 4 ranks, forward and both halves of
the backward taking equal times, ``.`` idle.

**zb-h1** (section 2.1) delays the weight half on rank ``r`` until ``r`` more input halves are done,
which makes every rank hold what rank 0 holds under 1f1b. 6 microbatches. ::

    rank 0  F0 F1 F2 F3 .........I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
    rank 1  ...F0 F1 F2 ......I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
    rank 2  ......F0 F1 ...I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
    rank 3  .........F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

* bubble: ``(p - 1) (F + I - W)``, a third of that of 1f1b for even times
* live activations: ``p`` on every rank

With ``v`` stages on a rank (looped, as in `one_f_one_b`) the bubble is ``v`` times smaller.

**zb-h2** (section 2.2) fills the ramp at the beginning with more forwards. 7 microbatches. ::

    rank 0  F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .........
    rank 1  ...F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 ......
    rank 2  ......F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 ...
    rank 3  .........F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6

* bubble: ``(p - 1) (F + I - 2 W)`` from a rank's first action to its last, for even times nothing,
  given ``2 p - 1`` microbatches. From the first action of any rank to the last of any it is that of
  zb-h1: no schedule lets rank ``p - 1`` start before ``p - 1`` forwards. So zb-h2 pays off where
  the next step starts on rank 0 while others still finish this one, that is, without clipping by
  the norm of all gradients or another wait for all ranks (the paper's section 4 goes around it).
* live activations: ``2 p - 1``
"""

from collections import deque

from lightning_megatron.schedules.actions import Action, Kind, Rows, looped
from lightning_megatron.schedules.one_f_one_b import alternate, group_sizes, in_groups
from lightning_megatron.schedules.wgrad_placement import fill_weights


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
