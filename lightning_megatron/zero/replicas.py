"""What ranks hold alike, and its comparison.

Under every layout some ranks hold equal bits: below ZeRO 3 all data-parallel ranks have each
parameter, under tp what is not sliced, under a pipeline what lies outside of the trunk or is tied.
An optimizer keeps them equal as long as it steps on equal gradients. A hook that writes on one rank
only, a gradient that nobody has averaged, or a bit that flips ends that, and nothing else shows it.

A comparison reads each tensor once (`fault_tolerance.replica_comparison`) and gathers a digest from
each rank; only if digests differ do fingerprints of single tensors go around.
"""

from collections.abc import Sequence
from functools import cache

from torch import Tensor
from torch.optim import Optimizer

from lightning_megatron.comm.peers import Peers
from lightning_megatron.fault_tolerance.replica_comparison import (
    Difference,
    Holders,
    SharedTensor,
    condense,
    differences,
    fingerprints,
    unequal,
)
from lightning_megatron.topology.coordinates import groups_along
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.memory import own_weights
from lightning_megatron.zero.gradients import GradientSet, ParameterRole, local


@own_weights
def shared_weights(gradients: GradientSet) -> list[SharedTensor]:
    """Parameters of this rank that other ranks hold, too."""
    found = []
    for role in gradients.roles:
        # Below ZeRO 3 all data-parallel ranks hold a parameter, and each owns a part of it.
        divided = role.is_divided and role.rows is None
        holders = _holders(role, gradients.topology, divided=divided)
        if holders is not None:
            held = local(role.parameter.detach())
            found.append(SharedTensor(name=role.name, tensor=held, holders=holders))
    return found


@own_weights
def shared_state(gradients: GradientSet, optimizers: Sequence[Optimizer]) -> list[SharedTensor]:
    """What the optimizers of this rank keep of parameters, and others keep as well."""
    found = []
    for role in gradients.roles:
        holders = _holders(role, gradients.topology, divided=role.is_divided)
        if holders is None:
            continue
        if role.rows is not None and role.rows.is_copy:
            name = f"{role.name}: main copy of the optimizer"
            found.append(SharedTensor(name=name, tensor=role.rows.values, holders=holders))
        for number, optimizer in enumerate(optimizers):
            for key, value in optimizer.state.get(role.parameter, {}).items():
                if isinstance(value, Tensor):
                    name = f"{role.name}: {key} of optimizer {number}"
                    found.append(SharedTensor(name=name, tensor=local(value), holders=holders))
    return found


@own_weights
def trained_names(gradients: GradientSet, optimizers: Sequence[Optimizer]) -> list[str]:
    """Names of the module's parameters that an optimizer of this rank steps on."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    return [
        role.name
        for role in gradients.roles
        if role.parameter.requires_grad and id(role.parameter) in held
    ]


def compare(held: Sequence[SharedTensor], peers: Peers) -> list[Difference] | None:
    """The tensors whose copies differ; None where no ranks hold anything alike. Collective.

    Args:
        held: what this rank has of them.
        peers: all ranks of the run.
    """
    prints = fingerprints([one.tensor for one in held])
    everyone = peers.all_gather(condense(held, prints))
    doubtful = unequal(everyone)
    if not doubtful:
        return [] if any(everyone) else None
    mine = {
        (one.holders, one.name): value
        for one, value in zip(held, prints, strict=True)
        if one.holders in doubtful
    }
    return differences(peers.all_gather(mine))


def _holders(role: ParameterRole, topology: Topology, *, divided: bool) -> Holders | None:
    """Ranks that hold the same part of a parameter; None if only this one does.

    Args:
        role: role of the parameter.
        topology: the layout.
        divided: whether data-parallel ranks have different parts.
    """
    axes = role.axes(topology)
    along = [axes.copies]
    if not divided:
        along.append(axes.shard)
    if role.shard is None or role.shard.dim is None:
        along.append(axes.layer)
    if role.outside or role.tied_ranks:
        along.append(topology.pp)
    names = tuple(axis.name for axis in along if axis.size > 1)
    if not names:
        return None
    first = _first_along(names, topology.degrees, topology.rank)
    if role.tied_ranks and not role.outside:
        return (*names, *map(str, role.tied_ranks)), first
    return names, first


@cache
def _first_along(axes: Sequence[str], degrees: Degrees, rank: int) -> int:
    """Lowest of the ranks that are reached from ``rank`` along axes."""
    ranks = {rank}
    for axis in axes:
        ranks = {r for group in groups_along(axis, degrees) if ranks & set(group) for r in group}
    return min(ranks)
