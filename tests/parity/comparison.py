"""Comparison of what a module trained, noted and logged under a layout and in one process."""

import pytest
import torch
from torch import Tensor

Found = tuple[dict[str, Tensor], list[float], dict[str, float]]
"""Weights by name, notes and logged values."""


def check_found(name: str, found: Found, expected: Found, tolerance: float) -> None:
    """Compare all that a module has left behind.

    Args:
        name: of the module, for messages.
        found: under a layout.
        expected: in one process.
        tolerance: largest difference of a number.
    """
    weights, notes, logged = found
    their_weights, their_notes, their_logged = expected
    assert weights.keys() == their_weights.keys()
    for key, value in their_weights.items():
        torch.testing.assert_close(
            *(weights[key], value),
            rtol=0,
            atol=tolerance,
            msg=lambda text, key=key: f"{name}, {key}: {text}",
        )
    assert notes == pytest.approx(their_notes, abs=tolerance), name
    assert logged == pytest.approx(their_logged, abs=tolerance), name
