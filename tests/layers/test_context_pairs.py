"""Pairs by arithmetic are those of a mask that is written out."""

import pytest
import torch

from lightning_megatron.monitoring.context_monitor import pairs_by_rank, seen_by_position
from lightning_megatron.topology.context_layout import ContextLayout

DOCUMENTS = torch.tensor([[7] * 4 + [0] * 1 + [7] * 8, [1] * 13])
"""A number that comes back is that of another document."""


def visible(causal: bool, window: int | None, documents: torch.Tensor | None) -> torch.Tensor:
    rows = torch.zeros(1, 13) if documents is None else documents
    numbers = torch.zeros_like(rows)
    numbers[:, 1:] = (rows[:, 1:] != rows[:, :-1]).cumsum(1)
    distance = torch.arange(13)[:, None] - torch.arange(13)
    mask = numbers[:, :, None] == numbers[:, None, :]
    if causal:
        mask = mask & (distance >= 0)
    return mask if window is None else mask & (distance.abs() < window)


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_counts_are_those_of_the_mask(causal, window, documents):
    mask = visible(causal, window, documents)
    seen = seen_by_position(13, causal=causal, window=window, documents=documents)
    assert torch.equal(seen, mask.sum(-1))
    for order in ("zigzag", "contiguous"):
        layout = ContextLayout(13, 2, order)
        held = [[i for c in layout.chunks(r) for i in c if i < 13] for r in range(2)]
        assert pairs_by_rank(seen, layout) == [int(mask[:, own].sum()) for own in held]
