"""Tensors whose parts lie on several ranks, put together."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.checkpoint.chunks import Chunk
from lightning_megatron.parallel.apply import ParallelModule

Rectangle = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape of the whole tensor, offsets, sizes, number format."""


def describe(chunk: Chunk) -> tuple[Rectangle, tuple[str, ...]]:
    """Return what other ranks have to know of a chunk: its place, and further names."""
    return (chunk.full_shape, chunk.offsets, chunk.sizes, chunk.tensor.dtype), chunk.aliases


def assemble(
    name: str,
    chunk: Chunk | None,
    everyone: list[dict[str, tuple[Rectangle, tuple[str, ...]]]],
    parallel: ParallelModule,
    *,
    keep: bool,
) -> Tensor | None:
    """Bring the rectangles of one tensor together, each from the first rank that has it.

    Args:
        name: of the tensor.
        chunk: what this rank has of it; None for nothing.
        everyone: what the ranks have (`describe`), by name.
        parallel: the module.
        keep: whether this rank is to have the result.
    """
    sources: dict[Rectangle, int] = {}
    for source, known in enumerate(everyone):
        if name in known:
            sources.setdefault(known[name][0], source)
    device, here = parallel.topology.device, dist.get_rank()
    whole: Tensor | None = None
    for (shape, offsets, sizes, dtype), source in sources.items():
        if keep and whole is None:
            whole = torch.empty(shape, dtype=dtype, device=device)
        if not torch.Size(sizes).numel():
            continue
        part = torch.empty(sizes, dtype=dtype, device=device)
        if here == source:
            assert chunk is not None
            part.copy_(chunk.tensor)
        dist.broadcast(part, src=source)
        if whole is not None:
            target = whole
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(part)
    return whole
