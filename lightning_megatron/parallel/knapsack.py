"""How to recompute which block, so that all fit into memory at the least loss of time.

Nothing but arithmetic. From its forward to its backward a block costs the bytes that autograd keeps
of it; or, recomputed selectively, those of its input and of the results it keeps, and the time of
the rest of its forward; or, recomputed in full, those of its input, and the time of its forward. Of
the bytes, as many times as there are microbatches under way. While the backward of a recomputed
block runs, its activations exist once; where one microbatch is under way at a time, those of the
blocks behind it are gone by then (*in order*), so that the last blocks are the best to keep.
To choose among these ways for each block is a knapsack
problem (of several choices: one thing of each kind is taken).

It is solved by the list of all choices so far that no other beats in both bytes and time. Blocks
of a network are nearly alike, so the list stays short; where it would not, bytes are rounded up
to a ten-thousandth of the room.

>>> blocks = [BlockCosts(seconds=1.0, kept=10, input=1), BlockCosts(seconds=3.0, kept=10, input=1)]
>>> choose([*blocks, *blocks], limit=33)
('full', 'none', 'full', 'none')
>>> choose(blocks, limit=19)
('full', 'full')
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_PARTS = 10_000
Way = Literal["none", "selective", "full"]
"""How a block is recomputed."""


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """What was measured of a block."""

    seconds: float
    """Of its forward."""
    kept: int
    """Bytes that autograd keeps of one microbatch, its input included."""
    input: int
    """Bytes of its input."""
    selective_seconds: float | None = None
    """Of what of the forward selective recomputation repeats; None where it is not to be chosen."""
    selective_kept: int = 0
    """Bytes that are kept then, the input included."""
    live: int = 1
    """Most microbatches that are under way in it at a time."""
    place: int = 0
    """When it runs, among all blocks of a forward."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """The choices."""
        return ("none", "full") if self.selective_seconds is None else ("none", "selective", "full")

    def bytes(self, way: Way) -> int:
        """What all microbatches under way take."""
        one = {"none": self.kept, "selective": self.selective_kept, "full": self.input}
        return self.live * one[way]

    def time(self, way: Way) -> float:
        """What a backward takes longer."""
        return {"none": 0.0, "selective": self.selective_seconds or 0.0, "full": self.seconds}[way]


def combined(one: BlockCosts, other: BlockCosts, time: Callable[..., float]) -> BlockCosts:
    """The larger of the sizes of two, and as their times what ``time`` makes of both."""
    selective = (one.selective_seconds, other.selective_seconds)
    return BlockCosts(
        seconds=time(one.seconds, other.seconds),
        kept=max(one.kept, other.kept),
        input=max(one.input, other.input),
        selective_seconds=None if None in selective else time(*selective),
        selective_kept=max(one.selective_kept, other.selective_kept),
        live=max(one.live, other.live),
        place=min(one.place, other.place),
    )


def needed(blocks: Sequence[BlockCosts], ways: Sequence[Way], *, in_order: bool = False) -> int:
    """Bytes that the blocks take at most, if each is recomputed in its way.

    Args:
        blocks: of one rank.
        ways: of each.
        in_order: whether the blocks run one after the other as they are given, and backward before
            they run again.
    """
    if in_order:
        before = most = 0
        for block, way in zip(blocks, ways, strict=True):
            before += block.bytes(way)
            most = max(most, before + (block.kept if way != "none" else 0))
        return most
    held = sum(block.bytes(way) for block, way in zip(blocks, ways, strict=True))
    again = (block.kept for block, way in zip(blocks, ways, strict=True) if way != "none")
    return held + max(again, default=0)


def choose(
    blocks: Sequence[BlockCosts], limit: int, *, in_order: bool = False
) -> tuple[Way, ...] | None:
    """A way for each block, of all that fit the one that costs the least time.

    Args:
        blocks: of one rank.
        limit: bytes for their activations.
        in_order: see `needed`.

    Returns:
        None if they do not fit even if all are recomputed in full.
    """
    if in_order:
        return _choose_in_order(blocks, limit)
    everything: tuple[Way, ...] = tuple("full" for _ in blocks)
    nothing: tuple[Way, ...] = tuple("none" for _ in blocks)
    if needed(blocks, nothing) <= limit:
        return nothing
    if needed(blocks, everything) > limit:
        return None
    # What the largest recomputed block needs while its backward runs decides how much room there
    # is; so it is supposed in turn to be each of them, and larger ones are kept.
    best: tuple[float, tuple[Way, ...]] | None = None
    for transient in _steps([b.kept for b in blocks]):
        found = _choose(blocks, limit - transient, transient)
        if found is not None and (best is None or found < best):
            best = found
    return everything if best is None else best[1]


def _steps(sizes: Sequence[int]) -> list[int]:
    """Sizes from the largest down, of those within a hundredth of each other the largest."""
    found: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not found or size < 0.99 * found[-1]:
            found.append(size)
    return found


def _choose(
    blocks: Sequence[BlockCosts], limit: int, largest: int
) -> tuple[float, tuple[Way, ...]] | None:
    """Seconds and ways, where none is recomputed that keeps more than ``largest``."""
    ways: list[tuple[Way, ...]] = [b.ways if b.kept <= largest else ("none",) for b in blocks]
    least = [min(b.bytes(way) for way in allowed) for b, allowed in zip(blocks, ways, strict=True)]
    room = limit - sum(least)
    if room < 0:
        return None
    unit = max(1, room // _PARTS)
    # Of every number of bytes the least time, and the ways that lead there, the last one outside.
    choices: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    for block, allowed, base in zip(blocks, ways, least, strict=True):
        taken = []
        for way in allowed:
            weight, time = -(-(block.bytes(way) - base) // unit), block.time(way)
            taken += [(w + weight, t + time, (way, path)) for w, t, path in choices]
        choices = _undominated([t for t in taken if t[0] * unit <= room])
    _, seconds, path = choices[-1]
    return seconds, _ways(path)


def _choose_in_order(blocks: Sequence[BlockCosts], limit: int) -> tuple[Way, ...] | None:
    least = [min(block.bytes(way) for way in block.ways) for block in blocks]
    unit = max(1, (limit - sum(least)) // _PARTS)
    choices: list[tuple[int, float, Any]] = [(0, 0.0, None)]
    before = 0
    for block, base in zip(blocks, least, strict=True):
        before += base
        taken = []
        for way in block.ways:
            weight, time = -(-(block.bytes(way) - base) // unit), block.time(way)
            room = limit - before - (block.kept if way != "none" else 0)
            taken += [
                (w + weight, t + time, (way, path))
                for w, t, path in choices
                if (w + weight) * unit <= room
            ]
        choices = _undominated(taken)
    return _ways(choices[-1][2]) if choices else None


def _ways(path: Any) -> tuple[Way, ...]:
    chosen: list[Way] = []
    while path is not None:
        way, path = path
        chosen.append(way)
    return tuple(reversed(chosen))


def _undominated(choices: list[tuple[int, float, Any]]) -> list[tuple[int, float, Any]]:
    """Those that no other beats, by rising bytes and falling time."""
    found: list[tuple[int, float, Any]] = []
    for choice in sorted(choices, key=lambda c: c[:2]):
        if not found or choice[1] < found[-1][1]:
            found.append(choice)
    return found
