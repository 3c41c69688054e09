"""Tensors of a whole sequence, and the same for some of its positions.

A module may work on a part of a sequence if it makes no difference to a position which others are
there: ``f(x[:, i]) == f(x)[:, i]`` for any positions ``i`` in any order. `Parts` holds such an
``i`` and compares what two runs have computed, one with the whole sequence and one with the part.
Which dim of a tensor is the sequence follows from the two sizes, also where a reshape has joined it
with dims before and behind it.

The positions are shuffled, so that they neither begin where the sequence begins nor are neighbours,
and fewer than the whole, so that what depends on the length is seen.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SIZES = ((24, 16), (40, 24), (56, 40), (72, 56), (88, 72), (104, 88))
"""Positions of the whole and of the part; multiples of 8, as modules may ask for."""
_TOLERANCE = 1e-4
"""Rounding of a position, relative to the largest value, may depend on what else is computed."""


@dataclass(frozen=True)
class Place:
    """Where a tensor has the sequence."""

    dim: int
    """Its dim."""
    before: int = 1
    """Product of the sizes that a reshape has joined with it, in front."""
    behind: int = 1
    """The same, behind."""


class Parts:
    """Positions of a sequence, and a choice of them.

    Args:
        sizes: sizes that occur in the network, which a sequence had better not have.

    Attributes:
        whole: positions of the sequence.
        part: number of the chosen ones.
        tolerance: difference that counts as none, relative to the largest value.
    """

    def __init__(self, sizes: Iterable[int] = ()) -> None:
        taken = set(sizes)
        free = (pair for pair in _SIZES if not taken & set(pair))
        self.whole, self.part = next(free, _SIZES[0])
        self.index = torch.tensor([(7 * i + 5) % self.whole for i in range(self.part)])
        self.tolerance = _TOLERANCE

    def resized(self, x: Tensor, dim: int) -> Tensor:
        """Return ``x`` with as many positions as the whole has, repeating them if need be."""
        if x.shape[dim] == self.whole:
            return x
        return x.index_select(dim, torch.arange(self.whole, device=x.device) % x.shape[dim])

    def select(self, x: Tensor, place: Place | None) -> Tensor:
        """Return the chosen positions of a tensor; all of it where it has no sequence."""
        if place is None:
            return x
        before, behind = x.shape[: place.dim], x.shape[place.dim + 1 :]
        split = x.reshape(*before, place.before, self.whole, place.behind, *behind)
        chosen = split.index_select(place.dim + 1, self.index.to(x.device))
        return chosen.flatten(place.dim, place.dim + 2)

    def relation(self, whole: Any, part: Any) -> tuple[bool, Place | None]:
        """Whether ``part`` is what the chosen positions of ``whole`` are, and where these lie."""
        if not isinstance(whole, Tensor) or not isinstance(part, Tensor):
            same = type(whole) is type(part)
            numbers = isinstance(whole, int | float) and same
            return same and (not numbers or whole == part), None
        if whole.shape == part.shape:
            return self._is_close(whole, part), None
        for place in self._places(whole, part):
            if self._is_close(self.select(whole, place), part):
                return True, place
        return False, None

    def like(self, place: Place | None, given: Tensor, x: Tensor) -> Place | None:
        """Where ``x`` has the sequence, if it comes of ``given``, which has it at ``place``."""
        if place is None:
            return None
        size = given.shape[place.dim]
        if place.dim < x.dim() and x.shape[place.dim] == size:
            return place
        dims = [d for d in range(x.dim()) if x.shape[d] == self.whole]
        return Place(dims[0]) if dims else None

    def _places(self, whole: Tensor, part: Tensor) -> list[Place]:
        """Places at which the sizes of both tell a sequence."""
        if whole.dim() != part.dim():
            return []
        dims = [d for d in range(whole.dim()) if whole.shape[d] != part.shape[d]]
        if len(dims) != 1:
            return []
        [dim] = dims
        joined, rest = divmod(whole.shape[dim], self.whole)
        if rest or joined * self.part != part.shape[dim]:
            return []
        factors = [f for f in range(1, joined + 1) if joined % f == 0]
        return [Place(dim, before, joined // before) for before in reversed(factors)]

    def _is_close(self, a: Tensor, b: Tensor) -> bool:
        if a.dtype != b.dtype:
            return False
        if not (a.is_floating_point() or a.is_complex()):
            return bool(torch.equal(a, b))
        if not a.numel():
            return True
        a, b = a.detach(), b.detach()
        if not a.is_complex():
            a, b = a.double(), b.double()
        scale = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max())
        allowed = self.tolerance * scale if math.isfinite(scale) else 0.0
        return bool(torch.allclose(a, b, rtol=0.0, atol=allowed, equal_nan=True))
