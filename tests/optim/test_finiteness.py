"""One number tells whether all gradients are finite, whatever their formats."""

import math

import pytest
import torch

from lightning_megatron.optim.clip import finiteness

CPU = torch.device("cpu")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_single_bad_element_shows(bad: float, dtype: torch.dtype) -> None:
    gradients = [torch.full((500,), 300.0), torch.full((500,), 300.0, dtype=dtype)]
    assert finiteness(gradients, CPU) == 300_000  # more than float16 knows
    gradients[1][77] = bad
    assert not finiteness(gradients, CPU).isfinite()
    gradients[0][3] = -bad
    assert not finiteness(gradients, CPU).isfinite()


def test_no_gradients_are_finite() -> None:
    assert finiteness([torch.empty(0), torch.empty(0, 4)], CPU) == 0
    assert finiteness([], CPU) == 0
