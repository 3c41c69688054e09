"""Keys and values of all ranks, collected at once.

While they arrive the rank attends to its own, then to those of the others in the order of a ring,
so that both kinds add up alike. Backward collects them once more, as to keep them would take the
memory that the split saves, and sums the gradients over the ranks, in float32 at least.

With the letters of `ring`, a rank sends ``2 b n K d e (p - 1)`` bytes forward and ``2 b n K d (e +
a) (p - 1)`` backward, and holds all keys and values for the time of the call.
"""

import torch
from torch import Tensor

from lightning_megatron.comm.collectives import start_gather, start_sum_scatter
from lightning_megatron.layers.context_attention.blocks import Blocks
from lightning_megatron.layers.context_attention.partial_sums import wide
from lightning_megatron.layers.context_attention.ring import add_parts
from lightning_megatron.topology.axis import Axis


def forward(axis: Axis, blocks: Blocks, k: Tensor, v: Tensor) -> None:
    """Attend to the keys of all ranks."""
    gathering = start_gather(torch.stack((k, v)).unsqueeze(0), axis, 0)
    blocks.forward(axis.rank, k, v)
    collected = gathering.wait()
    for source in _others(axis):
        blocks.forward(source, *collected[source].unbind(0))


def backward(axis: Axis, blocks: Blocks, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's keys and values."""
    gathering = start_gather(torch.stack((k, v)).unsqueeze(0), axis, 0)
    total = k.new_empty((axis.size, 2, *k.shape), dtype=wide(k.dtype))
    add_parts(total[axis.rank], blocks.backward(axis.rank, k, v), fresh=True)
    collected = gathering.wait()
    for source in _others(axis):
        parts = blocks.backward(source, *collected[source].unbind(0))
        add_parts(total[source], parts, fresh=True)
    own = start_sum_scatter(total, axis, 0).wait()[0]
    return own[0].to(k.dtype, copy=True), own[1].to(v.dtype, copy=True)


def _others(axis: Axis) -> list[int]:
    """Other ranks, in the order in which a ring brings their keys."""
    return [(axis.rank - hop) % axis.size for hop in range(1, axis.size)]
