"""Order of the rows of several sources, which a checkpoint brings back under any layout.

The order has no end (`data.tokens.blend`); an epoch is a part of it as long as all sources
together. What a run has read is therefore one number, ``epoch * samples + consumed``, and that does
not depend on ranks, workers or batches. Weights may change within a run, at a number of samples, or
between two runs: what was read before stays what it was, and each source goes on with its next row.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_megatron.data.reading.sampler import Division, ResumableSampler
from lightning_megatron.data.tokens.blend import Blend, Numbers, key_of, permuted

_READ_AHEAD = 16384
"""Number of rows whose order is computed at a time."""


class BlendOrder:
    """Which row of which source is read at each position.

    Args:
        sizes: number of rows of each source, by its name.
        stages: weights of the sources from these positions on; the first is 0. A source without a
            weight has none.
        seed: seed of the order.
    """

    def __init__(
        self, sizes: Mapping[str, int], stages: Mapping[int, Mapping[str, float]], seed: int
    ) -> None:
        self.sizes = dict(sizes)
        self.stages = {at: dict(weights) for at, weights in sorted(stages.items())}
        self.seed = seed
        self.samples = sum(sizes.values())
        """Number of positions in an epoch."""
        self.shift = 0
        """Positions that epochs begin behind the sum of those before them: they had other sizes."""
        self._saved: Mapping[str, Any] | None = None
        self._blend = self._make_blend()

    def rows(self, positions: Any) -> Numbers:
        """Number of the row at each position, counted through all sources in their order."""
        places, numbers = self._blend.at(positions)
        sizes = self._sizes[places]
        epochs, within = np.divmod(numbers, sizes)
        passes, which = np.unique(np.stack([places, epochs]), axis=1, return_inverse=True)
        keys = [key_of(self.seed, self._names[i], epoch) for i, epoch in passes.T.tolist()]
        found = permuted(within, sizes, np.array(keys, dtype=np.uint64)[which.reshape(-1)])
        rows: Numbers = found + self._offsets[places]
        return rows

    def epochs(self, position: int) -> dict[str, float]:
        """How often each source has been read before a position."""
        taken = dict(zip(self._names, self._blend.taken(position).tolist(), strict=True))
        return {name: taken[name] / max(size, 1) for name, size in self.sizes.items()}

    def state_dict(self) -> dict[str, Any]:
        """Weights of the whole run, and what the order depends on besides."""
        if self._saved is not None:  # nothing was read since: what came before is not joined yet
            return dict(self._saved)
        stages = [[at, dict(weights)] for at, weights in self.stages.items()]
        sizes = dict(self.sizes)
        return {"seed": self.seed, "sizes": sizes, "stages": stages, "shift": self.shift}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the order of a run up to the position at which it is gone on with."""
        self._saved = state

    def go_on(self, position: int, epoch: int = 0) -> None:
        """Join the order of the run before this position to the weights of this one after it.

        Args:
            position: as if all epochs so far had the size that they have now.
            epoch: the present one.
        """
        saved, self._saved = self._saved, None
        if saved is None:
            return
        self.seed = saved["seed"]
        self.shift = saved.get("shift", 0)
        self.shift += epoch * (sum(saved["sizes"].values()) - self.samples)
        position += self.shift
        before = {int(at): dict(weights) for at, weights in saved["stages"]}
        for name, size in saved["sizes"].items():
            used = any(weights.get(name) for weights in before.values())
            if used and self.sizes.get(name, size) != size:
                rank_zero_warn(
                    f"{name}: {size:,} rows when the checkpoint was saved, {self.sizes[name]:,} "
                    "now: those that were read cannot be told from the others; the same tokens, "
                    "seq_len and pack go on exactly"
                )
            elif used and name not in self.sizes:
                rank_zero_warn(
                    f"{name}: it was trained on when the checkpoint was saved, and is no source of "
                    "this run. If it is there under another name, it is read from its beginning"
                )
        now = _at(self.stages, position)
        stages = {at: weights for at, weights in before.items() if at < position}
        if not stages or not _same(stages[max(stages)], now):
            stages[position] = now
        stages |= {at: weights for at, weights in self.stages.items() if at > position}
        self.stages = stages
        self._blend = self._make_blend()

    def _make_blend(self) -> Blend:
        # Sorted, and all that ever had a weight: neither the order in which sources are named nor
        # new ones change what the others are read.
        self._names = sorted({*self.sizes, *(n for stage in self.stages.values() for n in stage)})
        first = dict(zip(self.sizes, np.cumsum([0, *self.sizes.values()]).tolist(), strict=False))
        self._offsets = np.array([first.get(name, 0) for name in self._names], dtype=np.int64)
        self._sizes = np.array([self.sizes.get(name, 0) for name in self._names], dtype=np.int64)
        return Blend(
            {at: [weights.get(n, 0.0) for n in self._names] for at, weights in self.stages.items()},
            self.seed,
        )


class BlendSampler(ResumableSampler):
    """Sampler of the rows of several sources, from any position and in the same order everywhere.

    Args:
        blend: the order.

    Example:
        >>> order = BlendOrder({"a": 4, "b": 2}, {0: {"a": 1.0, "b": 1.0}}, seed=0)
        >>> sorted(BlendSampler(order))
        [1, 2, 3, 4, 5, 5]
    """

    def __init__(self, blend: BlendOrder) -> None:
        super().__init__(blend.samples, seed=blend.seed)
        self.blend = blend

    def divided(self, division: Division) -> "BlendSampler":
        """Return a sampler of one rank's share of the same order."""
        part = BlendSampler(self.blend)
        part.seek(self._epoch, self._start)
        part._division = division
        return part

    def order(self) -> Any:
        """Return the rows of the current epoch, of all ranks; computed as they are asked for."""
        first = self._epoch * self._samples
        self.blend.go_on(first + self._position, self._epoch)
        first += self.blend.shift
        return _Part(self.blend, range(first, first + self._samples))

    def _indices(self, mine: Any) -> Iterator[int]:
        for first in range(0, len(mine), _READ_AHEAD):
            for index in list(mine[first : first + _READ_AHEAD]):
                self._position += self._division.ranks
                yield index


class _Part(Sequence[int]):
    """Rows at some positions."""

    def __init__(self, blend: BlendOrder, positions: range) -> None:
        self._blend = blend
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> "_Part": ...

    def __getitem__(self, index: int | slice) -> "int | _Part":
        if isinstance(index, slice):
            return _Part(self._blend, self._positions[index])
        return int(self._blend.rows([self._positions[index]])[0])

    def __iter__(self) -> Iterator[int]:
        for first in range(0, len(self), _READ_AHEAD):
            yield from self._blend.rows(self._positions[first : first + _READ_AHEAD]).tolist()

    def tolist(self) -> list[int]:
        """Return all rows."""
        return list(self)


def _at(stages: Mapping[int, Mapping[str, float]], position: int) -> dict[str, float]:
    """Weights at a position."""
    return dict(stages[max(at for at in stages if at <= position)])


def _same(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether weights mean the same: they are shares of their sum."""
    names = sorted({*one, *other})
    mine, theirs = ([w.get(n, 0.0) for n in names] for w in (one, other))
    return bool(np.allclose(np.divide(mine, sum(mine)), np.divide(theirs, sum(theirs)), rtol=1e-12))
