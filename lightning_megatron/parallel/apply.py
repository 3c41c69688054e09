"""Puts a module on a layout.

The order of the transforms is fixed here and nowhere else:

1. plan on the whole module (names, ties, stages);
2. copy rank 0's weights to all ranks, if the module was built with real ones;
3. drop the items of other pipeline stages;
4. slice the parallel layers, and tie again what slicing separated;
5. compile blocks, and have them forget or move their activations (`parallel.block_transforms`),
   inside of what ZeRO hooks on them;
6. unit by unit: initialise what is on the meta device, move it to the device, and give it to data
   parallelism, so that beside what a rank is to keep there is never more than one unit as it was.

The file is long as the order of the steps is to be read in one place.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_megatron._torch.devices import in_host_memory
from lightning_megatron._torch.dtensor import has_hooks
from lightning_megatron._torch.fsdp import move_outside_units
from lightning_megatron.build.init import materialize
from lightning_megatron.build.stored_tensor import StoredTensor
from lightning_megatron.build.written_values import WrittenValues
from lightning_megatron.layers.base import ParallelLayer, is_expert_layer
from lightning_megatron.layers.context_exit import ContextExit
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem
from lightning_megatron.parallel.activations.config import (
    ActivationConfig,
    blocks_to_recompute,
)
from lightning_megatron.parallel.block_transforms import transform_blocks
from lightning_megatron.parallel.compile import CompileConfig
from lightning_megatron.parallel.context_check.check import check_parts_of_sequences
from lightning_megatron.parallel.plan import ModulePlan, PipelineConfig, units
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.tensor_shard import TensorShard
from lightning_megatron.zero.data_parallel import (
    ComputeTypes,
    ShardingConfig,
    ZeroDataParallel,
    has_no_rows,
    left_whole,
)
from lightning_megatron.zero.fully_sharded import FullySharded, refuse_hooks
from lightning_megatron.zero.gradients import GradientSet, ParameterRole
from lightning_megatron.zero.tied_half_params import TiedHalfParams
from lightning_megatron.zero.whole_parameters import WholeParameters


@dataclass(frozen=True, kw_only=True)
class Transforms:
    """Transforms of the module beyond the layout itself."""

    types: ComputeTypes
    """Number formats."""
    pipeline: PipelineConfig
    """Partition of the trunk."""
    sharding: ShardingConfig
    """ZeRO stage and the units of ZeRO."""
    activations: ActivationConfig = ActivationConfig()
    """Blocks whose activations are recomputed or offloaded."""
    compile: CompileConfig = CompileConfig()
    """Parts that run compiled."""
    stage_ranks: tuple[int, ...] | None = None
    """Pipeline rank of every stage; one stage per rank by default."""
    lasting: str = ""
    """Description of the choices that no later Trainer can change."""
    manual_optimization: bool = False
    """Whether the user drives backward: under ZeRO 3 every child of the module is then a root of
    its own."""


class _Ready(Protocol):
    """Gives what is on meta or in files its values, on the device."""

    def __call__(self, module: nn.Module, /, leave: Collection[Tensor] = ()) -> None:
        """Leave alone the parameters ``leave``, of which FSDP2 will read this rank's rows."""
        ...


class Step(nn.Module):
    """The steps of a LightningModule as one callable, so that ZeRO's hooks surround them.

    Args:
        module: whose ``training_step`` and so on are called.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @override
    def forward(self, name: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = getattr(self.module, name) if isinstance(name, str) else name
        return call(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class ParallelModule:
    """A module on its layout."""

    module: nn.Module
    """The user's, changed in place."""
    step: nn.Module
    """Call ``step(name, *args)`` in place of ``module.<name>(*args)``."""
    topology: Topology
    """The layout."""
    transforms: Transforms
    """Transforms that were applied."""
    data: ZeroDataParallel
    """Steers ZeRO's communication."""
    gradients: GradientSet
    """This rank's parameters and gradients."""
    trunk: PipelineSequential | None
    """The pipelined part, if the module has one."""
    canonical: Mapping[str, str]
    """Canonical name of every parameter name of the whole module."""
    stages: tuple[range, ...] = ()
    """Item indices of every stage of the trunk; empty without a pipeline."""
    spare: Sequence[nn.Module] | None = None
    """Skeleton of the trunk for another layout (`parallel.skeleton`), if there may be one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelModule":
        """Return itself: the run goes on with the module that is copied (`layout_of`)."""
        return self


_LAYOUT = "_lightning_megatron_parallel"
"""Attribute under which a module remembers its layout, for a second Trainer."""


def layout_of(module: nn.Module) -> ParallelModule | None:
    """The layout that a module is on; None for a copy of one, which a user's hook has made."""
    found: ParallelModule | None = module.__dict__.get(_LAYOUT)
    return found if found is not None and found.module is module else None


