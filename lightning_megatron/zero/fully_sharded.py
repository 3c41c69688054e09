"""ZeRO 3: parameters, gradients and optimizer state in shards, by FSDP2.

FSDP2 gathers the parameters of a *unit* before its forward and again before its backward, frees
them afterwards, and reduces its gradients to shards after every backward. This file wraps the units
and steers when they communicate in a pipeline: gathers ahead of a stage's input, reductions after
the weight part of a split backward. What goes over the wires is counted in
`zero.fsdp_comm`.

A unit has one mesh. So experts, which other ranks hold than hold the rest of a block
(`Topology.experts`), are units of their own inside it, and are reduced by FSDP2 to the mean over
those ranks.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from typing_extensions import override

from lightning_megatron._torch.devices import pins
from lightning_megatron._torch.dtensor import has_hooks, has_storage, shard_of
from lightning_megatron._torch.fsdp import (
    add_hook,
    call_before_backward,
    fill_missing_gradients,
    gather_at_rest,
    handle_shards_as_memory,
    keep_reduced_gradients_wide,
    leave_other_tensors,
    let_copy,
    let_units_run_first,
    reduce_gradients,
    undo_sharding,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import expert_parameters, is_expert_layer
from lightning_megatron.layers.inplace_inputs import as_results, works_in_place
from lightning_megatron.optim.sharded_step import RowShard
from lightning_megatron.topology.mesh import ParameterAxes, Topology
from lightning_megatron.whole.memory import memory_of_parts
from lightning_megatron.zero.data_parallel import (
    ComputeTypes,
    ZeroDataParallel,
    dim_to_divide,
    left_whole,
)
from lightning_megatron.zero.fsdp_comm import (
    UnitGather,
    UnitOrder,
    UnitReduceScatter,
    count_sums,
)
from lightning_megatron.zero.owned_rows import OwnedRows
from lightning_megatron.zero.tied_half_params import TiedHalfParams


@memory_of_parts
class FullySharded(ZeroDataParallel):
    """Wraps modules with FSDP2 and steers its communication.

    Args:
        topology: the layout.
        types: number formats.
        experts: whether any rank has experts.
        offload: whether shards are kept in host memory.
        offload_optimizer: whether the optimizer steps on copies of the shards in host memory.
        follow_freezing: whether ``requires_grad`` may change between the forwards of one step, as
            ``toggle_optimizer`` does under manual optimization.

    Attributes:
        copies: what stands in for parameters that no unit holds.
        order: compares which units the ranks run.
    """

    def __init__(
        self,
        topology: Topology,
        types: ComputeTypes,
        *,
        experts: bool = False,
        offload: bool = False,
        offload_optimizer: bool = False,
        follow_freezing: bool = False,
    ) -> None:
        self._topology = topology
        self._policy = MixedPrecisionPolicy(
            param_dtype=types.parameters, reduce_dtype=types.reduction, cast_forward_inputs=False
        )
        self._follow_freezing = follow_freezing
        self._offload = OffloadPolicy()
        if offload:
            self._offload = CPUOffloadPolicy(pin_memory=pins(topology.device))
        self._host_steps = offload_optimizer and not offload
        self.rows: dict[nn.Parameter, OwnedRows] = {}
        self.lends: dict[nn.Parameter, RowShard] = {}
        self._units: list[FSDPModule] = []
        self._stages: list[_Stage] = []
        self.copies: TiedHalfParams | None = None
        self._names: Mapping[nn.Parameter, str] = {}
        self._storages: dict[nn.Parameter, torch.UntypedStorage] = {}
        self._dense = self._experts = _Mesh(topology.dense, topology.zero_mesh())
        if experts and topology.experts is not topology.dense:
            self._experts = _Mesh(topology.experts, topology.expert_mesh())
        group = topology.loss.group
        self.order = UnitOrder([] if group is None else dist.get_process_group_ranks(group))
        self._lacked: set[Any] = set()
        self._filled: list[Any] = []
        self._sent: tuple[dist.Work, Tensor] | None = None
        self._hook: Callable[[], None] | None = None
        self._undo_widen: list[Callable[[], None]] = []

    def wrap(
        self,
        module: nn.Module,
        *,
        stage: int | None = None,
        leave: Collection[nn.Parameter] = (),
    ) -> None:
        """Shard the parameters of ``module`` that no unit inside it holds yet.

        Args:
            module: what is gathered and freed as one.
            stage: for the outermost unit, which of this rank's stages it belongs to.
            leave: parameters to leave alone, besides those that cannot be sharded.
        """
        unmanaged = left_whole(module) | set(leave)
        over = self._experts if is_expert_layer(module) else self._dense
        fully_shard(
            module,
            mesh=over.mesh,
            shard_placement_fn=partial(_placement, expert_parameters(module), over.axes.shard.size),
            reshard_after_forward=True,
            mp_policy=self._policy_for(module, unmanaged),
            offload_policy=self._offload,
            ignored_params=unmanaged,
        )
        assert isinstance(module, FSDPModule)
        self._count(module, over)
        keep_reduced_gradients_wide(module)  # as `GradientSet.begin` expects them
        self._filled += fill_missing_gradients(module, self._lacked)
        handle_shards_as_memory(module)
        call_before_backward(module, self._begin_unit)
        if works_in_place(module):
            # It runs after FSDP2's.
            add_hook(module, lambda _, args: as_results(args))
        if self._follow_freezing:
            add_hook(module, _FreezeFollower(module))
        leave_other_tensors(module)
        let_copy(module)
        self._units.append(module)
        if stage is not None:
            self._stage(stage).roots.append(module)
            let_units_run_first(module)

    def _policy_for(
        self, module: nn.Module, unmanaged: Collection[nn.Parameter]
    ) -> MixedPrecisionPolicy:
        """Number formats for one unit."""
        inside = (unit for unit in self._units if isinstance(unit, nn.Module))
        taken = {p for unit in inside for p in unit.parameters()}.union(unmanaged)
        held_in = _one_format(module, taken)
        if self._policy.reduce_dtype is None and held_in is not None and held_in.itemsize < 4:
            return replace(self._policy, reduce_dtype=torch.float32)
        return self._policy

    def _count(self, unit: FSDPModule, over: "_Mesh") -> None:
        """Have what the unit sends counted."""
        meter = self._topology.loss.meter
        order, number = self.order, len(self._units)
        gather: Any = UnitGather(meter, order, number)  # torch keeps the interfaces' names
        scatter: Any = UnitReduceScatter(meter, order, number)
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(scatter)
        if over.axes.copies.size > 1:
            unit.set_all_reduce_hook(count_sums(over.axes.copies))

    @property
    def units(self) -> Sequence[FSDPModule]:
        """The units, each gathered and freed as one."""
        return self._units

    @property
    @override
    def accumulates_in_grad(self) -> bool:
        return False

    @property
    @override
    def communicates_every_microbatch(self) -> bool:
        return any(over.axes.mean.size > 1 for over in (self._dense, self._experts))

    @override
    def begin(self, *, blocked: bool = False) -> None:
        del blocked
        self._lacked.clear()
        if self.copies is not None:
            self.copies.drop()

    @override
    def before_forward(self, stage: int = 0) -> None:
        if stage >= len(self._stages):
            return
        held = self._stages[stage]
        if held.ran:  # before its first forward FSDP2 does not know its units
            for unit in (*held.roots, *held.units[:1]):
                unit.unshard(async_op=True)
        held.ran = True

    @override
    def before_backward(self, stage: int = 0, *, last: bool = True, split: bool = False) -> None:
        if stage >= len(self._stages):
            return
        # FSDP2 keeps its record of the forwards until the last backward. In a pipeline the forwards
        # of other microbatches are in it; one after the other, a stale record makes the backward
        # gather units that it is done with.
        in_flight = not last and self._topology.pp.size > 1
        self._stages[stage].set(sync=not split, last=not in_flight)

    @override
    def after_weights(self, stage: int, *, last: bool) -> None:
        if stage >= len(self._stages):
            return
        held = self._stages[stage]
        held.set(sync=True, last=last)
        for root in held.roots:
            reduce_gradients(root)

    @override
    def finish(self) -> None:
        self._refuse_hooks()
        self._refuse_assignments()
        self._drop_gradients_of_nobody()
        self.order.put()
        if self.copies is not None:
            self.copies.finish()

    def know(self, names: Mapping[nn.Parameter, str]) -> None:
        """Learn what errors are to call the parameters."""
        self._names = names
        self._storages = {p: p.untyped_storage() for p in names if isinstance(p, DTensor)}

    def _refuse_assignments(self) -> None:
        """Refuse what was lost: ``p.data = values`` changes a DTensor, and not the shard in it."""
        found = [
            self._names[parameter]
            for parameter, storage in self._storages.items()
            if not has_storage(parameter, storage)
        ]
        if found:
            raise ConfigError(
                f"{', '.join(found)}: .data was assigned, which under ZeRO 3 does not reach the "
                "shard that is trained; nearest valid: p.data.copy_(values), or zero=2"
            )

    def _refuse_hooks(self) -> None:
        refuse_hooks(
            name
            for parameter, name in self._names.items()
            if isinstance(parameter, DTensor) and has_hooks(parameter)
        )

    def _drop_gradients_of_nobody(self) -> None:
        """Take the zeros away that were reduced for a parameter which no rank has used.

        An optimizer would decay it and its moments. Only ranks without a gradient of their own read
        what the others say, as reading waits for the device.
        """
        self._forget_sent()
        # Copying a list to a GPU makes the host wait, and seldom is anything to be said.
        used = torch.ones(len(self._filled), dtype=torch.int32, device=self._topology.device)
        if self._lacked:
            used.copy_(torch.tensor([parameter not in self._lacked for parameter in self._filled]))
        group = self._topology.loss.group
        if group is not None:
            work = dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group, async_op=True)
            assert work is not None
            self._sent = work, used
            if self._lacked:
                work.wait()
        if self._lacked:
            for parameter, anybody in zip(self._filled, used.tolist(), strict=True):
                if not anybody:
                    parameter.sharded_param.grad = None
        self._lacked.clear()

    def _forget_sent(self) -> None:
        if self._sent is not None:
            self._sent[0].wait()  # it was over long ago
            self._sent = None

    def lend_from_host(self, parameters: Iterable[nn.Parameter]) -> None:
        """Have the optimizer step in host memory on these, where that is wanted."""
        if self._host_steps:
            sharded = (p for p in parameters if isinstance(p, DTensor))
            self.lends = {parameter: HostShard(parameter) for parameter in sharded}

    @override
    def after_step(self, optimizer: Optimizer) -> None:
        """Bring what was stepped on in host memory back; the next forward gathers."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                lent = self.lends.get(parameter)
                if isinstance(lent, HostShard):
                    lent.write_back()

    @override
    def release(self, *, collective: bool = True) -> None:
        if collective:
            self._forget_sent()
        self._sent = None
        self.narrow()
        self.come_to_rest()

    @override
    def resume(self) -> None:
        self.come_to_rest()

    @override
    def dissolve(self) -> None:
        for unit in self._units:
            undo_sharding(unit)
        self._units.clear()
        self._stages.clear()

    @override
    def gather_all(self) -> None:
        """No-op: parameters consist of shards."""

    @override
    def tell_backwards(self, hook: Callable[[], None] | None) -> None:
        self._hook = hook

    @override
    def average_again(self) -> None:
        """No-op: what was reduced by FSDP2 is not whole, so nobody can have assigned it."""

    def _begin_unit(self) -> None:
        """The backward of a unit begins.

        Raises:
            ConfigError: there will be gradients of gradients.
        """
        if torch.is_grad_enabled():
            raise ConfigError(
                "create_graph=True: gradients of gradients need weights that zero=3 has freed, and "
                "come after the reduction of the gradients; nearest valid: zero=2 or lower keeps "
                "parameters whole, or differentiate once"
            )
        if self._hook is not None:
            self._hook()

    @override
    def show_gradients(self, whole: bool) -> None:
        """No-op: only shards of gradients fit."""

    def gather_ahead(self, stage: int, units: Sequence[nn.Module]) -> None:
        """Fix the order of gathering for ``units`` of a stage that run one after another.

        FSDP2 derives it from the order of the forwards, which in a pipeline are interleaved with
        the backwards of other microbatches. Backward reaches a unit before the units inside it.
        """
        self._stage(stage).units = [u for u in units if isinstance(u, FSDPModule)]
        backwards: list[FSDPModule] = []
        for unit in reversed(units):
            inside = [m for m in unit.modules() if isinstance(m, FSDPModule) and m is not unit]
            backwards += [m for m in (unit, *reversed(inside)) if isinstance(m, FSDPModule)]
        for index, each in enumerate(backwards):
            # The last unit has none after it; its own is there already, and keeps FSDP2 from
            # choosing another.
            each.set_modules_to_backward_prefetch([backwards[min(index + 1, len(backwards) - 1)]])

    @override
    def widen(self) -> bool:
        if self._policy.param_dtype is None or self._undo_widen:
            return False
        self.come_to_rest()
        self._undo_widen = [gather_at_rest(unit) for unit in self._units]
        return True

    @override
    def narrow(self) -> None:
        if self._undo_widen:
            self.come_to_rest()
            for undo in self._undo_widen:
                undo()
            self._undo_widen = []

    @override
    def come_to_rest(self) -> None:
        for unit in self._units:
            unit.reshard()
        if self.copies is not None:
            self.copies.drop()

    def _stage(self, position: int) -> "_Stage":
        while len(self._stages) <= position:
            self._stages.append(_Stage())
        return self._stages[position]


