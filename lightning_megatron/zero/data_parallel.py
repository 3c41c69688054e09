"""Data parallelism: ZeRO 0 to 3 and hybrid sharding, and what all stages have in common.

With ``P`` parameters of this rank's pipeline stage and tp shard and ``n`` microbatches, per
optimizer step:

====  ============================  ==========================  ==============================
zero  kept sharded                  parameters gathered         gradients reduced
====  ============================  ==========================  ==============================
0     nothing                       never                       all-reduce ``P``, once
1     optimizer state               after the step (``P``)      reduce-scatter ``P``, once
2     the same, and gradients       the same                    reduce-scatter ``P``, ``n`` times
3     parameters too                before forward and          reduce-scatter ``P``, ``n`` times
                                    backward of each microbatch
====  ============================  ==========================  ==============================

Experts lie over axes of their own (`topology.coordinates`): their ``P`` is that of one ep rank, and
they are divided, and averaged, over the ranks that hold the same experts, which reach over tp.

Below ZeRO 3 the parameters of a module are whole, plain tensors, as under
``DistributedDataParallel``, so whatever a module may do there it may do here
(`zero.whole_parameters`). ZeRO 3 is FSDP2 (`zero.fully_sharded`). (Rajbhandari et al.,
arXiv 1910.02054.) Reduction is a mean over the data-parallel ranks.
"""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron._torch.fsdp import class_name
from lightning_megatron.errors import lists_of_names, switches, whole_numbers
from lightning_megatron.optim.sharded_step import RowShard
from lightning_megatron.zero.owned_rows import OwnedRows


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """ZeRO: what it divides, over how many ranks, in which units, and where it keeps its part."""

    stage: Literal[0, 1, 2, 3]
    """0 replicates; 1 shards optimizer state and reduces gradients once per step; 2 reduces them
    every microbatch; 3 shards parameters too (`zero.data_parallel`)."""
    wrap: list[str] | None = None
    """In stage 3, class names of the modules to treat as units. None: the items of a
    PipelineSequential and of every other ``nn.ModuleList`` or ``nn.Sequential``. An empty list: the
    whole module is one unit."""
    min_numel: int = 1
    """In stage 3, units with fewer parameters are joined with the rest of the module, so that
    a collective is worth its latency."""
    dp_replicate: int = 1
    """In stages 1 to 3, number of copies of the shards (hybrid sharding)."""
    offload_optimizer: bool = False
    """In stages 1 to 3 on GPUs, keep the optimizer state, and the values on which the optimizer
    steps, in host memory. Gradients come there after their reduction, values go back after the
    step; nothing runs beside it."""
    offload_parameters: bool = False
    """In stage 3 on GPUs, keep shards of parameters and gradients in pinned host memory, too.
    Beside the computation, parameters of a unit come ahead of their gather and gradients leave
    behind their reduction; the host waits for these after the backward."""
    compare_copies: bool = True
    """Compare what ranks hold alike before the first step, after steps 1, 2, 4, 8 and so on, and at
    the end of training, and end a run in which it differs (`strategy.replica_watch`)."""

    def problems(self, module: nn.Module | None) -> list[str]:
        """Faults of the options, and if ``module`` is given, of naming its classes."""
        faults = whole_numbers(0, min_numel=self.min_numel) + lists_of_names(wrap=self.wrap)
        faults += switches(
            offload_optimizer=self.offload_optimizer,
            offload_parameters=self.offload_parameters,
            compare_copies=self.compare_copies,
        )
        problems = [f"zero.{fault}" for fault in faults]
        if module is None or isinstance(cast(object, self.wrap), str):
            return problems
        classes = sorted({class_name(child) for child in module.modules()})
        for name in self.wrap or ():
            if name not in classes:
                close = difflib.get_close_matches(str(name), classes, n=1, cutoff=0.0)
                problems.append(
                    f"zero.wrap={name!r}: the module holds no {name}, so nothing would be "
                    f"wrapped; nearest valid: {close[0]!r}, or wrap=None"
                )
        return problems


@dataclass(frozen=True, kw_only=True)
class ComputeTypes:
    """Number formats that differ from that of the parameters at rest."""

    parameters: torch.dtype | None = None
    """Format of gathered parameters and of the computation."""
    reduction: torch.dtype | None = None
    """Format in which gradients are reduced."""


