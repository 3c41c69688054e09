"""Samples of several sources in one order without an end, by arithmetic.

`Blend.at` says for each position of the order which source it is of and how many samples of that
source come before. Nothing is kept but one number per source and stage, and nothing is written to
disk: a run goes on anywhere in the order by knowing the position, whatever its layout.

Proportions. The order is made of blocks of ``2**20`` positions, and each source has the same number
of positions in every block: its share, rounded. Within a block the positions of a source are spread
evenly (van der Corput's sequence: the ``j``-th position of the block belongs to whose range the
number with the bits of ``j`` reversed is in), so that any part of it has nearly as many samples
of each source as its weight says, not only on average. Sixty-four neighbours at a time are
shuffled, as a regular order would give the same sources to the same ranks again and again. The
arrays of one block, 6 MB, are kept while it is read.

Weights may change at a position: every source goes on with its next sample.

`permuted` is the order of the samples within a source: for each epoch a permutation that is
computed, for each number by itself, from a key. Four rounds of adding, multiplying and folding are
each a bijection of the numbers of ``k`` bits; a number that lands outside the samples is sent
through again until it does not ("cycle walking"; Black and Rogaway, 2002).
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BLOCK_BITS = 20
BLOCK = 1 << _BLOCK_BITS
"""Number of positions of which each source has its share."""
_SHUFFLED_BITS = 6
_ROUNDS = 4
_FEWEST_BITS = 6
"""Of a permutation: so few numbers as 0, 1, 2 would be mixed badly by themselves."""

Numbers = NDArray[np.int64]


class Blend:
    """Order of the samples of several sources, by weights that may change.

    Args:
        weights: weight of each source from each of these positions on; the first is 0.
        seed: seed of the order.

    Example:
        >>> blend = Blend({0: [3, 1], 8: [0, 1]}, seed=1)
        >>> sources, numbers = blend.at(range(12))
        >>> sources.tolist()
        [0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
        >>> numbers.tolist()
        [0, 0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7]
    """

    def __init__(self, weights: Mapping[int, Sequence[float]], seed: int = 0) -> None:
        self.sources = len(next(iter(weights.values())))
        self._starts = np.array(sorted(weights), dtype=np.int64)
        self._quotas = [quotas(weights[start]) for start in self._starts.tolist()]
        self._seed = seed
        self._known: tuple[tuple[int, int] | None, Any] = None, None
        self._before = [np.zeros(self.sources, dtype=np.int64)]
        for stage, length in enumerate(np.diff(self._starts).tolist()):
            self._before.append(self._before[stage] + self._taken(stage, length))

    def at(self, positions: ArrayLike) -> tuple[Numbers, Numbers]:
        """Source of each position, and the number of samples of it that come before."""
        places = np.asarray(positions, dtype=np.int64)
        sources, numbers = np.empty_like(places), np.empty_like(places)
        stages = np.searchsorted(self._starts, places, side="right") - 1
        offsets = places - self._starts[stages]
        blocks = offsets >> _BLOCK_BITS
        for stage, block in sorted({*zip(stages.tolist(), blocks.tolist(), strict=True)}):
            these = (stages == stage) & (blocks == block)
            source_of, number_of = self._block(stage, block)
            within = offsets[these] & (BLOCK - 1)
            found = source_of[within].astype(np.int64)
            sources[these] = found
            before = self._before[stage] + block * self._quotas[stage]
            numbers[these] = number_of[within] + before[found]
        return sources, numbers

    def taken(self, position: int) -> Numbers:
        """Number of samples of each source before a position."""
        stage = max(int(np.searchsorted(self._starts, position, side="right")) - 1, 0)
        length = position - int(self._starts[stage])
        result: Numbers = self._before[stage] + self._taken(stage, length)
        return result

    def _taken(self, stage: int, length: int) -> Numbers:
        block, within = divmod(length, BLOCK)
        counts: Numbers = block * self._quotas[stage]
        if within:
            first = self._block(stage, block)[0][:within]
            counts = counts + np.bincount(first, minlength=self.sources)
        return counts

    def _block(self, stage: int, block: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Source of each position of a block, and how many of the same come before in it."""
        if self._known[0] != (stage, block):
            self._known = (stage, block), self._make_block(stage, block)
        known: tuple[NDArray[Any], NDArray[Any]] = self._known[1]
        return known

    def _make_block(self, stage: int, block: int) -> tuple[NDArray[Any], NDArray[Any]]:
        kind = np.uint16 if self.sources <= 1 << 16 else np.uint32
        used = self._quotas[stage]
        if np.count_nonzero(used) == 1:
            alone = np.full(BLOCK, np.flatnonzero(used)[0], dtype=kind)
            return alone, np.arange(BLOCK, dtype=np.int32)
        key = key_of(self._seed, "blend", stage, block)
        groups = np.arange(BLOCK >> _SHUFFLED_BITS, dtype=np.uint64)
        keys = np.repeat(_mixed(groups, key, 64), 1 << _SHUFFLED_BITS)
        place = np.arange(BLOCK, dtype=np.uint64)
        place += _mixed(place, keys, _SHUFFLED_BITS) - (
            place & np.uint64((1 << _SHUFFLED_BITS) - 1)
        )
        slot = _reversed(place.astype(np.int32)) ^ (key & (BLOCK - 1))
        source_of = np.repeat(np.arange(self.sources, dtype=kind), used)[slot]
        order = np.argsort(source_of, kind="stable")
        number_of = np.empty(BLOCK, dtype=np.int32)
        first = np.cumsum(used) - used
        number_of[order] = np.arange(BLOCK) - np.repeat(first, used)
        return source_of, number_of


def quotas(weights: Sequence[float]) -> Numbers:
    """Number of positions of each source in a block, by largest remainders.

    >>> quotas([2, 1, 0]).tolist()
    [699051, 349525, 0]
    """
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights) * BLOCK
    counts = np.floor(shares).astype(np.int64)
    left = BLOCK - int(counts.sum())
    counts[np.argsort(counts - shares, kind="stable")[:left]] += 1
    quota: Numbers = counts
    return quota