def remember_layout(module: nn.Module, parallel: ParallelModule | None) -> None:
    """Let a module remember its layout, or with None forget it."""
    if parallel is None:
        module.__dict__.pop(_LAYOUT, None)
    else:
        module.__dict__[_LAYOUT] = parallel


def parallelize(
    module: nn.Module,
    topology: Topology,
    transforms: Transforms,
    written: WrittenValues | None = None,
) -> ParallelModule:
    """Put ``module`` on the layout, in place; collective over all processes.

    Args:
        module: real, or on the meta device.
        topology: the layout.
        transforms: what to do beside it.
        written: values that tensors on meta were given (`build.written_values`).

    Raises:
        ConfigError: the module does not fit the layout.
    """
    plan = ModulePlan(module, topology.degrees, transforms.pipeline, transforms.stage_ranks)
    if topology.cp.size > 1:
        checked = {k: trunk for k, trunk in plan.trunks.items() if not trunk.splits_sequences}
        check_parts_of_sequences(module, checked, topology)
    if topology.world_size > 1:
        _broadcast_weights(module, topology)
    names = {id(child): name for name, child in module.named_modules()}

    def initialise(part: nn.Module, leave: Collection[Tensor] = ()) -> None:
        materialize(
            part,
            names[id(part)],
            seed=topology.seed,
            device=topology.device,
            canonical=plan.canonical,
            written=written,
            leave=leave,
        )
        move_outside_units(part, topology.device)

    return _spread(module, plan, topology, transforms, initialise)


def parallelize_again(
    module: nn.Module, topology: Topology, transforms: Transforms
) -> ParallelModule:
    """Put a trunk of new items on the layout; collective over all processes.

    Args:
        module: a module that is on the layout but for the items of its trunk, which are whole and
            on the meta device.
        topology: the layout.
        transforms: those of before, with another partition.

    Returns:
        The module, in which the tensors of the trunk have memory and no values yet.
    """
    plan = ModulePlan(module, topology.degrees, transforms.pipeline, transforms.stage_ranks)
    assert plan.trunk is not None

    def allocate(part: nn.Module, leave: Collection[Tensor] = ()) -> None:
        del leave  # nothing is in files
        _allocate(part, topology.device)

    return _spread(module, plan, topology, transforms, allocate, new=plan.trunk)


def _allocate(module: nn.Module, device: torch.device) -> None:
    """Give memory to what is on the meta device; what is shared inside stays shared."""
    made: dict[Tensor, Tensor] = {}
    for child in module.modules():
        for own in (child._parameters, child._buffers):
            for name, old in own.items():
                if old is None or not old.is_meta:
                    continue
                if old not in made:
                    values = torch.empty_like(old, device=device)
                    made[old] = (
                        nn.Parameter(values, requires_grad=old.requires_grad)
                        if isinstance(old, nn.Parameter)
                        else values
                    )
                own[name] = made[old]  # type: ignore[assignment]  # of the same kind


def _spread(
    module: nn.Module,
    plan: ModulePlan,
    topology: Topology,
    transforms: Transforms,
    ready: _Ready,
    *,
    new: nn.Module | None = None,
) -> ParallelModule:
    """Steps 3 to 6; ``new`` is the part that is not on the layout yet."""
    tied_groups = _tied_groups(plan, topology)
    recomputed = blocks_to_recompute(module, transforms.activations)
    if topology.pp.size > 1:
        assert plan.trunk is not None
        plan.trunk.keep(plan.stages, plan.stages_of_rank(topology.pp.rank))
        _avoid_empty_stage(plan.trunk)
    _distribute(module if new is None else new, topology)
    transform_blocks(
        module,
        recomputed,
        transforms.activations,
        topology.device,
        topology.tp,
        transforms.compile,
    )
    if topology.rank == 0:
        _warn_of_idle_options(transforms, topology.device)
    sharding = transforms.sharding
    axes = topology.all_axes if plan.has_experts else (topology.dense,)
    divides = any(each.mean.size > 1 for each in axes)
    if sharding.stage == 3 and (divides or sharding.offload_parameters):
        data, step, roles = _shard(module, plan, topology, transforms, tied_groups, ready)
    else:
        data, step, roles = _keep_whole(module, plan, topology, transforms, tied_groups, ready)
    return ParallelModule(
        module=module,
        step=step,
        topology=topology,
        transforms=transforms,
        data=data,
        gradients=GradientSet(roles, topology, data.lends),
        trunk=plan.trunk,
        canonical=plan.canonical,
        stages=tuple(plan.stages) if topology.pp.size > 1 else (),
    )


