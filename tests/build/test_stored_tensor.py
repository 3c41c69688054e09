"""A stored tensor reads what it would hold, and no more of the files than it needs."""

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.build.init import materialize
from lightning_megatron.build.stored_tensor import StoredTensor
from lightning_megatron.errors import ConfigError


class Recorded:
    """Tensor that notes how many values were read of it."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.shape = tuple(values.shape)
        self.dtype = values.dtype
        self.count = 0

    def read(self, window: tuple[tuple[int, int], ...]) -> Tensor:
        self.count += math.prod(length for _, length in window)
        out = self.values
        for dim, (first, length) in enumerate(window):
            out = out.narrow(dim, first, length)
        return out.clone()


WHOLE = torch.arange(96.0, dtype=torch.float64).view(12, 8)

# What is done to the tensor, and the number of values of it that have to be read.
WAYS = {
    "rows": (lambda w: w.narrow(0, 6, 6), 48),
    "last rows": (lambda w: w[-3:], 24),
    "columns": (lambda w: w.narrow(1, 4, 4).contiguous(), 48),
    "cast rows": (lambda w: w.to(torch.float32)[3:6], 24),
    "rows of the transposed": (lambda w: w.t().contiguous()[2:4], 24),
    "part of a fused one": (lambda w: w.split(4)[1].narrow(0, 2, 2), 16),
    "chunk": (lambda w: w.chunk(3, dim=0)[2], 32),
    "heads": (lambda w: w.view(3, 4, 8)[1:2].reshape(4, 8), 32),
    "one of several": (lambda w: w.unbind(0)[5], 8),
    "joined": (lambda w: torch.cat([w[:2], w[8:]])[1:3], 16),
    "stacked": (lambda w: torch.stack([w[:2], w[2:4]])[1], 16),
    "reordered": (lambda w: w.index_select(0, torch.tensor([3, 1])), 96),
    "with a dimension": (lambda w: w.unsqueeze(0)[:, 4:6], 16),
    "permuted": (lambda w: w.view(3, 4, 8).permute(1, 0, 2)[:, 1], 32),
    "every second row": (lambda w: w[::2], 96),
}


@pytest.mark.parametrize("way", WAYS)
def test_part_is_read_and_no_more(way):
    change, count = WAYS[way]
    source = Recorded(WHOLE)
    found = change(StoredTensor.of(source))
    assert isinstance(found, StoredTensor)
    assert source.count == 0
    expected = change(WHOLE)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(found.read(), expected)
    assert source.count == count


def test_values_are_read_where_they_are_used():
    weight = nn.Parameter(StoredTensor.of(Recorded(WHOLE)))
    out = nn.functional.linear(torch.ones(1, 8, dtype=torch.float64), weight)
    assert torch.equal(out, WHOLE.sum(1, keepdim=True).t())
    out.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(WHOLE))
    assert torch.empty_like(WHOLE).copy_(weight.detach()).equal(WHOLE)


@pytest.mark.parametrize("write", [lambda p: p.mul_(2), lambda p: setattr(p, "data", WHOLE)])
def test_write_is_refused(write):
    weight = nn.Parameter(StoredTensor.of(Recorded(WHOLE)))
    with torch.no_grad(), pytest.raises(ConfigError, match="still in their files"):
        write(weight)


def test_saved_tensor_has_the_values(tmp_path):
    weight = nn.Parameter(StoredTensor.of(Recorded(WHOLE)), requires_grad=False)
    torch.save({"weight": weight}, tmp_path / "file")
    found = torch.load(tmp_path / "file")["weight"]
    assert type(found) is nn.Parameter
    assert not found.requires_grad
    assert torch.equal(found, WHOLE)


def test_module_keeps_dtype_ties_and_frozen_parameters():
    one, two = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
    one.weight = two.weight = nn.Parameter(StoredTensor.of(Recorded(WHOLE)), requires_grad=False)
    both = nn.Sequential(one, two).to(torch.float32)
    materialize(both, seed=0, device="cpu")
    assert one.weight is two.weight
    assert not one.weight.requires_grad
    assert type(one.weight) is nn.Parameter
    assert torch.equal(one.weight, WHOLE.float())
