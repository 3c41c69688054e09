"""gpipe and breadth-first: all forwards, then all backwards."""

from lightning_megatron.pipeline.actions import Action, Kind

Rows = tuple[tuple[Action, ...], ...]


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
