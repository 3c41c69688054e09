"""Adapters of PEFT on the linear layers of this library.

PEFT puts adapters around what is an ``nn.Linear``. `adopt` makes the column- and row-parallel
layers of this library so, and changes nothing else in them. ``A`` and ``B`` then follow the split
of their base layer as those layers themselves do: ``B`` of a column-parallel layer is
column-parallel, and gathers ``[b, s, r]`` under sequence parallelism, where ``A`` sees this rank's
positions; ``A`` of a row-parallel layer is row-parallel.
"""

from functools import cache
from typing import Any

from torch import nn

from lightning_megatron.adoption.classes import become
from lightning_megatron.adoption.sharding import Sharded, Sharding, as_sharded
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear


def is_own(model: nn.Module) -> bool:
    """Whether a model is made of this library's layers."""
    return any(is_own_linear(module) for module in model.modules())


def as_linears(model: nn.Module) -> None:
    """Make this library's linear layers in ``model`` pass for ``nn.Linear``, in place."""
    for module in model.modules():
        if is_own_linear(module) and not isinstance(module, nn.Linear):
            module.__class__ = _linear_too(type(module))  # type: ignore[arg-type]  # is hashable


def is_own_linear(module: nn.Module) -> bool:
    """Whether a module is a column- or row-parallel layer of this library."""
    return isinstance(module, ColumnParallelLinear | RowParallelLinear)


@cache
def _linear_too(own: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "adopted_class": own}
    return type(own.__name__, (own, nn.Linear), names)


def join_own(a: Any, b: Any, base: ColumnParallelLinear | RowParallelLinear) -> None:
    """Give ``A`` and ``B`` of an adapter their roles, in place."""
    split, whole = (b, a) if isinstance(base, ColumnParallelLinear) else (a, b)
    as_sharded(whole, Sharding(sums="sequence"), Sharded)
    if isinstance(base, ColumnParallelLinear):
        column = become(b, ColumnParallelLinear)
        column.gather_output = base.gather_output
        column.units = base.units
        column._shared_unit = None
    else:
        become(a, RowParallelLinear).input_is_parallel = base.input_is_parallel
    split.init_std = None
