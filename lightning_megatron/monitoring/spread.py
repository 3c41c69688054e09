"""A few numbers of every rank, brought together: one small collective a window."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist


class Spread(NamedTuple):
    """A number over all ranks."""

    lowest: float
    mean: float
    highest: float
    highest_rank: int
    """The first rank that has the highest."""
    values: tuple[float, ...]
    """Of the ranks."""


def number_device(trainer: pl.Trainer) -> torch.device:
    """Where tensors for the default process group lie: a GPU, or the host."""
    device = trainer.strategy.root_device
    return device if device.type == "cuda" else torch.device("cpu")


def spread(values: Mapping[str, float], device: torch.device) -> dict[str, Spread]:
    """The ``values`` of all ranks; collective where there are several, with the same names.

    Args:
        values: of this rank.
        device: of tensors for the default process group.
    """
    mine = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    ranks = [mine]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine)
    columns = zip(*torch.stack(ranks).tolist(), strict=True)
    return {name: _of(column) for name, column in zip(values, columns, strict=True)}


def _of(column: tuple[float, ...]) -> Spread:
    highest = max(column, key=lambda value: math.inf if math.isnan(value) else value)
    return Spread(min(column), sum(column) / len(column), highest, column.index(highest), column)