def dim_to_divide(stack: Tensor, ranks: int) -> int:
    """Dimension along which ranks divide a stack of experts: 1 where there are too few experts."""
    return int(stack.shape[0] < ranks and stack.ndim > 1 and stack.shape[1] % ranks == 0)


def has_no_rows(parameter: nn.Parameter) -> bool:
    """Whether ``parameter`` has nothing that ranks could divide."""
    return parameter.ndim == 0 or parameter.numel() == 0


def left_whole(module: nn.Module) -> set[nn.Parameter]:
    """Parameters that ZeRO 3 leaves whole on every rank.

    They have no rows, or a script (``torch.jit``) reads them: its modules let nobody put what was
    gathered in the place of a parameter.
    """
    scripts = (child for child in module.modules() if isinstance(child, torch.jit.ScriptModule))
    scripted = {parameter for script in scripts for parameter in script.parameters()}
    return scripted | {parameter for parameter in module.parameters() if has_no_rows(parameter)}


class ZeroDataParallel(Protocol):
    """The communication around the work on this rank's stages: gathers, reductions, and their end.

    It is also the `Reduction` that the runner of a pipeline tells of every forward and backward.

    Attributes:
        rows: what the optimizer of this rank steps on in place of a whole parameter.
        lends: what it steps on in place of any parameter.
    """

    rows: Mapping[nn.Parameter, OwnedRows]
    lends: Mapping[nn.Parameter, RowShard]

    @property
    def accumulates_in_grad(self) -> bool:
        """Whether gradients of blocked backwards lie in ``.grad`` until later ones are reduced."""
        ...

    @property
    def communicates_every_microbatch(self) -> bool:
        """Whether ranks must run equally many microbatches."""
        ...

    def begin(self, *, blocked: bool = False) -> None:
        """The backwards of a batch begin.

        Args:
            blocked: whether further batches are accumulated before the optimizer step.
        """
        ...

    def before_forward(self, stage: int = 0) -> None:
        """Begin to gather what the stage's forward needs first, while its input is under way."""
        ...

    def before_backward(self, stage: int = 0, *, last: bool = True, split: bool = False) -> None:
        """Decide what the coming backward communicates.

        Args:
            stage: which of this rank's stages runs it.
            last: whether the stage's gradients of this batch are complete after it.
            split: whether weight gradients follow later (`after_weights`).
        """
        ...

    def after_weights(self, stage: int, *, last: bool) -> None:
        """Communicate after the weight part of a split backward."""
        ...

    def finish(self) -> None:
        """The backwards of the batch have ended: wait for what was started."""
        ...

    def after_step(self, optimizer: Optimizer) -> None:
        """Tell the other ranks what an optimizer has made of this rank's part; collective."""
        ...

    def gather_all(self) -> None:
        """Bring into the parameters what was written to this rank's part; collective."""
        ...

    def widen(self) -> bool:
        """Give parameters, and what is gathered of them, their format at rest; collective.

        Returns:
            Whether that has changed anything, and is to be undone.
        """
        ...

    def narrow(self) -> None:
        """Undo `widen`, if it was called; collective."""
        ...

    def come_to_rest(self) -> None:
        """Bring every parameter to its state between steps, as after evaluation."""
        ...

    def release(self, *, collective: bool = True) -> None:
        """A run has ended: leave parameters in their format at rest and without hooks.

        Args:
            collective: whether all ranks come here. After a failure they do not, and what this rank
                does not own may stay as rough as it was.
        """
        ...

    def resume(self) -> None:
        """Another run begins."""
        ...

    def dissolve(self) -> None:
        """Leave the modules alone, whose parameters are about to be replaced; after `release`."""
        ...

    def tell_backwards(self, hook: Callable[[], None] | None) -> None:
        """Call a hook whenever a backward is about to reduce, whoever runs it; None: no longer.

        What is reduced when this is told alone (`before_backward`) calls none.
        """
        ...

    def average_again(self) -> None:
        """Average what is in ``.grad`` of whole parameters; collective."""
        ...

    def show_gradients(self, whole: bool) -> None:
        """Say whether ``.grad`` is to hold the whole mean after a backward; on all ranks alike."""
        ...
