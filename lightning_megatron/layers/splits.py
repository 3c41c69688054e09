"""What it means that a tensor is split over tp: the mark, and the ways to the whole and back.

A column-parallel layer computes a part of its output features on each tp rank. What it returns is a
`layers.split_tensor.SplitTensor`: this rank's part, which knows the dim that is split. Its meaning
is that of the whole tensor, whose shape it reports. `whole` makes the whole tensor of it, and
`own_part` the plain part.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron._torch import tree_map
from lightning_megatron.comm.collectives import own_slice
from lightning_megatron.comm.functional import copy_to, gather_from, split_to
from lightning_megatron.topology.mesh import Axis, Topology


@dataclass(frozen=True)
class Split:
    """Along which dim a tensor is split, over the tp axis of which layout.

    All ranks have parts of the same size, in the order of the ranks.
    """

    topology: Topology
    dim: int
    """Never negative."""

    @property
    def axis(self) -> Axis:
        """The ranks that have the parts."""
        return self.topology.tp


def split_of(value: Any) -> Split | None:
    """How ``value`` is split; None of whatever is not."""
    return getattr(value, "_split", None) if isinstance(value, Tensor) else None


def own_part(x: Tensor) -> Tensor:
    """This rank's part of a split tensor as a plain tensor; any other tensor as it is.

    Code that gets it has to know that it is a part: a softmax of it is not the softmax.
    """
    if split_of(x) is None:
        return x
    return x.as_subclass(Tensor)


def whole(value: Any) -> Any:
    """``value`` with every split tensor in it whole, as a plain tensor equal on all tp ranks.

    An all-gather for each, which all tp ranks have to reach. Gradients pass.

    Args:
        value: a tensor, or nested lists, tuples and dicts with tensors.
    """
    return _whole(value) if isinstance(value, Tensor) else tree_map(_whole, value)


def _whole(leaf: Any) -> Any:
    split = split_of(leaf)
    return leaf if split is None else gather_from(own_part(leaf), split.axis, split.dim)


def marked(part: Tensor, like: type[Tensor], topology: Topology, dim: int) -> Tensor:
    """Make of ``part`` itself a split tensor of the class ``like``.

    ``as_subclass`` would do it by a view, which is one more node for autograd, and of which it
    forbids some changes in place.
    """
    part.__class__ = like
    part._split = Split(topology, dim)  # type: ignore[attr-defined]
    return part


def whole_shape(part: Tensor, split: Split) -> torch.Size:
    """Shape of the whole of a part."""
    shape = list(part.shape)
    shape[split.dim] *= split.axis.size
    return torch.Size(shape)


def beside(other: Any, size: int, from_right: int, axis: Axis) -> Any:
    """An operand as it has to be to meet a part in an elementwise operation.

    Args:
        other: a plain operand that all ranks hold alike; anything but a tensor is returned as it
            is.
        size: of the part, along the dim that is split.
        from_right: the place of that dim, 1 for the last.
        axis: the ranks.

    Returns:
        This rank's part of an operand that has the whole size there. One that is broadcast along
        this dim is used differently on every rank, so its gradients are summed.
    """
    if not isinstance(other, Tensor):
        return other
    learns = other.requires_grad and torch.is_grad_enabled()
    length = other.shape[-from_right] if other.dim() >= from_right else 1
    if length == size * axis.size:
        dim = other.dim() - from_right
        return split_to(other, axis, dim) if learns else own_slice(other, axis, dim)
    return copy_to(other, axis) if learns and length == 1 else other
