"""Which blocks to recompute, so that the others fit into memory at the least loss of time.

Nothing but arithmetic. A block that is kept costs the bytes that autograd keeps of it, one that is
recomputed costs its input and the time of its forward; of both, as many as there are microbatches
under way. While the backward of a recomputed block runs, its activations exist once. Keeping is
thus a knapsack problem: the value of a block is the time that it need not be recomputed, its weight
what it keeps beyond its input.

It is solved by the list of all choices so far that no other beats in both weight and value. Blocks
of a network are nearly alike, so the list stays short; where it would not, weights are rounded up
to a ten-thousandth of the room.

>>> blocks = [BlockCosts(seconds=1.0, kept=10, input=1), BlockCosts(seconds=3.0, kept=10, input=1)]
>>> choose_recomputed([*blocks, *blocks], limit=33), choose_recomputed(blocks, limit=19)
((0, 2), (0, 1))
"""

from collections.abc import Sequence
from dataclasses import dataclass

_PARTS = 10_000


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """What was measured of a block."""

    seconds: float
    """Of its forward."""
    kept: int
    """Bytes that autograd keeps of one microbatch, its input included."""
    input: int
    """Bytes of its input."""
    live: int = 1
    """Most microbatches that are under way in it at a time."""


def needed(blocks: Sequence[BlockCosts], recomputed: Sequence[int]) -> int:
    """Bytes that the blocks take at most, if some are recomputed."""
    chosen = set(recomputed)
    held = sum(b.live * (b.input if i in chosen else b.kept) for i, b in enumerate(blocks))
    return held + max((blocks[i].kept for i in chosen), default=0)


def choose_recomputed(blocks: Sequence[BlockCosts], limit: int) -> tuple[int, ...] | None:
    """Numbers of the blocks to recompute; None if even all of them do not fit.

    Args:
        blocks: of one rank.
        limit: bytes for their activations.
    """
    everything = tuple(range(len(blocks)))
    if needed(blocks, ()) <= limit:
        return ()
    if needed(blocks, everything) > limit:
        return None
    # What the largest recomputed block needs while its backward runs decides how much room there
    # is; so it is supposed in turn to be each of them, and larger ones are kept.
    best: tuple[float, tuple[int, ...]] | None = None
    for transient in {b.kept for b in blocks}:
        found = _choose(blocks, limit - transient, transient)
        if found is not None and (best is None or found < best):
            best = found
    return everything if best is None else best[1]


def _choose(
    blocks: Sequence[BlockCosts], limit: int, largest: int
) -> tuple[float, tuple[int, ...]] | None:
    """Seconds and blocks to recompute, none of which keeps more than ``largest``."""
    forced = [i for i, b in enumerate(blocks) if b.kept > largest]
    free = [i for i in range(len(blocks)) if i not in forced]
    room = limit - sum(b.live * (b.kept if b.kept > largest else b.input) for b in blocks)
    if room < 0:
        return None
    unit = max(1, room // _PARTS)
    # Of every weight the best value, and with it what is kept.
    choices: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for i in free:
        block = blocks[i]
        weight = -(-block.live * max(block.kept - block.input, 0) // unit)
        taken = [(w + weight, v + block.seconds, (*kept, i)) for w, v, kept in choices]
        choices = _undominated([*choices, *(t for t in taken if t[0] * unit <= room)])
    kept = set(choices[-1][2])
    recomputed = tuple(i for i in free if i not in kept)
    return sum(blocks[i].seconds for i in recomputed), recomputed


def _undominated(
    choices: list[tuple[int, float, tuple[int, ...]]],
) -> list[tuple[int, float, tuple[int, ...]]]:
    """Those that no other beats, by rising weight and value."""
    found: list[tuple[int, float, tuple[int, ...]]] = []
    for choice in sorted(choices, key=lambda c: (c[0], -c[1])):
        if not found or choice[1] > found[-1][1]:
            found.append(choice)
    return found
