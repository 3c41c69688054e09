"""Transforms around the forwards of blocks, from the inside to the outside.

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
from lightning_megatron.parallel.activations.config import ActivationConfig, find_blocks
from lightning_megatron.parallel.activations.distribute_inputs import SharedInputs
from lightning_megatron.parallel.activations.groups import recompute_groups
from lightning_megatron.parallel.activations.offload import Offloader, offload
from lightning_megatron.parallel.compile import CompileConfig, compile_if_alone, compile_parts
from lightning_megatron.parallel.forward_wrapper import unwrap
from lightning_megatron.topology.axis import Axis

_NOTHING = CompileConfig()


def transform_blocks(
    module: nn.Module,
    recomputed: Collection[nn.Module],
    activations: ActivationConfig,
    device: torch.device,
    tp: Axis | None = None,
    compiled: CompileConfig = _NOTHING,
) -> None:
    """Run the blocks of ``module`` as options say, whatever was put around them before.

    Args:
        module: the network, or the stages of it that this rank has.
        recomputed: blocks of the whole network that are recomputed.
        activations: what becomes of what autograd keeps.
        device: where the network computes.
        tp: the ranks that compute each block together.
        compiled: what runs compiled.
    """
    unwrap(module)
    offloader = None
    if activations.offload:
        offloader = Offloader(device, activations.offload_min_bytes)
    inside = compiled.contains_recomputation(activations)
    if inside:
        here = set(module.modules())
        alone = [block for block in recomputed if block in here]
        compile_if_alone(alone, compiled, activations)
    else:
        compile_parts(module, compiled, activations)
    grouped = recompute_groups(module, recomputed, activations.group, traced=inside)
    single = [block for block in recomputed if block not in grouped]
    recompute(module, single, activations, offloader, traced=inside)
    if inside:
        compile_parts(module, compiled, activations)
    if activations.distribute_inputs and tp is not None and tp.size > 1:
        for block in recomputed:
            if not isinstance(block, RemoteItem):
                SharedInputs(block, tp, offloader)
    if offloader is not None:
        for position, block in enumerate(find_blocks(module, activations.blocks)):
            if not isinstance(block, RemoteItem):
                offload(block, position, offloader)
