"""A few numbers of every rank, brought together: one small collective a window."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Spread(NamedTuple):
    """A number over all ranks."""

    lowest: float
    mean: float
    highest: float
    highest_rank: int
    """The first rank that has the highest."""


def number_device(strategy: Any) -> torch.device:
    """Where tensors for the default process group lie: a GPU, or the host."""
    device: torch.device = getattr(strategy, "root_device", torch.device("cpu"))
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
    table = torch.stack(ranks).cpu()
    columns = zip(values, table.unbind(1), strict=True)
    return {
        name: Spread(
            float(column.min()), float(column.mean()), float(column.max()), int(column.argmax())
        )
        for name, column in columns
    }
