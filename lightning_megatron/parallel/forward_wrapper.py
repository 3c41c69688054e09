"""Wrappers in the place of a block's ``forward``.

Blocks are changed on the instance: their class, what looks at it, and the names of their parameters
stay as they are, and hooks, those of ZeRO among them, lie outside and run once. Several changes lie
around each other; `parallel.block_transforms` alone knows their order.
"""

import inspect
from collections.abc import Callable
from itertools import chain
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megatron._torch.dtensor import shard_of
from lightning_megatron.layers.sequential import PipelineSequential


class BlockForward:
    """Stands in for the ``forward`` of a block until it is removed.

    A class, not a closure: a deep copy of the block then runs its own weights. What the block is
    given is a method of it: one graph serves all blocks whose forwards are methods with the same
    code, where a compiler would take other objects for a different forward each.

    Args:
        block: whose forward is surrounded.

    Attributes:
        stays: whether it belongs to the block, beneath all that `unwrap` removes.
    """

    stays = False

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._forward = block.forward
        self._own: Callable[..., Any] | None = block.__dict__.get("forward")
        method = MethodType(_method(inspect.signature(block.forward)), self)
        object.__setattr__(block, "forward", method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        raise NotImplementedError

    def remove(self) -> None:
        """Give the block the forward back that it had."""
        if self._own is None:
            del self._block.__dict__["forward"]
        else:
            object.__setattr__(self._block, "forward", self._own)


def _method(signature: inspect.Signature) -> Callable[..., Any]:
    def __call__(self: BlockForward, *args: Any, **kwargs: Any) -> Any:  # the name is for pickle
        return self(*args, **kwargs)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    whole = signature.replace(parameters=[own, *signature.parameters.values()])
    __call__.__signature__ = whole  # type: ignore[attr-defined]
    return __call__


def outermost(block: nn.Module) -> BlockForward | None:
    """Outermost wrapper of the forward of ``block``; None if it is the block's own."""
    held = getattr(block.__dict__.get("forward"), "__self__", None)
    return held if isinstance(held, BlockForward) and not held.stays else None


def unwrap(module: nn.Module) -> None:
    """Remove whatever lies around the forwards of the blocks inside ``module``."""
    # The stages of a trunk are no children of it.
    stages = (m.stage_items for m in module.modules() if isinstance(m, PipelineSequential))
    for child in chain(module.modules(), chain.from_iterable(stages)):
        while (held := outermost(child)) is not None:
            held.remove()


def unwrap_all(module: nn.Module) -> None:
    """Remove also what belongs to the blocks (`BlockForward.stays`)."""
    unwrap(module)
    for child in module.modules():
        held = getattr(child.__dict__.get("forward"), "__self__", None)
        if isinstance(held, BlockForward):
            held.remove()


def address(tensor: Tensor) -> int:
    """Address of the first byte of a tensor, or of this rank's part of it."""
    local = shard_of(tensor) if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
