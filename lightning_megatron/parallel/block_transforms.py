"""What is put around the forwards of blocks, from the inside to the outside.

1. `parallel.compile`: the forward becomes other code;
2. `parallel.activations.checkpointing`: it runs again in the backward
   (`parallel.activations.groups`: together with others); where that is for the compiler to do, the
   two change places;
3. `parallel.activations.distribute_inputs`: of its input each tensor-parallel rank keeps a part;
4. `parallel.activations.offload`: what it keeps then, waits in host memory.

ZeRO's hooks lie outside of all.
"""

from collections.abc import Collection

import torch
from torch import nn

from lightning_megatron.layers.sequential import RemoteItem
from lightning_megatron.parallel.activations.checkpointing import recompute
from lightning_megatron.parallel.activations.config import MemoryConfig, find_blocks
from lightning_megatron.parallel.activations.distribute_inputs import SharedInputs
from lightning_megatron.parallel.activations.groups import recompute_groups
from lightning_megatron.parallel.activations.offload import Offloader, offload
from lightning_megatron.parallel.compile import compile_if_alone, compile_parts
from lightning_megatron.parallel.forward_wrapper import unwrap
from lightning_megatron.topology.mesh import Axis


def transform_blocks(
    module: nn.Module,
    recomputed: Collection[nn.Module],
    config: MemoryConfig,
    device: torch.device,
    tp: Axis | None = None,
) -> None:
    """Run the blocks of ``module`` as ``config`` says, whatever was put around them before.

    Args:
        module: the network, or the stages of it that this rank has.
        recomputed: blocks of the whole network that are recomputed.
        config: the options.
        device: where the network computes.
        tp: the ranks that compute each block together.
    """
    unwrap(module)
    offloader = None
    if config.offload_activations:
        offloader = Offloader(device, config.offload_min_bytes)
    inside = config.forgets_in_graphs
    if inside:
        here = set(module.modules())
        compile_if_alone([block for block in recomputed if block in here], config)
    else:
        compile_parts(module, config)
    grouped = recompute_groups(module, recomputed, config.group, traced=inside)
    recompute(module, [block for block in recomputed if block not in grouped], config, offloader)
    if inside:
        compile_parts(module, config)
    if config.distribute_inputs and tp is not None and tp.size > 1:
        for block in recomputed:
            if not isinstance(block, RemoteItem):
                SharedInputs(block, tp, offloader)
    if offloader is not None:
        for position, block in enumerate(find_blocks(module, config.blocks)):
            if not isinstance(block, RemoteItem):
                offload(block, position, offloader)
