"""Narrow copies of parameters that several stages of a rank share."""

import torch
from torch import nn

from lightning_megatron.zero.tied_half_params import TiedHalfParams


def test_gradients_of_copies_are_added_up_wide() -> None:
    """In bfloat16 a small gradient beside a large one would be lost."""
    net = nn.Linear(1, 1, bias=False)
    copies = TiedHalfParams(net, [net.weight], torch.bfloat16, torch.float32, [net])
    weight = net.weight
    for size in (1.0, *[2.0**-10] * 4):
        net(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
        assert net.weight.dtype == torch.bfloat16
    copies.finish()
    assert net.weight is weight
    assert weight.grad is not None
    assert float(weight.grad) == 1 + 2.0**-8
