"""Copies of items with stand-ins for their weights.

What an item does to positions does not depend on the values of its weights, as long as none of them
is zero by chance: a gate that begins at zero hides what stands behind it. So copies are tried, with
positive random weights; the items, their buffers, hooks and random numbers stay as they are.

A large weight stands in less memory: ``w[i, j] = base[i + j]`` takes ``rows + columns`` numbers.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import Topology

LARGE = 1 << 16
"""Elements of a weight that is not stored as a whole."""
_SHARED = (dist.ProcessGroup, DeviceMesh, Axis, Topology)
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def skeleton(item: nn.Module, outside: Iterable[nn.Module]) -> nn.Module:
    """Copy of an item without hooks, whose parameters are on meta; other tensors are shared.

    Args:
        item: not spread over ranks yet.
        outside: modules that the item may refer to and that are not copied.
    """
    inside = set(item.modules())
    memo: dict[int, Any] = {id(m): m for m in outside if m not in inside}
    for tensor in _tensors(item):
        if isinstance(tensor, nn.Parameter):
            empty = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        else:
            memo[id(tensor)] = tensor
    return _copied(item, memo)


def with_values(bare: nn.Module, values: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy of a `skeleton` whose tensors are those that ``values`` makes of the skeleton's."""
    memo: dict[int, Any] = {}
    for tensor in _tensors(bare):
        if id(tensor) not in memo:
            made = values(tensor)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = made
    return _copied(bare, memo)


def on_meta(bare: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Copy of a `skeleton` without any values, in a floating-point format unless it is None."""

    def empty(tensor: Tensor) -> Tensor:
        own = dtype is None or not tensor.is_floating_point()
        return torch.empty_like(tensor, device="meta", dtype=None if own else dtype).detach()

    return with_values(bare, empty)


class StandIns:
    """Values in place of those of one item, the same for each of its copies.

    Args:
        dtype: number format of floating-point values; None keeps each one's own.
        device: device of all values.

    Attributes:
        dtype: as given.
    """

    def __init__(self, dtype: torch.dtype | None, device: torch.device) -> None:
        self.dtype = dtype
        self._device = device
        self._made: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Return what stands in for a tensor of the item's skeleton."""
        made = self._made.get(id(tensor))
        if made is None:
            made = self._made[id(tensor)] = self._make(tensor)
        is_buffer = not isinstance(tensor, nn.Parameter) and made.numel() <= LARGE
        return made.clone() if is_buffer else made

    def _make(self, tensor: Tensor) -> Tensor:
        numeric = tensor.is_floating_point() or tensor.is_complex()
        if isinstance(tensor, nn.Parameter) or (tensor.is_meta and numeric):
            made = self._random(tensor)
        elif tensor.is_meta:
            # Most are positions, which are indices of something.
            last = max(*tensor.shape[-1:], 1, 1)
            counted = torch.arange(tensor.numel(), device=self._device) % last
            made = counted.view(tensor.shape).to(tensor.dtype)
        else:
            made = tensor.detach().to(self._device)
        return self._cast(made)

    def _random(self, tensor: Tensor) -> Tensor:
        shape = tensor.shape
        scale = 1 / math.sqrt(max(shape[-1], 1)) if len(shape) > 1 else 1.0
        large = tensor.numel() > LARGE
        size = (sum(shape),) if large else tuple(shape)
        base = scale * (0.2 + 0.8 * torch.rand(size, device=self._device))
        base = base.to(tensor.dtype if self.dtype is None else self.dtype)
        return torch.as_strided(base, shape, (1,) * len(shape)) if large else base

    def _cast(self, made: Tensor) -> Tensor:
        if self.dtype is None or not made.is_floating_point():
            return made
        return made.to(self.dtype)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes."""
    for child in module.modules():
        for own in (child._parameters, child._buffers, vars(child)):
            yield from (value for value in own.values() if isinstance(value, Tensor))


def _copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    for child in module.modules():
        for name in _HOOKS:
            hooks = vars(child).get(name)
            if hooks is not None:
                memo[id(hooks)] = OrderedDict()
        for value in vars(child).values():
            if isinstance(value, _SHARED):
                memo.setdefault(id(value), value)
    return copy.deepcopy(module, memo)
