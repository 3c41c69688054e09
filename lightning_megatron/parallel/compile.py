"""Blocks of a network, or all of it, through ``torch.compile``.

Between its products a transformer block is a chain of small operations (norms, rotary embedding,
activation, dropout, residuals), each of which reads and writes whole activations. Compiled, a chain
becomes one kernel that does so once, and what is cheap to compute again is not kept for the
backward. Compiling *block by block* makes one graph that serves all blocks of a kind, because
parameters are its inputs: the time to compile does not grow with depth, as it would for a whole
model, and ZeRO gathers between blocks as ever.

Compiling the whole *model* (each stage of a pipeline, or where there is no `PipelineSequential`,
each child of the module that has parameters) makes one graph of all its layers, embedding and head
included. The compiler can work across blocks then, and takes as long as there are blocks.
ZeRO's hooks on a unit break such a graph, as does whatever else breaks that of a block; then each
unit is a graph of its own.

A forward is replaced on the instance: names of parameters stay, and hooks, those of ZeRO among
them, lie outside. With recomputation there are two orders:

* ``"block"`` with ``"full"`` or ``"adaptive"``: recomputation lies *around* the compiled block,
  which runs twice; each shape then has a graph of its own, so that the second run meets the same
  one. What moves inputs and activations lies around both.
* ``"model"``, and ``"block"`` with what recomputes but a part of each block (``"selective"``, or
  ``blocks=``): recomputation lies *inside* of the graph. The compiler marks what a block computes;
  where it cuts the graph into forward and backward, it passes on the blocks' inputs, the results
  that are to be kept and the state of the generator of random numbers, and computes the rest twice.

Where something breaks the graph inside of such a block, the block runs as if nothing were compiled
around it. One that is recomputed in full is therefore compiled once more, by itself, which takes
effect only then. Of one that is recomputed selectively every operation must be seen, so it is not
compiled, and a warning says so.

Inside of a graph the output of a column-parallel layer is this rank's part as a plain tensor: what
works along the split dim there (a softmax over features that tp splits) has to stand in a block
that is not compiled. The logits of a compiled head are marked outside (`whole.split_tensor`).

Collectives of tp are operators of the graph (`comm.operators`): a block is one graph under tp as
without, with sequence parallelism too, forward and backward. What breaks it are

* schedules that split the backward: linear layers leave the graph, so that their weight gradients
  can wait, as the backward of one graph is one piece (`layers.delayed_wgrad`);
* dropout on what tp shards, attention weights and under sequence parallelism the residual stream:
  it draws from another place than the generator that a compiler knows of (`topology.rng`);
* under tp, products in FP8: ranks agree on scales, and layers keep them (`precision.fp8_gemm`);
* mixtures of experts: how many rows an expert gets follows from the data, and ranks tell each other
  (`layers.experts.dispatch`). What lies before and behind is compiled.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn
from typing_extensions import override

from lightning_megatron._torch.fsdp import class_name
from lightning_megatron.adoption.trunk import AdoptedTrunk
from lightning_megatron.layers.delayed_wgrad import end_graphs
from lightning_megatron.layers.linear import ParallelLinear
from lightning_megatron.layers.sequential import PipelineSequential, StageItems
from lightning_megatron.parallel.activations.config import ActivationConfig, Mode, find_blocks
from lightning_megatron.parallel.forward_wrapper import BlockForward
from lightning_megatron.whole.memory import own_graph, unwrapped

Scope = Literal["none", "block", "model"]


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """Parts of the network that run through ``torch.compile``, and the compiler."""

    scope: Scope = "none"
    """Whether the blocks of the network, one by one, or all of it (each stage of a pipeline) are
    compiled (`parallel.compile`), which saves time and the memory of what is fused. The compiler
    recomputes what ``ActivationConfig(recompute=...)`` names, unless it is whole blocks that are
    compiled one by one."""
    backend: str = "inductor"
    """Backend that makes code of their graphs, as ``torch.compile`` names it."""

    def contains_recomputation(self, activations: ActivationConfig) -> bool:
        """Whether what is recomputed lies inside of what is compiled."""
        parts = activations.recompute == "selective" or activations.blocks is not None
        inside = self.scope == "model" or (self.scope == "block" and parts)
        return inside and activations.recompute != "none"

    def problems(self, activations: ActivationConfig, module: nn.Module | None) -> list[str]:
        """Faults of the options, also beside those for activations, and of applying them."""
        if self.scope == "none":
            return []
        if self.scope not in get_args(Scope):
            return [
                f"compile.scope={self.scope!r}: must be one of {', '.join(get_args(Scope))}; "
                "nearest valid: 'block'"
            ]
        problems = []
        if self.backend not in torch.compiler.list_backends(exclude_tags=()):
            problems.append(
                f"compile.backend={self.backend!r}: torch has no such backend; nearest valid: "
                "'inductor'"
            )
        if self.scope == "block" and module is not None and not find_blocks(module, None):
            problems.append(
                "compile.scope='block': the module has no lists of composite modules, so there is "
                "nothing to compile; nearest valid: scope='none'"
            )
        adopted = [m for m in module.modules() if isinstance(m, AdoptedTrunk)] if module else []
        if self.scope == "model" and adopted:
            problems.append(
                f"compile.scope='model': the forward of the adopted {class_name(adopted[0])} runs "
                "on every stage up to the items of the next one, which is no graph; nearest "
                "valid: scope='block'"
            )
        if activations.recompute not in get_args(Mode):
            return problems  # which `ActivationConfig.problems` tells
        return problems + self._problems_beside(activations)

    def _problems_beside(self, activations: ActivationConfig) -> list[str]:
        blocks, problems = activations.blocks, []
        moves = activations.offload or activations.distribute_inputs
        if moves and (self.scope == "model" or self.contains_recomputation(activations)):
            problems.append(
                f"compile.scope={self.scope!r}, activations.recompute={activations.recompute!r}, "
                f"blocks={blocks}, offload={activations.offload}, distribute_inputs="
                f"{activations.distribute_inputs}: what is kept inside of a graph cannot be moved; "
                "nearest valid: compile.scope='block' with recompute='none' or 'full' and "
                "blocks=None, or the same without these"
            )
        adaptive = activations.recompute == "adaptive"
        if adaptive and self.scope == "model":
            problems.append(
                "activations.recompute='adaptive', compile.scope='model': blocks inside of one "
                "graph are not measured; nearest valid: compile.scope='block', or recompute='full'"
            )
        if adaptive and self.scope == "block" and (activations.keep, blocks) != (None, None):
            problems.append(
                f"activations.recompute='adaptive', keep={activations.keep}, blocks={blocks}, "
                "compile.scope='block': compiled blocks are measured, and recomputed, as a whole; "
                "nearest valid: keep=None with blocks=None, or compile.scope='none'"
            )
        return problems


def compile_parts(module: nn.Module, config: CompileConfig, activations: ActivationConfig) -> None:
    """Let the parts of ``module`` that ``config`` names run compiled."""
    parts: Iterable[nn.Module] = ()
    if config.scope == "block":
        parts = find_blocks(module, None)
    elif config.scope == "model":
        parts = _models(module)
    inside = config.contains_recomputation(activations)
    twice = activations.recompute != "none" and not inside
    if config.scope != "none":
        end_graphs(module)
    for part in parts:
        _Compiled(part, config.backend, twice=twice)


def compile_if_alone(
    blocks: Iterable[nn.Module], config: CompileConfig, activations: ActivationConfig
) -> None:
    """Let blocks run compiled that a graph around them has to leave out.

    Args:
        blocks: about to be recomputed inside of that graph.
        config: how they are compiled.
        activations: how they are recomputed.
    """
    if activations.recompute == "full":
        for block in blocks:
            _Compiled(block, config.backend, twice=True)


def _models(module: nn.Module) -> list[nn.Module]:
    """The stages of the trunk; without one, the children that have parameters."""
    trunks = [child for child in module.modules() if isinstance(child, PipelineSequential)]
    if trunks:
        return [stage for trunk in trunks for stage in trunk.stage_items]
    found: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # has no forward
            found += _models(child)
        elif any(True for _ in child.parameters()):
            found.append(child)
    return found


def _last_layer(block: nn.Module) -> ParallelLinear | None:
    """The layer whose output is that of ``block``, if it is a column-parallel one."""
    while isinstance(block, StageItems | nn.Sequential) and len(list(block.children())):
        items = block.items if isinstance(block, StageItems) else list(block.children())
        block = items[-1]
    return block if isinstance(block, ParallelLinear) else None


class _Compiled(BlockForward):
    """A forward that is compiled when it runs first.

    Args:
        block: what to compile.
        backend: the compiler, as ``torch.compile`` names it.
        twice: whether the same forward runs again in the backward.
    """

    def __init__(self, block: nn.Module, backend: str, *, twice: bool) -> None:
        super().__init__(block)
        self._backend = backend
        self._dynamic = False if twice else None
        self._run: Callable[..., Any] | None = None

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a part of a larger graph
            return self._forward(*args, **kwargs)
        if self._run is None:
            forward = unwrapped(self._forward)
            self._run = torch.compile(forward, backend=self._backend, dynamic=self._dynamic)
        layer = _last_layer(self._block)
        with own_graph():
            output = self._run(*args, **kwargs)
        # Inside of a graph what is split over tp is plain.
        return output if layer is None or layer.tp_size == 1 else layer.marked_output(output)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the compiled code, which belongs to this block alone."""
        return {**self.__dict__, "_run": None}