def _warn_of_idle_options(transforms: Transforms, device: torch.device) -> None:
    """Say which options of sharding have no effect in this run."""
    sharding, plain = transforms.sharding, ShardingConfig(stage=1)
    for option in ("offload_optimizer", "offload_parameters"):
        if getattr(sharding, option) and in_host_memory(device):
            warnings.warn(
                f"zero.{option}=True: this run is on CPUs, in whose memory everything is "
                "anyway; it saves nothing",
                stacklevel=2,
            )
    for option in ("wrap", "min_numel"):
        given = getattr(sharding, option)
        if sharding.stage < 3 and given != getattr(plain, option):
            warnings.warn(
                f"zero.{option}={given!r}, zero={sharding.stage}: only zero=3 has units, so "
                "it changes nothing",
                stacklevel=2,
            )


def _broadcast_weights(module: nn.Module, topology: Topology) -> None:
    """Make every rank start from rank 0's values, where there are any."""
    tensors: list[Tensor] = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        if not (tensor.is_meta or isinstance(tensor, StoredTensor)):
            staged = tensor.detach().to(topology.device)
            dist.broadcast(staged, src=0)
            tensor.detach().copy_(staged)


def _avoid_empty_stage(trunk: PipelineSequential) -> None:
    """Give a stage without trainable parameters an empty one.

    ``Optimizer(self.parameters())`` in a user's ``configure_optimizers`` fails on an empty list.
    """
    if any(p.requires_grad for p in trunk.parameters()):
        return
    for item in trunk.items():
        if isinstance(item, RemoteItem):
            item.stand_in()
            return


def _shared_between_stages(trunk: PipelineSequential | None) -> set[nn.Parameter]:
    """Parameters that several stages of this rank share.

    No stage can hand them to ZeRO as its own; they stay whole, `GradientSet` averages them, and
    `low_copies` narrows them where ZeRO would.
    """
    holders: dict[nn.Parameter, int] = {}
    for items in trunk.stage_items if trunk is not None else ():
        for parameter in set(items.parameters()):
            holders[parameter] = holders.get(parameter, 0) + 1
    return {parameter for parameter, count in holders.items() if count > 1}


def _by_stage(
    roles: Sequence[ParameterRole], plan: ModulePlan, topology: Topology
) -> list[list[nn.Parameter]]:
    """The parameters that data parallelism averages, by the stage of this rank that holds them."""
    managed = [role.parameter for role in roles if not role.unmanaged]
    if topology.pp.size == 1 or plan.trunk is None:
        return [managed]
    stages = [set(items.parameters()) for items in plan.trunk.stage_items]
    return [[p for p in managed if p in stage] for stage in stages]


def _distribute(module: nn.Module, topology: Topology) -> None:
    """Slice the parallel layers; modules that shared a parameter share its slice."""
    first: dict[int, tuple[nn.Module, str]] = {}
    ties: list[tuple[nn.Module, str, nn.Module, str]] = []
    _enter_trunks(module, topology)
    found = False
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            owner = first.setdefault(id(parameter), (child, name))
            if owner != (child, name):
                ties.append((child, name, *owner))
    for number, child in enumerate(list(module.modules())):
        if isinstance(child, ParallelLayer):
            child.distribute(topology)
            found = True
        if isinstance(child, Experts):
            child.number = number
    for child, name, owner_module, owner_name in ties:
        setattr(child, name, getattr(owner_module, owner_name))
    if topology.tp.size > 1 and not found and topology.rank == 0:
        warnings.warn(
            f"tp={topology.tp.size}, but {type(module).__name__} has no parallel layers: its "
            "parameters and computation are replicated over tp. Build it from "
            "lightning_megatron.layers to split them",
            stacklevel=2,
        )


