"""Data parallelism: ZeRO 0 to 3 and hybrid sharding.

FSDP2 carries all stages but ZeRO 0 without mixed precision (`parallel.reduce`). What differs is
when they communicate. With ``P`` parameters of this rank's pipeline stage and tp shard, ``n``
microbatches and ``d`` ranks, per optimizer step:

====  ============================  ==========================  ==============================
zero  kept sharded                  parameters gathered         gradients reduced
====  ============================  ==========================  ==============================
0     nothing                       never                       all-reduce ``P``, once
1     optimizer state, gradients    once (``P``)                reduce-scatter ``P``, once
2     the same                      once (``P``)                reduce-scatter ``P``, ``n`` times
3     parameters too                before forward and          reduce-scatter ``P``, ``n`` times
                                    backward of each microbatch
====  ============================  ==========================  ==============================

ZeRO 1 keeps the full gradients of the microbatches locally and reduces them with the last backward,
overlapping it; ZeRO 2 holds only shards between microbatches. (Rajbhandari et al.,
arXiv 1910.02054; FSDP2's ``set_requires_gradient_sync`` and ``reshard_after_forward`` are the
switches.) Reduction is a mean over the data-parallel ranks.
"""

import difflib
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from lightning_megatron._torch import (
    accumulate_gradients,
    keep_reduced_gradients_wide,
    reduce_gradients,
    replicate,
)
from lightning_megatron.parallel.formats import one_format
from lightning_megatron.parallel.low_copies import LowCopies
from lightning_megatron.parallel.plan import class_name
from lightning_megatron.parallel.reduce import MeanReducer
from lightning_megatron.parallel.unit_comm import UnitGather, UnitReduceScatter, count_sums
from lightning_megatron.pipeline.entering import as_results, works_in_place
from lightning_megatron.problems import lists_of_names, switches, whole_numbers
from lightning_megatron.topology.mesh import Topology


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """What ZeRO gathers and frees as one unit, and over how many ranks its shards are spread."""

    wrap: list[str] | None = None
    """Class names of the modules to treat as units. None: the items of a PipelineSequential and of
    every other ``nn.ModuleList`` or ``nn.Sequential``. An empty list: the whole module is one
    unit."""
    min_numel: int = 1_000_000
    """Below ZeRO 3, units with fewer parameters are joined with the rest of the module, so that a
    collective is worth its latency."""
    dp_replicate: int = 1
    """With ``zero`` 1 to 3, number of copies of the shards (hybrid sharding)."""
    cpu_offload: bool = False
    """With ``zero`` 1 to 3 on GPUs, keep shards of parameters, gradients and optimizer state in
    pinned host memory, where the optimizer steps. Beside the computation, parameters of a unit come
    ahead of their gather and gradients leave behind their reduction; the host waits for these after
    the backward. Nothing runs beside the step, nor beside sums of microbatches (``zero`` 2, 3)."""

    def problems(self, module: nn.Module | None) -> list[str]:
        """Faults of the options, and if ``module`` is given, of naming its classes."""
        faults = whole_numbers(0, min_numel=self.min_numel) + lists_of_names(wrap=self.wrap)
        faults += switches(cpu_offload=self.cpu_offload)
        problems = [f"sharding.{fault}" for fault in faults]
        if module is None or isinstance(cast(object, self.wrap), str):
            return problems
        classes = sorted({class_name(child) for child in module.modules()})
        for name in self.wrap or ():
            if name not in classes:
                close = difflib.get_close_matches(str(name), classes, n=1, cutoff=0.0)
                problems.append(
                    f"sharding.wrap={name!r}: the module holds no {name}, so nothing would be "
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


def is_unmanaged(parameter: nn.Parameter) -> bool:
    """Whether FSDP2 cannot take ``parameter``: it has nothing to shard."""
    return parameter.ndim == 0 or parameter.numel() == 0


class DataParallel:
    """Wraps modules with FSDP2 and steers its communication.

    Args:
        topology: the layout.
        zero: ZeRO stage.
        types: number formats.
        cpu_offload: whether shards are kept in host memory.
        follow_freezing: whether ``requires_grad`` may change between the forwards of one step, as
            ``toggle_optimizer`` does under manual optimization.

    Attributes:
        copies: what stands in for parameters that no unit holds.
    """

    def __init__(
        self,
        topology: Topology,
        zero: int,
        types: ComputeTypes,
        *,
        cpu_offload: bool = False,
        follow_freezing: bool = False,
    ) -> None:
        self._topology = topology
        self._zero = zero
        self._policy = MixedPrecisionPolicy(
            param_dtype=types.parameters, reduce_dtype=types.reduction, cast_forward_inputs=False
        )
        self._follow_freezing = follow_freezing
        # Without shards and casts FSDP2 would only reduce, see `parallel.reduce`.
        self.replicates = zero == 0 and types.parameters is None
        spread = topology.batch.size > 1 or cpu_offload
        self.enabled = types.parameters is not None or (spread and zero > 0)
        self._offload = OffloadPolicy()
        if cpu_offload:
            self._offload = CPUOffloadPolicy(pin_memory=topology.device.type != "cpu")
            if topology.device.type == "cpu" and topology.rank == 0:
                warnings.warn(
                    "sharding.cpu_offload=True: this run is on CPUs, in whose memory everything is "
                    "anyway; it changes nothing",
                    stacklevel=2,
                )
        self._units: list[FSDPModule] = []
        self._stages: list[_Stage] = []
        self.copies: LowCopies | None = None
        self._blocked = False

    def wrap(
        self,
        module: nn.Module,
        *,
        stage: int | None = None,
        leave: Collection[nn.Parameter] = (),
    ) -> None:
        """Shard (or replicate) the parameters of ``module`` that no unit inside it holds yet.

        Args:
            module: what is gathered and freed as one.
            stage: for the outermost unit, which of this rank's stages it belongs to.
            leave: parameters to leave alone, besides those that cannot be sharded.
        """
        mesh = self._topology.mesh
        unmanaged = {p for p in module.parameters() if is_unmanaged(p)} | set(leave)
        policy = self._policy_for(module, unmanaged)
        if self._zero == 0:
            replicate(
                module,
                mesh=mesh["dp_replicate"],
                mp_policy=policy,
                ignored_params=unmanaged,
            )
        else:
            hybrid = self._topology.dp_replicate.size > 1
            names: Any = ("dp_replicate", "dp_shard") if hybrid else "dp_shard"
            fully_shard(
                module,
                mesh=mesh[names],
                reshard_after_forward=self._zero == 3,
                mp_policy=policy,
                offload_policy=self._offload,
                ignored_params=unmanaged,
            )
        assert isinstance(module, FSDPModule)
        self._count(module)
        keep_reduced_gradients_wide(module)  # as `GradientSet.begin` expects them
        if works_in_place(module):
            # It runs after FSDP2's.
            module.register_forward_pre_hook(lambda _, args: as_results(args))
        if self._follow_freezing:
            module.register_forward_pre_hook(_FreezeFollower(module))
        self._units.append(module)
        if stage is not None:
            self._stage(stage).roots.append(module)

    def _policy_for(
        self, module: nn.Module, unmanaged: Collection[nn.Parameter]
    ) -> MixedPrecisionPolicy:
        """Number formats for one unit."""
        inside = (unit for unit in self._units if isinstance(unit, nn.Module))
        taken = {p for unit in inside for p in unit.parameters()}.union(unmanaged)
        held_in = one_format(module, taken)
        if self._policy.reduce_dtype is None and held_in is not None and held_in.itemsize < 4:
            return replace(self._policy, reduce_dtype=torch.float32)
        return self._policy

    def _count(self, unit: FSDPModule) -> None:
        """Have what the unit sends counted."""
        topology, meter = self._topology, self._topology.batch.meter
        if self._zero:
            gather: Any = UnitGather(meter)  # torch keeps the interfaces' names private
            scatter: Any = UnitReduceScatter(meter)
            unit.set_custom_all_gather(gather)
            unit.set_custom_reduce_scatter(scatter)
        copies = topology.dp_replicate.size if self._zero else topology.batch.size
        if copies > 1:
            unit.set_all_reduce_hook(count_sums(meter, copies))

    def reduce_whole(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        """Average the gradients of parameters that no unit holds; collective.

        Args:
            parameters: of each stage of this rank.
        """
        group = self._topology.new_group("batch")
        if group is not None:
            for stage, members in enumerate(parameters):
                self._stage(stage).whole = MeanReducer(
                    members, group, meter=self._topology.batch.meter
                )

    @property
    def units(self) -> Sequence[FSDPModule]:
        """What is gathered and freed as one."""
        return self._units

    @property
    def accumulates_in_grad(self) -> bool:
        """Whether gradients of blocked backwards lie in ``.grad`` until later ones are reduced."""
        return any(stage.whole is not None for stage in self._stages)

    @property
    def communicates_every_microbatch(self) -> bool:
        """Whether ranks must run equally many microbatches."""
        return self._zero >= 2 and self._topology.batch.size > 1

    def begin(self, *, blocked: bool = False) -> None:
        """The backwards of a batch begin.

        Args:
            blocked: whether further batches are accumulated before the optimizer step.
        """
        self._blocked = blocked
        if self.copies is not None:
            self.copies.drop()

    def before_forward(self, stage: int = 0) -> None:
        """Begin to gather what the stage's forward needs first, while its input is under way."""
        if self._zero != 3 or stage >= len(self._stages):
            return
        held = self._stages[stage]
        if held.ran:  # before its first forward FSDP2 does not know its units
            for unit in (*held.roots, *held.units[:1]):
                unit.unshard(async_op=True)
        held.ran = True

    def before_backward(self, stage: int = 0, *, last: bool = True, split: bool = False) -> None:
        """Decide what the coming backward communicates.

        Args:
            stage: which of this rank's stages runs it.
            last: whether the stage's gradients of this batch are complete after it.
            split: whether weight gradients follow later (`after_weights`).
        """
        if stage >= len(self._stages):
            return
        done = last and not self._blocked
        # FSDP2 keeps its record of the forwards until the last backward. In a pipeline the forwards
        # of other microbatches are in it; one after the other, a stale record makes the backward
        # gather units that it is done with.
        in_flight = not last and self._topology.pp.size > 1
        held = self._stages[stage]
        if done and held.whole is not None:
            held.whole.arm()
        held.set(
            sync=not split and (done or self._zero >= 2),
            last=not in_flight,
            reshard=done or self._zero == 3,
        )

    def after_weights(self, stage: int, *, last: bool) -> None:
        """Communicate after the weight part of a split backward."""
        if stage >= len(self._stages):
            return
        done, held = last and not self._blocked, self._stages[stage]
        if done and held.whole is not None:
            held.whole.start()
        if held.roots and (done or self._zero >= 2):
            held.set(sync=True, last=last, reshard=done or self._zero == 3)
            for root in held.roots:
                reduce_gradients(root)
        else:
            for root in held.roots:
                accumulate_gradients(root)

    def finish(self) -> None:
        """The backwards of the batch have ended: wait for what was started."""
        if self.copies is not None:
            self.copies.finish()
        for stage in self._stages:
            if stage.whole is not None and not self._blocked:
                stage.whole.finish()

    def gather_ahead(self, stage: int, units: Sequence[nn.Module]) -> None:
        """Fix the order of gathering for ``units`` of a stage that run one after another.

        FSDP2 derives it from the order of the forwards, which in a pipeline are interleaved with
        the backwards of other microbatches.
        """
        managed: list[FSDPModule] = [u for u in units if isinstance(u, FSDPModule)]
        self._stage(stage).units = managed
        for index, unit in enumerate(managed):
            # The first unit has none before it; its own is there already, and keeps FSDP2 from
            # choosing another.
            unit.set_modules_to_backward_prefetch([managed[max(index - 1, 0)]])

    def reshard(self) -> None:
        """Return every parameter to its state at rest (after evaluation, before saving)."""
        for unit in self._units:
            unit.reshard()
        if self.copies is not None:
            self.copies.drop()

    def _stage(self, position: int) -> "_Stage":
        while len(self._stages) <= position:
            self._stages.append(_Stage())
        return self._stages[position]


class _Stage:
    """What of one stage data parallelism steers."""

    def __init__(self) -> None:
        self.roots: list[FSDPModule] = []
        """Outermost units."""
        self.units: list[FSDPModule] = []
        """The units inside, in the order in which they run."""
        self.ran = False
        """Whether it has run forward."""
        self.whole: MeanReducer | None = None
        self._sync = self._last = self._reshard = True

    def set(self, *, sync: bool, last: bool, reshard: bool) -> None:
        """Switch FSDP2's communication; setting is slow, so only where something changes."""
        for root in self.roots:
            if sync != self._sync:
                root.set_requires_gradient_sync(sync)
            if last != self._last:
                root.set_is_last_backward(last)
            if reshard != self._reshard:
                root.set_reshard_after_backward(reshard)
        self._sync, self._last, self._reshard = sync, last, reshard


class _FreezeFollower:
    """Forward pre-hook that keeps ``requires_grad`` of gathered parameters and their shards alike.

    FSDP2 copies the flag when it gathers a parameter, and below ZeRO 3 a parameter stays gathered
    from its forward to its backward. The optimizer (and ``toggle_optimizer``) holds the shards, the
    module shows the gathered parameters: whichever of the two changed last is what the user wants.

    Args:
        module: just wrapped.
    """

    def __init__(self, module: nn.Module) -> None:
        self._entries = [
            (owner, name, shard)
            for owner in module.modules()
            for name, shard in owner.named_parameters(recurse=False)
        ]
        self._seen = [shard.requires_grad for _, _, shard in self._entries]

    def __call__(self, module: nn.Module, args: Any) -> None:
        for index, (owner, name, shard) in enumerate(self._entries):
            gathered, flag = getattr(owner, name), shard.requires_grad
            if flag == self._seen[index] and gathered.requires_grad != flag:
                flag = gathered.requires_grad
                shard.requires_grad_(flag)
            elif gathered.requires_grad != flag:
                gathered.requires_grad_(flag)
            self._seen[index] = flag
