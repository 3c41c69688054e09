"""gpipe and breadth-first: all forwards, then all backwards.

**gpipe** (Huang et al., arXiv 1811.06965). 4 ranks, 6 microbatches, backward taking twice as long
as forward, ``.`` idle. ::

    rank 0  F0 F1 F2 F3 F4 F5 ...........................B0--- B1--- B2--- B3--- B4--- B5---
    rank 1  ...F0 F1 F2 F3 F4 F5 ..................B0--- B1--- B2--- B3--- B4--- B5--- ......
    rank 2  ......F0 F1 F2 F3 F4 F5 .........B0--- B1--- B2--- B3--- B4--- B5--- ............
    rank 3  .........F0 F1 F2 F3 F4 F5 B0--- B1--- B2--- B3--- B4--- B5--- ..................

* bubble: ``(p - 1) / (m + p - 1)`` of the step (``(p - 1) / m`` of the ideal time) for even stages
* live activations: ``m`` on every rank

No rank waits for an answer before it goes on, so slow transfers cost less than under 1f1b.

**breadth-first** (Lamy-Poirier, arXiv 2211.05953): the network visits every rank ``v`` times, and a
rank finishes all microbatches on one of its stages before it turns to the next. 3 ranks with 2
stages each (small letters: the second), 3 microbatches. ::

    rank 0  F0 F1 F2 f0 f1 f2 ..................b0--- b1--- b2--- B0--- B1--- B2---
    rank 1  ...F0 F1 F2 f0 f1 f2 .........b0--- b1--- b2--- B0--- B1--- B2--- ......
    rank 2  ......F0 F1 F2 f0 f1 f2 b0--- b1--- b2--- B0--- B1--- B2--- ............

* bubble: ``(p - 1) / v`` steps of a rank; as fractions ``(p - 1) / (v m + p - 1)`` of the step
* live activations: ``v m`` of a stage on every rank, as many bytes as under gpipe

Under ZeRO-3 a stage's parameters are gathered once for all forwards and once for all backwards, and
its gradients reduced once, while the next stage computes; with any other looped schedule every
microbatch asks for them anew. Meant for few microbatches, as their number sets the memory.
"""

from lightning_megatron.schedules.actions import Action, Kind, Rows


def breadth_first(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> Rows:
    """Rows of breadth-first; of gpipe, when a rank holds one stage."""
    return tuple(
        tuple(
            Action(kind, rank + num_ranks * turn, microbatch)
            for kind, turns in (
                (Kind.FORWARD, range(stages_per_rank)),
                (Kind.BACKWARD, reversed(range(stages_per_rank))),
            )
            for turn in turns
            for microbatch in range(num_microbatches)
        )
        for rank in range(num_ranks)
    )