def _enter_trunks(module: nn.Module, topology: Topology) -> None:
    """Tell layers that they are inside of a trunk, and trunks how sequences are split."""
    inside: set[nn.Module] = set()
    for trunk in module.modules():
        if not isinstance(trunk, PipelineSequential):
            continue
        for layer in trunk.modules():
            if isinstance(layer, ParallelLayer):
                layer.in_trunk = True
        trunk.split_sequences(topology)
        if topology.cp.size > 1 and not trunk.splits_sequences:
            trunk.draws = partial(_draws_of_part, topology)
            if trunk not in inside:
                trunk.boundary = ContextExit(trunk, topology)
        inside.update(trunk.modules())


def _draws_of_part(topology: Topology) -> AbstractContextManager[None]:
    """Context in which items draw: ranks with other parts of a sequence draw other numbers."""
    return topology.rng.trunk() if topology.context.is_active else nullcontext()


_Spread = tuple[ZeroDataParallel, nn.Module, list[ParameterRole]]
_TiedGroups = Mapping[tuple[int, ...], dist.ProcessGroup | None]


def _keep_whole(
    module: nn.Module,
    plan: ModulePlan,
    topology: Topology,
    transforms: Transforms,
    tied_groups: _TiedGroups,
    ready: _Ready,
) -> _Spread:
    """ZeRO 0 to 2; also ZeRO 3 where there is nothing to divide."""
    sharding = transforms.sharding
    data = WholeParameters(
        topology, min(sharding.stage, 2), transforms.types, offload=sharding.offload_optimizer
    )
    pipelined = topology.pp.size > 1
    # What lies outside the trunk of a pipeline is held and reduced by `GradientSet`.
    scope = plan.trunk if pipelined and plan.trunk is not None else module
    for unit in units(scope, None, 1):
        ready(unit)
        data.own(unit, narrow=True)
    ready(module)
    between = _shared_between_stages(plan.trunk) if pipelined else set()
    data.own(scope, narrow=True)
    data.own(module, narrow=False)
    roles = _roles(module, plan, topology, tied_groups, between, data)
    data.reduce(_by_stage(roles, plan, topology), roles, experts=plan.has_experts)
    return data, Step(module), roles


def _shard(
    module: nn.Module,
    plan: ModulePlan,
    topology: Topology,
    transforms: Transforms,
    tied_groups: _TiedGroups,
    ready: _Ready,
) -> _Spread:
    """ZeRO 3."""
    data = FullySharded(
        topology,
        transforms.types,
        experts=plan.has_experts,
        offload=transforms.sharding.offload_parameters,
        offload_optimizer=transforms.sharding.offload_optimizer,
        follow_freezing=transforms.manual_optimization,
    )
    step, pipelined = Step(module), topology.pp.size > 1
    # What lies outside the trunk of a pipeline is held and reduced by `GradientSet`.
    scope = plan.trunk if pipelined and plan.trunk is not None else module
    by_hand = transforms.manual_optimization
    roots = list(_with_forward(module)) if by_hand else [scope]
    _refuse_early_hooks(module, roots, plan.trunk if pipelined else None)
    shared = _shared_between_stages(plan.trunk) if pipelined else set()
    divided = {p for root in roots for p in root.parameters()} - left_whole(module) - shared
    sharding = transforms.sharding
    apart = topology.experts is not topology.dense
    inner = [layer for layer in scope.modules() if apart and is_expert_layer(layer)]
    outer = [u for u in units(scope, sharding.wrap, sharding.min_numel) if _can_be_unit(u)]
    found = [unit for unit in outer if unit not in inner]
    if isinstance(scope, PipelineSequential):  # an adopted one has more than its items
        of_items = {child for items in scope.stage_items for child in items.modules()}
        inner, found = ([u for u in part if u in of_items] for part in (inner, found))
    for layer in inner:
        ready(layer, divided)
        data.wrap(layer)
    for unit in found:
        ready(unit, divided)
        data.wrap(unit, stage=0 if by_hand else None)
    if pipelined and plan.trunk is not None:
        for stage, items in enumerate(plan.trunk.stage_items):
            inside = set(items.modules())
            data.gather_ahead(stage, [unit for unit in found if unit in inside])
    ready(module, divided)
    # Once more: what was on meta is another parameter now.
    between = _shared_between_stages(plan.trunk) if pipelined else set()
    _wrap_roots(step, plan, topology, transforms, data, between)
    data.lend_from_host(module.parameters())
    roles = _roles(module, plan, topology, tied_groups, between, data)
    data.know({role.parameter: role.name for role in roles})
    return data, step, roles


