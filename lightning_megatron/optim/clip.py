"""Global gradient norm and clipping over every axis of a layout.

Gradients are local tensors: tp shards, ZeRO shards, whole copies. Each rank adds up the squares of
those that it *counts* (one holder counts a replicated gradient), one all-reduce makes the sum
global, and every rank scales its own gradients by the same coefficient. Nothing goes through
DTensor dispatch, and parameters on different meshes mix freely. Ranks check copies that they do not
count, too: a copy that is not finite, which only a fault of its rank can cause, makes the norm NaN
on all ranks. This check costs no time, as the other ranks are computing meanwhile.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch.kernels import foreach_clamp_, foreach_mul_, foreach_norm

EPSILON = 1e-6
"""Number added to the norm before dividing, as ``torch.nn.utils.clip_grad_norm_`` does."""


def global_squares(
    parts: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Squares of the Euclidean norms of parts of the model's gradients, by one all-reduce.

    Args:
        parts: for each part, the local gradients that this rank counts, any of which may be empty,
            and those that another rank counts.
        device: device of the sums; gradients may be on others.
        group: ranks that hold parts of the model; None when this rank holds all of it.

    Returns:
        A vector in float64, whatever gradients this rank has: a norm rounded on some ranks only
        would scale copies of a gradient differently.
    """
    total = torch.zeros(len(parts), dtype=torch.float64, device=device)
    for index, (counted, copies) in enumerate(parts):
        for gradients, weight in ((counted, 1.0), (copies, 0.0)):
            full = [g for g in gradients if g.numel()]
            wide = all(g.dtype == torch.float64 for g in full)
            norms = foreach_norm(full, torch.float64 if wide else torch.float32)
            if norms:
                squares = torch.stack([n.to(device, torch.float64) for n in norms]).square()
                total[index] += weight * squares.sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    return total


def finiteness(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Number that is finite only if all ``gradients`` are; costs less than half of a norm.

    The number may be infinite for gradients that are finite and huge.

    Args:
        gradients: gradients of this rank; any may be empty.
        device: device of the result; gradients may be on others.

    Returns:
        A scalar in float64.
    """
    full = [g for g in gradients if g.numel()]
    # A host adds faster than it squares; elsewhere the norms of many take one kernel.
    host = [g for g in full if g.device.type == "cpu"]
    parts = [g.sum(dtype=torch.promote_types(g.dtype, torch.float32)) for g in host]
    parts += foreach_norm([g for g in full if g.device.type != "cpu"], torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for dtype in (torch.float32, torch.float64):
        alike = [part.to(device) for part in parts if part.dtype == dtype]
        if alike:
            total += torch.stack(alike).sum()
    return total


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that brings ``norm`` down to ``max_norm``; 1 when it is below."""
    return (max_norm / (norm + EPSILON)).clamp(max=1.0)


def scale_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all ``gradients`` in place by a scalar tensor."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for (device, dtype), group in alike.items():
        foreach_mul_(group, factor.to(device, dtype))


def clip_value_(gradients: Sequence[Tensor], value: float) -> None:
    """Clamp all ``gradients`` in place to ``[-value, value]``."""
    foreach_clamp_(gradients, -value, value)