def refuse_hooks(names: Iterable[str]) -> None:
    """Refuse hooks on parameters, which FSDP2 never calls.

    Raises:
        ConfigError: there are names.
    """
    found = list(names)
    if found:
        raise ConfigError(
            f"{', '.join(found)}: Tensor.register_hook was called on a parameter, and under ZeRO 3 "
            "such a hook is never called, as autograd knows the gathered parameter only; nearest "
            "valid: zero=2, or under zero=3 on_after_backward or "
            "Tensor.register_post_accumulate_grad_hook, which see this rank's part of the mean"
        )


@memory_of_parts
class HostShard:
    """A copy of a shard in host memory, on which the optimizer steps.

    Args:
        parameter: sharded by FSDP2.
    """

    def __init__(self, parameter: DTensor) -> None:
        self._parameter = parameter
        self._values: Tensor | None = None

    def refresh(self) -> Tensor:
        """The copy, with the shard's values."""
        shard = shard_of(self._parameter).detach()
        if self._values is None:
            self._values = shard.to("cpu", copy=True)
        else:
            self._values.copy_(shard)
        return self._values

    def lend_gradient(self) -> None:
        """Bring the gradient to the copy."""
        assert self._values is not None
        gradient = self._parameter.grad
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        self._values.grad = None if local is None else local.to("cpu", self._values.dtype)

    def forget_gradient(self) -> None:
        """Forget the shard's gradient."""
        self._parameter.grad = None

    def write_back(self) -> None:
        """Bring the copy's values to the shard."""
        if self._values is not None:
            shard_of(self._parameter).detach().copy_(self._values)


