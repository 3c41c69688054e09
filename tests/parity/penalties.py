"""What modules of `tests.parity.strangers` call that stand in another file than the module."""

from typing import Any

import torch
from torch import Tensor, nn


def orthogonal(weight: Tensor) -> Tensor:
    """Distance of the products of a weight's rows from those of an orthonormal set."""
    return (weight @ weight.T - torch.eye(len(weight), dtype=weight.dtype)).square().sum()


def roots(module: nn.Module) -> Any:
    """Sum of norms, which are no sums over the elements."""
    return sum(p.norm() for p in module.parameters())


class Spectral(nn.Module):
    """Criterion that is given a layer."""

    def forward(self, layer: Any) -> Tensor:
        found: Tensor = torch.linalg.matrix_norm(layer.weight, 2)
        return found


class Watcher:
    """Object that keeps a network, and renormalises it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @torch.no_grad()
    def renormalise(self) -> list[float]:
        norms = []
        for p in self.module.parameters():
            p.div_(p.norm() + 0.5)
            norms.append(float(p.abs().max()))
        return norms
