"""Slopes against the function of the paper's code, and the bias against a loop."""

import math

import pytest
import torch

from lightning_megatron.layers.alibi import Alibi, alibi_bias, alibi_slopes
from lightning_megatron.layers.attention import CausalSelfAttention


def _paper(n):
    """What the authors publish in github.com/ofirpress/attention_with_linear_biases."""
    if math.log2(n).is_integer():
        first = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [first ** (i + 1) for i in range(n)]
    below = 2 ** math.floor(math.log2(n))
    return _paper(below) + _paper(2 * below)[0::2][: n - below]


@pytest.mark.parametrize("n", [*range(1, 20), 40, 112])
def test_slopes_are_those_of_the_paper(n):
    found = alibi_slopes(n, dtype=torch.float64)
    torch.testing.assert_close(found, torch.tensor(_paper(n)).double(), rtol=1e-6, atol=0)
    parts = [alibi_slopes(n, i, 1, dtype=torch.float64) for i in range(n)]
    torch.testing.assert_close(torch.cat(parts), found, rtol=1e-15, atol=0)


def test_slopes_of_powers_of_two_are_exact():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


def test_bias():
    found = alibi_bias(torch.tensor([0.5, 2.0]), 2, 3)
    assert found.tolist() == [
        [[[-0.5, -0.0, -0.5], [-1.0, -0.5, -0.0]], [[-2.0, -0.0, -2.0], [-4.0, -2.0, -0.0]]]
    ]


def test_a_layer_sees_the_near_better_than_the_far():
    torch.manual_seed(0)
    layer = CausalSelfAttention(16, 4, rotary=Alibi()).double()
    plain = CausalSelfAttention(16, 4).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    bias = alibi_bias(alibi_slopes(4, dtype=torch.float64), 6, 6)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = plain(x, mask=bias.masked_fill(future, -math.inf))
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(plain(x), expected)
