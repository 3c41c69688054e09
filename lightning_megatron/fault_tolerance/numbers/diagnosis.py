"""Faults in the numbers of a step, with the ranks and parameters that they come from.

The losses of all ranks are known, so the ranks of a loss that is not finite are, too. Gradients are
checked after their reduction, by which a value that is not finite has spread over the data-parallel
ranks. So only its parameter, stage and tp rank are known.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from torch import Tensor

from lightning_megatron.topology.coordinates import coordinates_of
from lightning_megatron.topology.degrees import Degrees


@dataclass(frozen=True, kw_only=True)
class BadNumber:
    """Fault in the numbers of a step; the same on every rank."""

    what: Literal["loss", "gradients", "spike"]
    value: float
    """Value of the loss or of the norm of the gradients."""
    ranks: tuple[int, ...]
    """Ranks on which it was found."""
    detail: str
    """Description for people."""

    def is_same_as(self, other: "BadNumber") -> bool:
        """Whether another run of the batch gave the same fault."""
        equal = self.value == other.value or (math.isnan(self.value) and math.isnan(other.value))
        return equal and (self.what, self.ranks) == (other.what, other.ranks)


@dataclass
class Window:
    """Batches whose gradients are accumulated for one update."""

    batches: list[int] = field(default_factory=list)
    losses: list[tuple[float, ...]] = field(default_factory=list)
    """Losses of each batch, by rank."""

    def means(self) -> list[float]:
        """Mean loss of each rank."""
        return [fmean(of_rank) for of_rank in zip(*self.losses, strict=True)]


def bad_loss(window: Window, degrees: Degrees) -> BadNumber | None:
    """Find a loss that is not finite."""
    ranks = tuple(rank for rank, loss in enumerate(window.means()) if not math.isfinite(loss))
    if not ranks:
        return None
    batch, value = next(
        (batch, losses[rank])
        for batch, losses in zip(window.batches, window.losses, strict=True)
        for rank in ranks
        if not math.isfinite(losses[rank])
    )
    where = f" on {in_words(ranks)}"
    readers = {_reader(rank, degrees) for rank in ranks}
    if len(ranks) == degrees.world_size:
        where = " on every rank" if len(ranks) > 1 else ""
    elif len(readers) < len(ranks):
        where += f", which read the data of {in_words(readers, 'data-parallel rank')}"
    detail = f"the loss of batch {batch} is {value}{where}"
    return BadNumber(what="loss", value=value, ranks=ranks, detail=detail)


def spike(window: Window, mean: float, limit: float) -> BadNumber:
    """Describe a mean loss above the limit."""
    ranks = tuple(rank for rank, loss in enumerate(window.means()) if loss > limit)
    where = f", most on {in_words(ranks)}" if 0 < len(ranks) < len(window.losses[0]) else ""
    detail = (
        f"the loss of batch {window.batches[-1]} is {mean:.6g}{where}, above the limit of "
        f"{limit:.6g} by the last losses"
    )
    return BadNumber(what="spike", value=mean, ranks=ranks, detail=detail)


def not_finite(gradients: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Names of the gradients that are not finite, in the order given."""
    return [name for name, gradient in gradients if not bool(gradient.isfinite().all())]


def bad_gradients(norm: float, found: Sequence[Sequence[str]]) -> BadNumber:
    """Describe gradients that are not finite.

    Args:
        norm: norm of all gradients.
        found: names of `not_finite` by rank, in the order of the network.
    """
    ranks = tuple(rank for rank, names in enumerate(found) if names)
    names = list(dict.fromkeys(name for names in found for name in names))
    detail = f"the norm of the gradients is {norm}"
    if names:
        # A backward carries it from the loss towards the input.
        detail += f"; those of {len(names)} parameters are not finite, {names[-1]} nearest the loss"
        detail += f", on {in_words(ranks)}" if len(ranks) < len(found) else ""
    return BadNumber(what="gradients", value=norm, ranks=ranks, detail=detail)


def in_words(ranks: Collection[int], word: str = "rank") -> str:
    """Text of some ranks.

    >>> in_words([1]), in_words([2, 0])
    ('rank 1', 'ranks 0, 2')
    """
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{word}{'s' if len(ranks) > 1 else ''} {shown}"


def _reader(rank: int, degrees: Degrees) -> int:
    """Data-parallel rank of a global rank."""
    position = coordinates_of(rank, degrees)
    return position["dp_replicate"] * degrees.dp_shard + position["dp_shard"]
