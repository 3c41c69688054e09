"""Reductions of parts to one number: of a rank's own, and norms of many over all ranks."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass
from lightning_megatron.whole.splits import place_of, split_of
from lightning_megatron.whole.torch_functions import Total


def own_number(total: Total, local: Tensor, order: float | None) -> Tensor:
    """Reduce one part, or the numbers of all parts; the sum in place of the mean.

    Sums and norms of narrow formats are float32, as they are not yet the result.

    Args:
        total: the reduction.
        local: part, or numbers.
        order: of a norm; None for another reduction.
    """
    wide = torch.promote_types(local.dtype, torch.float32) if local.is_floating_point() else None
    if total in ("sum", "mean") or (order is not None and not local.numel()):
        return local.sum(dtype=wide)
    if order is not None:
        found: Tensor = torch.linalg.vector_norm(local, order, dtype=wide)
        return found
    if total in ("any", "all"):
        return local.any() if total == "any" else local.all()
    largest = total == "max"
    if local.numel():
        return local.max() if largest else local.min()
    limits: Any = torch.finfo if local.is_floating_point() else torch.iinfo
    bound = limits(local.dtype)
    return local.new_tensor(bound.min if largest else bound.max)


def norms(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return norms of tensors, some of which are parts, with one collective for each group.

    No gradient passes.

    Args:
        tensors: plain tensors, parts of weights or of gradients, split tensors.
        order: of the norms, more than 0.
        dtype: number format in which they are computed; None: that of each tensor.
    """
    with torch.no_grad(), DisableTorchFunctionSubclass():
        found: list[Tensor] = []
        formats: list[torch.dtype] = []
        members: dict[dist.ProcessGroup, list[int]] = {}
        for x in tensors:
            for group in _groups(x):
                members.setdefault(group, []).append(len(found))
            local = x.to_local() if isinstance(x, DTensor) else x.as_subclass(Tensor)
            formats.append(dtype or local.dtype)
            found.append(own_number("norm", local if dtype is None else local.to(dtype), order))
        for group, positions in members.items():
            wide = torch.stack([found[i].to(torch.float64) for i in positions])
            total = wide if math.isinf(order) else wide**order
            op = dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM
            dist.all_reduce(total, op=op, group=group)
            total = total if math.isinf(order) else total ** (1 / order)
            for i, norm in zip(positions, total.unbind(), strict=True):
                found[i] = norm
        return [norm.to(kind) for norm, kind in zip(found, formats, strict=True)]


def _groups(x: Tensor) -> tuple[dist.ProcessGroup, ...]:
    split, place = split_of(x), place_of(x)
    if split is not None and split.axis.group is not None:
        return (split.axis.group,)
    return () if place is None else tuple(place.groups)


def groups_of(tensor: DTensor) -> list[dist.ProcessGroup]:
    """Groups whose ranks have the other parts of a DTensor."""
    mesh = tensor.device_mesh
    return [
        mesh.get_group(index)
        for index, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard) and mesh.size(index) > 1
    ]
