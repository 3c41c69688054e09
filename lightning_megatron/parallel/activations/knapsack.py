"""How to recompute which block, so that all fit into memory at the least loss of time.

Nothing but arithmetic. From its forward to its backward a block costs the bytes that autograd keeps
of it; or, recomputed selectively, those of its input and of the results it keeps, and the time of
the rest of its forward; or, recomputed in full, those of its input, and the time of its forward.
While the backward of a recomputed block runs, its activations exist besides; those of the blocks
behind it are gone by then, so that the last blocks are the best to keep. Of all this there is as
much as the schedule has microbatches under way (`schedules.live_activations`): so many of which a
stage holds all, one in whose backward it is somewhere, and, where a backward has two halves, some
between them, of which everything exists, however they were recomputed.

With ``b`` for what a block holds of a microbatch, ``S`` for the sum over the blocks of a stage and
``n`` for the microbatches that wait or run, a stage takes ``n S + D`` while a backward runs on it:
``D`` is the most by which what is computed again in a block exceeds what is gone behind it,
``max(again_i - sum_{j > i} b_j)``. Other stages of the rank take ``n S``.

To choose among the ways for each block is a knapsack problem (of several choices: one thing of each
kind is taken). It is solved by the list of all choices so far, from the last block to the first,
that no other beats in time, in what the rank holds (``n S + D``) and in what later blocks can still
make it hold (``(n - 1) S``); where a rank has several stages, their lists are combined. Blocks of a
network are nearly alike, so lists stay short; where they would not, choices count as the same whose
bytes differ by less than a small part of the room.

That is exact if there is one stage whose backwards are in one piece. Else several moments count;
each stage is then taken to hold the most it ever does, less what any choice holds too much by that,
and the limit is raised by what is found to be left, as long as it really is kept to.

>>> blocks = [BlockCosts(seconds=1.0, kept=10, input=1), BlockCosts(seconds=3.0, kept=10, input=1)]
>>> choose([*blocks, *blocks], limit=22)
('full', 'none', 'full', 'none')
>>> choose(blocks, limit=11)
('full', 'none')
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from lightning_megatron.schedules.live_activations import ALONE, LiveCount

_PARTS = 40_000
"""Resolution: the room, divided by this and the number of blocks, is the least that counts."""
_PAIRS = 20_000
"""Choices of two stages that are combined at most."""
_RAISES = 4
"""Times that the limit of a count that is not exact is raised."""
_WORTH = 200
"""Part of the limit that is worth to be used."""
RecomputeMode = Literal["none", "selective", "full"]
"""RecomputeMode in which a block is recomputed."""


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """Measured costs of a block."""

    seconds: float
    """Seconds of its forward."""
    kept: int
    """Bytes that autograd keeps of one microbatch, its input included."""
    input: int
    """Bytes of its input."""
    selective_seconds: float | None = None
    """Seconds of forward that selective recomputation repeats; None where it may not be chosen."""
    selective_kept: int = 0
    """Bytes that are kept then, the input included."""
    stage: int = 0
    """Pipeline stage of the block."""
    place: int = 0
    """Position among all blocks of a forward."""

    @property
    def ways(self) -> tuple[RecomputeMode, ...]:
        """The choices."""
        if self.selective_seconds is None or self.selective_kept >= self.kept:
            return ("none", "full")
        return ("none", "selective", "full")

    def bytes(self, way: RecomputeMode) -> int:
        """Bytes that a microbatch holds until its backward."""
        return {"none": self.kept, "selective": self.selective_kept, "full": self.input}[way]

    def again(self, way: RecomputeMode) -> int:
        """Bytes on top of that while the backward runs.

        The input is there already, and counts for what a block makes on the way and does not keep.
        """
        return 0 if way == "none" else self.kept

    def time(self, way: RecomputeMode) -> float:
        """Seconds by which the backward becomes longer."""
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
        stage=one.stage,
        place=min(one.place, other.place),
    )


def needed(
    blocks: Sequence[BlockCosts],
    ways: Sequence[RecomputeMode],
    moments: Sequence[LiveCount] = ALONE,
) -> int:
    """Bytes that the blocks take at most, if each is recomputed in its way.

    Args:
        blocks: of one rank, in the order in which they run.
        ways: of each.
        moments: when the rank may hold the most.
    """
    waiting, running = dict.fromkeys(moments[0].waiting, 0), dict.fromkeys(moments[0].waiting, 0)
    spent = _spent(blocks, moments)
    for block, way in zip(blocks, ways, strict=True):
        waiting[block.stage] += block.bytes(way)
        most = waiting[block.stage] + block.again(way)
        running[block.stage] = max(running[block.stage], most)
    return max(
        sum(moment.waiting[s] * waiting[s] + moment.spent[s] * spent[s] for s in waiting)
        + (0 if moment.running is None else running[moment.running])
        for moment in moments
    )


def choose(
    blocks: Sequence[BlockCosts], limit: int, moments: Sequence[LiveCount] = ALONE
) -> tuple[RecomputeMode, ...] | None:
    """A way for each block, of all that fit the one that costs the least time.

    Args:
        blocks: of one rank, in the order in which they run.
        limit: bytes for their activations.
        moments: see `needed`.

    Returns:
        None if they do not fit even if all are recomputed in full.
    """
    everything: tuple[RecomputeMode, ...] = tuple("full" for _ in blocks)
    nothing: tuple[RecomputeMode, ...] = tuple("none" for _ in blocks)
    if needed(blocks, nothing, moments) <= limit:
        return nothing
    found = _choose(blocks, limit, moments)
    if found is None:
        return everything if needed(blocks, everything, moments) <= limit else None
    if _is_exact(moments):
        return found
    raised, step = limit, limit - needed(blocks, found, moments)
    for _ in range(_RAISES):
        if step * _WORTH < limit:
            break
        more = _choose(blocks, raised + step, moments)
        if more is not None and needed(blocks, more, moments) <= limit:
            found, raised = more, raised + step
        else:
            step //= 2
    return found


def _choose(
    blocks: Sequence[BlockCosts], limit: int, moments: Sequence[LiveCount]
) -> tuple[RecomputeMode, ...] | None:
    stages = sorted({block.stage for block in blocks})
    own = {s: [i for i, block in enumerate(blocks) if block.stage == s] for s in stages}
    most = {s: max(moment.held(s) for moment in moments) for s in stages}
    least = {s: sum(blocks[i].input for i in own[s]) for s in stages}
    extra = _extra(moments, most, least, _spent(blocks, moments))
    # Where no backward in one piece runs, or on a stage without blocks; else below all others.
    elsewhere = [size for stage, size in extra.items() if stage not in own]
    floor = max(elsewhere, default=min(extra.values()))
    room = limit - floor - sum(most[s] * least[s] for s in stages)
    unit = max(1, room * len(blocks) // _PARTS)
    found: list[_Choice] = [(0, floor, 0.0, ())]
    for s in stages:
        # What the blocks of other stages take in any case.
        others = sum(most[o] * least[o] for o in stages if o != s)
        one = _Stage([blocks[i] for i in own[s]], most[s], extra.get(s), floor, limit - others)
        found = _pairs(found, one.choices(unit, alone=_is_exact(moments)), limit, unit)
    if not found:
        return None
    ways: dict[int, RecomputeMode] = {}
    for s, path in zip(stages, min(found, key=itemgetter(2))[3], strict=True):
        for i in own[s]:
            ways[i], path = path
    return tuple(ways[i] for i in range(len(blocks)))


def _is_exact(moments: Sequence[LiveCount]) -> bool:
    """Whether there is one stage, whose backwards are all in one piece."""
    return all(len(m.waiting) == 1 and m.running is not None for m in moments)


def _spent(blocks: Sequence[BlockCosts], moments: Sequence[LiveCount]) -> dict[int, int]:
    """Bytes of a microbatch between the halves of its backward, by stage."""
    found = dict.fromkeys(moments[0].waiting, 0)
    for block in blocks:
        found[block.stage] += block.kept
    return found


def _extra(
    moments: Sequence[LiveCount],
    most: dict[int, int],
    least: dict[int, int],
    spent: dict[int, int],
) -> dict[int | None, int]:
    """Bytes that a rank holds beyond ``most``, by the stage whose backward runs.

    Less than nothing, where it holds less than the most of a stage: at least ``least`` of each
    microbatch that it does not hold.
    """
    found: dict[int | None, int] = {}
    for moment in moments:
        held = sum(moment.spent[s] * spent[s] for s in moment.spent)
        held -= sum((most[s] - moment.held(s)) * least[s] for s in most)
        found[moment.running] = max(held, found.get(moment.running, held))
    return found


_Choice = tuple[int, int, float, Any]
"""Bytes, those on top while a backward runs, seconds, and the ways that lead there."""


@dataclass(frozen=True)
class _Stage:
    """The blocks of one stage."""

    blocks: Sequence[BlockCosts]
    """Blocks, in the order of the forward."""
    count: int
    """Microbatches of which it holds something."""
    extra: int | None
    """Bytes held besides while a backward runs here; None if no backward runs in one piece."""
    floor: int
    """Bytes held besides in any case."""
    limit: int
    """Bytes for it and for what the rank holds besides."""

    def choices(self, unit: int, *, alone: bool) -> list[_Choice]:
        """Choices for all blocks that no other choice beats, by time."""
        found: list[_Choice] = [(0, 0, 0.0, None)]
        rest = sum(block.input for block in self.blocks)
        for block in reversed(self.blocks):
            rest -= block.input
            taken = []
            for way in block.ways:
                size, again, time = block.bytes(way), block.again(way), block.time(way)
                if self.extra is None:
                    again = 0
                for behind, top, seconds, path in found:
                    more = again - behind if again - behind > top else top
                    if self.count * (behind + size + rest) + self._top(more) <= self.limit:
                        taken.append((behind + size, more, seconds + time, (way, path)))
            # What later blocks add on top shrinks with what is behind them.
            held = self.count - 1 if alone else self.count
            keys = [(held * c[0] // unit, c[2], (self.count * c[0] + c[1]) // unit) for c in taken]
            found = _undominated(taken, keys)
        return [(self.count * size, self._top(top), t, path) for size, top, t, path in found]

    def _top(self, top: int) -> int:
        return self.floor if self.extra is None else max(self.floor, top + self.extra)


def _pairs(before: list[_Choice], here: list[_Choice], limit: int, unit: int) -> list[_Choice]:
    """The choices of some stages, combined with those of one more."""
    if len(before) * len(here) > _PAIRS:
        step = -(-len(before) * len(here) // _PAIRS)
        longer = before if len(before) > len(here) else here
        longer[:] = sorted(longer, key=itemgetter(0))[::step]
    taken = [
        (size + more, max(top, other), seconds + time, (*paths, path))
        for size, top, seconds, paths in before
        for more, other, time, path in here
        if size + more + max(top, other) <= limit
    ]
    return _undominated(taken, [(c[0] // unit, c[2], (c[0] + c[1]) // unit) for c in taken])


def _undominated(
    choices: Sequence[_Choice], keys: Sequence[tuple[int, float, int]]
) -> list[_Choice]:
    """Choices that no other beats in all its keys."""
    found: list[_Choice] = []
    sizes: list[int] = []  # rising, of the choices so far that are the best for their last key,
    times: list[float] = []  # falling
    for place in sorted(range(len(choices)), key=keys.__getitem__):
        _, time, size = keys[place]
        at = bisect_right(sizes, size)
        if at and times[at - 1] <= time:
            continue
        start = bisect_left(sizes, size)
        end = start
        while end < len(times) and times[end] >= time:
            end += 1
        sizes[start:end], times[start:end] = [size], [time]
        found.append(choices[place])
    return found
