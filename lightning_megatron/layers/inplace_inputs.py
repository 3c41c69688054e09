"""Inputs that the first module of a stage or unit may change in place.

``nn.ReLU(inplace=True)`` as first module is legal in one process, where its input is the result of
an operation. Autograd forbids in-place changes of a leaf, which a received activation is, and of
the view that FSDP2's hook makes of a unit's input. `as_results` turns such tensors into results of
an operation that does nothing and shares their memory.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from lightning_megatron._torch.graphs import tree_map


class _Entering(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def as_results(tree: Any) -> Any:
    """Return ``tree`` with every tensor that requires grad as the result of an operation."""
    return _as_result(tree) if isinstance(tree, Tensor) else tree_map(_as_result, tree)


def works_in_place(module: nn.Module) -> bool:
    """Whether any module inside ``module`` has ``inplace=True``."""
    return any(getattr(child, "inplace", False) for child in module.modules())


def _as_result(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.requires_grad and torch.is_grad_enabled():
        return _Entering.apply(leaf)  # type: ignore[no-untyped-call]
    return leaf
