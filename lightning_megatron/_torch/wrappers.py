"""Tensors of Python that stand for others."""

from typing import Any

import torch
from torch import Tensor


def stand_in(kind: type[Tensor], like: Tensor, shape: torch.Size) -> Any:
    """Make a tensor of a class of ours without memory, but for its shape as ``like`` (2.11-2.13).

    Every tensor class of torch that wraps others is made so, and there is no public way.
    """
    return Tensor._make_wrapper_subclass(
        kind, shape, dtype=like.dtype, device=like.device, requires_grad=False
    )


def writes(operator: Any) -> bool:
    """Whether an operator changes one of its arguments (2.11-2.13, in the schema alone)."""
    return bool(operator._schema.is_mutable)