def _refuse_early_hooks(
    module: nn.Module, roots: Sequence[nn.Module], trunk: PipelineSequential | None
) -> None:
    """Refuse hooks on what FSDP2 is about to put shards in the place of."""
    whole = _shared_between_stages(trunk)
    divided = {p for root in roots for p in root.parameters()} - left_whole(module) - whole
    refuse_hooks(name for name, p in module.named_parameters() if p in divided and has_hooks(p))


def _wrap_roots(
    step: Step,
    plan: ModulePlan,
    topology: Topology,
    transforms: Transforms,
    data: FullySharded,
    between: Collection[nn.Parameter],
) -> None:
    if topology.pp.size > 1:
        assert plan.trunk is not None
        for stage, items in enumerate(plan.trunk.stage_items):
            data.wrap(items, stage=stage, leave=between)
        types, stages = transforms.types, plan.trunk.stage_items
        if between and types.parameters is not None:
            data.copies = TiedHalfParams(
                step.module, between, types.parameters, types.reduction, stages
            )
    elif transforms.manual_optimization:
        for child in _with_forward(step.module):
            if not isinstance(child, FSDPModule) and any(True for _ in child.parameters()):
                data.wrap(child, stage=0)
    else:
        data.wrap(step, stage=0)


def _with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """The children of ``module``; in place of what has no forward, as lists, what is in it."""
    for child in module.children():
        if _has_forward(child):
            yield child
        else:
            yield from _with_forward(child)


def _has_forward(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):  # whose class has none
        return True
    return type(module).forward is not nn.Module.forward


def _can_be_unit(module: nn.Module) -> bool:
    """Whether ZeRO 3 can gather what a module holds when it is called."""
    return not isinstance(module, torch.jit.ScriptModule) and _has_forward(module)


def _tied_groups(
    plan: ModulePlan, topology: Topology
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """A group for every set of pipeline ranks that share a parameter; collective.

    Not that of a stream of messages (`pipeline.links`), in which a sum would wait for them.
    """
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for ranks in sorted(set(plan.tied_ranks.values())):
        if len(ranks) == topology.pp.size:
            groups[ranks] = topology.pp.group
            continue
        alone = tuple((rank,) for rank in range(topology.pp.size) if rank not in ranks)
        groups[ranks] = topology.new_part_group("pp", (ranks, *alone), "tied")
    return groups


def _roles(
    module: nn.Module,
    plan: ModulePlan,
    topology: Topology,
    tied_groups: _TiedGroups,
    between: Collection[nn.Parameter],
    data: ZeroDataParallel,
) -> list[ParameterRole]:
    """The treatment of the gradient of every parameter.

    Args:
        module: on its layout.
        plan: of the whole module.
        topology: the layout.
        tied_groups: of the pipeline ranks that share parameters.
        between: parameters that several stages of this rank share.
        data: holds the parameters.
    """
    pipelined = topology.pp.size > 1
    roles = []
    for name, parameter in module.named_parameters():
        canonical = plan.canonical.get(name)
        if canonical is None:  # the placeholder of an empty stage
            continue
        ranks = plan.tied_ranks.get(canonical, ())
        outside = pipelined and name not in plan.stage_of
        left_out = has_no_rows(parameter)
        if isinstance(data, FullySharded):
            left_out = not isinstance(parameter, DTensor)
        roles.append(
            ParameterRole(
                name=canonical,
                parameter=parameter,
                shard=_shard_of(module, name),
                outside=outside,
                unmanaged=outside or left_out or parameter in between,
                rows=data.rows.get(parameter),
                tied_ranks=ranks,
                tied_group=tied_groups.get(ranks) if ranks else None,
            )
        )
    return roles


def _shard_of(module: nn.Module, name: str) -> TensorShard | None:
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    return owner.tensor_shards.get(leaf) if isinstance(owner, ParallelLayer) else None
