"""Split tensors: the mark of a split, the whole tensor, and this rank's part.

A column-parallel layer computes a part of its output features on each tp rank. It returns a
`whole.split_tensor.SplitTensor`: this rank's part, which knows the dim that is split. It behaves
like the whole tensor and reports its shape. `whole` returns the whole tensor, `own_part` the plain
part. Both take a `whole.context_tensor.ContextTensor`, too, of whose sequences each cp rank has a
part.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatron._torch.graphs import tree_map
from lightning_megatron.comm.collectives import own_slice
from lightning_megatron.comm.functional import copy_to, gather_from, split_to
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import Topology


@dataclass(frozen=True)
class Split:
    """Dim along which a tensor is split over tp, and topology of the tp axis.

    All ranks have parts of the same size, in the order of the ranks.
    """

    topology: Topology
    dim: int
    """Dim that is split, not negative."""

    @property
    def axis(self) -> Axis:
        """Axis of the ranks that have the parts."""
        return self.topology.tp


def split_of(value: Any) -> Split | None:
    """Split of ``value``; None if it is not a split tensor."""
    return getattr(value, "_split", None) if isinstance(value, Tensor) else None


def part_of(value: Any) -> Any:
    """`whole.context_part.ContextPart` of a tensor whose sequences cp ranks share; else None."""
    return getattr(value, "_context", None) if isinstance(value, Tensor) else None


def place_of(value: Any) -> Any:
    """`whole.weights.Place` of a weight, or a gradient, of which ranks have parts; else None."""
    return getattr(value, "_place", None) if isinstance(value, Tensor) else None


def own_part(x: Tensor) -> Tensor:
    """Return this rank's part of a split tensor as a plain tensor; any other tensor unchanged.

    The caller must treat it as a part: its softmax is not the softmax of the whole. Of a sequence
    it is what layers inside of a `PipelineSequential` have, with padding at its end.
    """
    of_sequence = part_of(x)
    if of_sequence is not None:
        part: Tensor = of_sequence.local()
        return part
    if split_of(x) is None:
        return x
    return x.as_subclass(Tensor)


def whole(value: Any) -> Any:
    """Return ``value`` with every split tensor gathered to a plain tensor, equal on all ranks.

    Each takes an all-gather, which all tp ranks (and cp ranks) must call. Gradients pass.

    Args:
        value: tensor, or nested lists, tuples and dicts with tensors.
    """
    return _whole(value) if isinstance(value, Tensor) else tree_map(_whole, value)


def _whole(leaf: Any) -> Any:
    of_sequence = part_of(leaf)
    leaf = leaf if of_sequence is None else of_sequence.whole_of(leaf)
    split = split_of(leaf)
    return leaf if split is None else _gathered(own_part(leaf), split)


def _gathered(part: Tensor, split: Split) -> Tensor:
    """Gather a part, with the dims of the whole in memory as those of the part.

    So a view of the whole is one where it is one in one process.
    """
    order = order_in_memory(part)
    if order == sorted(order):
        return gather_from(part, split.axis, split.dim).contiguous()
    found = gather_from(part.permute(order), split.axis, order.index(split.dim)).contiguous()
    return found.permute([order.index(d) for d in range(part.dim())])


def order_in_memory(x: Tensor) -> list[int]:
    """Dims from the one with the largest steps in memory to that with the smallest."""
    strides = x.stride()
    return sorted(range(x.dim()), key=lambda d: -strides[d])


def whole_strides(part: Tensor, dim: int, size: int) -> tuple[int, ...]:
    """Steps in memory of a tensor of which ``size`` ranks have parts along ``dim``."""
    strides = part.stride()
    beyond = strides[dim] * max(part.shape[dim], 1)
    return tuple(n * size if d != dim and n >= beyond > 0 else n for d, n in enumerate(strides))


def marked(part: Tensor, like: type[Tensor], topology: Topology, dim: int) -> Tensor:
    """Turn ``part`` itself into a split tensor of the class ``like``.

    ``as_subclass`` would return a view, which is one more autograd node, and some changes of a view
    in place are forbidden.
    """
    part.__class__ = like
    part._split = Split(topology, dim)  # type: ignore[attr-defined]
    return part


def whole_shape(part: Tensor, split: Split) -> torch.Size:
    """Shape of the whole tensor, from a part."""
    shape = list(part.shape)
    shape[split.dim] *= split.axis.size
    return torch.Size(shape)


def beside(other: Any, size: int, from_right: int, axis: Axis) -> Any:
    """Slice the other operand of an elementwise operation on a part.

    Args:
        other: plain operand that all ranks hold alike; anything but a tensor is returned unchanged.
        size: size of the part along the split dim.
        from_right: position of that dim from the right, 1 for the last.
        axis: tp axis.

    Returns:
        This rank's part of an operand that has the whole size in that dim. An operand that is
        broadcast along it is used differently on every rank, so its gradients are summed.
    """
    if not isinstance(other, Tensor):
        return other
    learns = other.requires_grad and torch.is_grad_enabled()
    length = other.shape[-from_right] if other.dim() >= from_right else 1
    if length == size * axis.size:
        dim = other.dim() - from_right
        return split_to(other, axis, dim) if learns else own_slice(other, axis, dim)
    return copy_to(other, axis) if learns and length == 1 else other
