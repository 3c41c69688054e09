"""Transforms around the forwards of blocks, from the inside to the outside.

1. `parallel.compile`: the forward becomes other code;
2. `parallel.activations.checkpointing`: it runs again in the backward
   (or together with others, below); where that is for the compiler to do, the
   two change places;
3. `parallel.activations.distribute_inputs`: of its input each tensor-parallel rank keeps a part;
4. `parallel.activations.offload`: what it keeps then, waits in host memory.

ZeRO's hooks lie outside of all.

*Uniform groups* (Megatron-LM's ``uniform`` method) are recomputed together. A block that is
recomputed keeps its input, so a stage of ``L`` blocks keeps ``L`` inputs for every microbatch that
is under way. A *group* of ``k`` consecutive blocks keeps the input of its first one only: ``L / k``
inputs. In the backward the whole group runs forward again, after which all its activations are
there at once, so a stage of ``m`` microbatches under way holds at most ::

    m * (L / k) * input  +  k * activations of a block

instead of ``m * L * input + activations``: worth it where many microbatches are under way and
inputs, not sequence-parallel, are large (least for ``k = sqrt(m L input / activations)``). It costs
no more computation than recomputing block by block.

Who calls one block after the other must be ours, so blocks of groups are items of a
`PipelineSequential`. A group ends where a stage does, and where a block is not recomputed. The
blocks' own hooks, those of ZeRO among them, run again with them: under ZeRO 3 the parameters of all
blocks of a group are gathered once more, for the recomputation.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_megatron.layers.sequential import ItemGroup, PipelineSequential, RemoteItem
from lightning_megatron.parallel.activations.checkpointing import (
    checkpoint_options,
    never_trace_alone,
    recompute,
    traced_options,
)
from lightning_megatron.parallel.activations.config import ActivationConfig, find_blocks
from lightning_megatron.parallel.activations.distribute_inputs import SharedInputs
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


def recompute_groups(
    module: nn.Module, chosen: Collection[nn.Module], size: int, *, traced: bool = False
) -> set[nn.Module]:
    """Let blocks of ``module`` forget their activations in groups, and no others.

    Args:
        module: whose trunks' stages may have groups already.
        chosen: blocks of the whole network that are recomputed.
        size: of the groups; with 1 there are none.
        traced: whether they will run inside of what is compiled.

    Returns:
        The blocks that are in groups.
    """
    if traced:
        never_trace_alone(_Forgotten)
    grouped: set[nn.Module] = set()
    for trunk in module.modules():
        if not isinstance(trunk, PipelineSequential):
            continue
        for stage in trunk.stage_items:
            stage.groups = {}
            for span in _spans([item in chosen for item in stage.items], size):
                blocks = [stage.items[i] for i in span]
                stage.groups[span.start] = (span.stop, _Forgotten(blocks))
                grouped.update(blocks)
    return grouped


def _spans(chosen: Sequence[bool], size: int) -> Iterator[range]:
    """Places in a stage of the groups."""
    start = 0
    while size > 1 and start < len(chosen):
        stop = start
        while stop < min(start + size, len(chosen)) and chosen[stop]:
            stop += 1
        if stop > start:
            yield range(start, stop)
        start = max(stop, start + 1)


class _Forgotten(ItemGroup):
    """Runs items again in the backward.

    Args:
        blocks: the items.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._options = checkpoint_options(blocks)

    @override
    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        options = traced_options() if torch.compiler.is_compiling() else self._options
        return checkpoint(run, *args, use_reentrant=False, **options, **kwargs)