@dataclass(frozen=True)
class _Mesh:
    """Ranks over which one kind of parameters lies."""

    axes: ParameterAxes
    mesh: DeviceMesh


def _placement(
    experts: Collection[nn.Parameter], ranks: int, parameter: nn.Parameter
) -> Shard | None:
    """Dimension along which ranks divide a parameter; 0 if None."""
    dim = dim_to_divide(parameter, ranks) if parameter in experts else 0
    return Shard(dim) if dim else None


class _Stage:
    """The part of one stage that data parallelism steers."""

    def __init__(self) -> None:
        self.roots: list[FSDPModule] = []
        """Outermost units."""
        self.units: list[FSDPModule] = []
        """The units inside, in the order in which they run."""
        self.ran = False
        """Whether it has run forward."""
        self._sync = self._last = True

    def set(self, *, sync: bool, last: bool) -> None:
        """Switch FSDP2's communication; setting is slow, so only where something changes."""
        for root in self.roots:
            if sync != self._sync:
                root.set_requires_gradient_sync(sync)
            if last != self._last:
                root.set_is_last_backward(last)
        self._sync = sync
        self._last = last


class _FreezeFollower:
    """Forward pre-hook that keeps ``requires_grad`` of gathered parameters and their shards alike.

    FSDP2 copies the flag when it gathers a parameter. The optimizer (and ``toggle_optimizer``)
    holds the shards, the module shows the gathered parameters: whichever of the two changed last is
    what the user wants.

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


def _one_format(unit: nn.Module, elsewhere: Collection[nn.Parameter]) -> torch.dtype | None:
    """Number format of the trained parameters of ``unit``; None if all are frozen.

    The gradients of a unit are laid end to end and reduced together, so they have one format. What
    is frozen has none: a network in bfloat16 takes adapters in float32.

    Args:
        unit: what is gathered and reduced as one.
        elsewhere: parameters in it that are not.

    Raises:
        ConfigError: there are several.
    """
    formats: dict[torch.dtype, str] = {}
    for name, parameter in unit.named_parameters():
        if parameter.requires_grad and parameter not in elsewhere:
            formats.setdefault(parameter.dtype, name)
    if len(formats) > 1:
        found = ", ".join(f"{name} in {str(held_in)[6:]}" for held_in, name in formats.items())
        raise ConfigError(
            f"parameters in several formats in one unit of ZeRO: {found}; their gradients travel "
            "together; nearest valid: one format for all that is trained (precision='bf16-true' "
            "makes it one), or zero=0 with precision='32-true'"
        )
    return next(iter(formats), None)
