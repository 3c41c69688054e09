"""What a trunk returns for a batch, of what it has returned for its microbatches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.graphs import tree_flatten, tree_unflatten
from lightning_megatron.errors import ConfigError
from lightning_megatron.whole.torch_functions import Args, Kwargs, kind_of


class UnknownNumber(Tensor):
    """Number that a trunk returns for each microbatch, and whatever is computed of it.

    Nothing tells what it is for the whole batch. It may be computed with and returned, not read.
    """

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if kind_of(func) in ("reads", "array"):
            raise ConfigError(OF_NUMBER)
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


OF_NUMBER = (
    "the PipelineSequential returns a number for each microbatch, and what it is for the whole "
    "batch is not known"
)


def joined(outputs: Sequence[Any]) -> Any:
    """Return the output for a batch; tensors have samples in their first dim.

    Args:
        outputs: of the microbatches.
    """
    flat = [tree_flatten(output) for output in outputs]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_leaf(column) for column in columns], flat[0][1])


def _leaf(column: Sequence[Any]) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        return first
    return torch.cat(list(column)) if first.ndim else first.as_subclass(UnknownNumber)
