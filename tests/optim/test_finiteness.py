"""Norms and finiteness of many gradients as few numbers, whatever their formats."""

import math
from typing import Any

import pytest
import torch

from lightning_megatron.optim.clip import finiteness, global_squares

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


def test_squares_of_a_device_are_moved_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients on the host each move of a norm to the device would be waited for."""
    moved: list[Any] = []
    to = torch.Tensor.to

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved.append(args)
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    some = [torch.full((2,), float(number)) for number in range(9)]
    total = global_squares([(some, [])], CPU, None)
    assert float(total) == pytest.approx(2 * sum(number**2 for number in range(9)))
    assert sum(CPU in args for args in moved) == 1