def permuted(numbers: ArrayLike, sizes: ArrayLike, keys: Any) -> Numbers:
    """Places of some numbers in permutations of ``range(size)``.

    Args:
        numbers: whole numbers in [0, size).
        sizes: size of the permutation, or one for each number.
        keys: key of the permutation, or one for each number.
    """
    places = np.asarray(numbers).astype(np.uint64)
    limits = np.broadcast_to(np.asarray(sizes, dtype=np.uint64), places.shape)
    keys = np.broadcast_to(np.asarray(keys, dtype=np.uint64), places.shape)
    lengths = np.frexp(limits.astype(np.float64) - 1)[1]  # in bits
    bits = np.maximum(lengths, _FEWEST_BITS).astype(np.uint64)
    outside = np.arange(len(places))
    while len(outside):
        places[outside] = _mixed(places[outside], keys[outside], bits[outside])
        outside = outside[places[outside] >= limits[outside]]
    return places.astype(np.int64)


def key_of(*parts: object) -> int:
    """Key of 64 bits from anything that has a ``repr``."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")


def _mixed(numbers: NDArray[np.uint64], keys: Any, bits: Any) -> NDArray[np.uint64]:
    """Bijection of the numbers of so many bits, by a key; both may differ between numbers."""
    width = np.asarray(bits, dtype=np.uint64)
    mask = np.uint64(2**64 - 1) >> (np.uint64(64) - width)
    fold = (width + np.uint64(1)) // np.uint64(2)
    keys = np.asarray(keys, dtype=np.uint64)
    places = numbers
    with np.errstate(over="ignore"):
        for _ in range(_ROUNDS):
            # Constants of splitmix64, whose finalizer this is, cut to the bits at hand.
            keys = keys * np.uint64(0xD1342543DE82EF95) + np.uint64(0x9E3779B97F4A7C15)
            places = (places + (keys >> np.uint64(20))) & mask
            places = (places * ((keys >> np.uint64(3)) | np.uint64(1))) & mask
            places = places ^ (places >> fold)
    return places


def _reversed(numbers: NDArray[np.int32]) -> NDArray[np.int32]:
    """Numbers below `BLOCK` with their bits in the opposite order."""
    half = _BLOCK_BITS // 2
    short = np.arange(1 << half, dtype=np.int32)
    bits = (short >> np.arange(half, dtype=np.int32)[:, None]) & 1
    reverse = (bits << np.arange(half, dtype=np.int32)[::-1, None]).sum(0, dtype=np.int32)
    result: NDArray[np.int32] = reverse[numbers & (len(short) - 1)] << half
    result |= reverse[numbers >> half]
    return result
