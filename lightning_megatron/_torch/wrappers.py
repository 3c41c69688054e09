"""Tensors of Python that stand for others."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.overrides
import torch.utils._python_dispatch
from torch import Tensor


def stand_in(
    kind: type[Tensor], like: Tensor, shape: torch.Size, device: torch.device | None = None
) -> Any:
    """Make a tensor of a class of ours without memory, but for its shape as ``like`` (2.11-2.13).

    On another device where one is given.

    Every tensor class of torch that wraps others is made so, and there is no public way.
    """
    return Tensor._make_wrapper_subclass(
        kind, shape, dtype=like.dtype, device=device or like.device, requires_grad=False
    )


def writes(operator: Any) -> bool:
    """Whether an operator changes one of its arguments (2.11-2.13, in the schema alone)."""
    return bool(operator._schema.is_mutable)


@contextmanager
def without_modes() -> Iterator[None]:
    """Within the block no mode of the caller sees what is called (2.11-2.13).

    Not the default device either: `torch.device` as a context is such a mode.
    """
    with ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
        yield
