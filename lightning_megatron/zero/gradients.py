"""Completion of gradients after backward and data-parallel reduction.

Rule: after `GradientSet.finish`, the gradient of every parameter (`ParameterRole.gradient`) is this
rank's part of the exact global gradient, whatever the layout. Data parallelism leaves four kinds
that it cannot know about:

* *partial over tp*: parameters held whole by all tp ranks that each saw only a part of the sequence
  (norms and row-parallel biases under sequence parallelism, replicated key/value projections).
  Their gradients are summed over tp.
* *tied over stages*: one parameter that items of several pipeline stages share (embedding and
  head). Summed over those stages.
* *outside the trunk*: parameters of a pipelined module that are not in its `PipelineSequential`.
  Every stage holds them. Averaged over the data-parallel ranks and summed over the stages, so it
  does not matter which stages used them.
* *unmanaged*: further parameters that data parallelism leaves whole (scalars; those that several
  stages of one rank share; those that only an optimizer knows; under ZeRO 3 with manual
  optimization those directly in the module).
  Averaged over the data-parallel ranks, those of experts over the ranks with the same experts.

Each kind costs one coalesced all-reduce per group, and one for each gradient of more than a million
elements, in float32 for narrower gradients.

The file is long because the kinds, the global norm and clipping go through the same roles.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lightning_megatron._torch.devices import from_host
from lightning_megatron._torch.dtensor import stamps
from lightning_megatron.optim.clip import (
    EPSILON,
    UnitClip,
    clip_coefficient,
    clip_value_,
    finiteness,
    global_squares,
    scale_,
)
from lightning_megatron.optim.shard_spec import PartialSum, ShardAxis, ShardSpec, reduce_sums
from lightning_megatron.optim.sharded_step import RowShard
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import ParameterAxes, Topology
from lightning_megatron.topology.tensor_shard import TensorShard
from lightning_megatron.whole.memory import memory_of_parts
from lightning_megatron.zero.owned_rows import OwnedRows


@memory_of_parts
@dataclass(frozen=True, kw_only=True)
class ParameterRole:
    """Everything about one parameter that its gradient's fate depends on."""

    name: str
    """Canonical global name."""
    parameter: nn.Parameter
    """Parameter as the optimizer sees it."""
    shard: TensorShard | None = None
    """Tensor-parallel placement; None for a parameter of an ordinary module."""
    outside: bool = False
    """Whether it lies outside the trunk of a pipelined module."""
    unmanaged: bool = False
    """Whether its gradient is left as each data-parallel rank found it."""
    rows: OwnedRows | None = None
    """Rows that this rank's optimizer owns, where these are not the parameter itself."""
    tied_ranks: tuple[int, ...] = ()
    """Pipeline ranks that hold it, when several do."""
    tied_group: dist.ProcessGroup | None = None
    """Group of those ranks."""
    of_optimizer: bool = False
    """Whether an optimizer knows it, and the layout does not."""

    def axes(self, topology: Topology) -> ParameterAxes:
        """Axes over which the parameter lies."""
        return topology.axes_of("tp" if self.shard is None else self.shard.axis)

    @property
    def values(self) -> Tensor:
        """The plain tensor on which this rank's optimizer steps."""
        return local(self.parameter).detach() if self.rows is None else self.rows.refresh()

    @property
    def gradient(self) -> Tensor | None:
        """The plain gradient of `values`, in the format in which it is held."""
        if self.rows is not None:
            return self.rows.mean_gradient()
        gradient = self.parameter.grad
        return None if gradient is None else local(gradient)

    @property
    def held_gradient(self) -> Tensor | None:
        """All that this rank has of the gradient: whole where ``.grad`` is whole."""
        if self.rows is not None and self.rows.gradient is not None:
            return self.rows.gradient
        gradient = self.parameter.grad
        return None if gradient is None else local(gradient)

    @property
    def holds_more_than_it_owns(self) -> bool:
        """Whether the gradient is whole here, and other ranks step on parts of it."""
        return self.rows is not None and not self.rows.is_whole and self.rows.gradient is None

    @property
    def is_divided(self) -> bool:
        """Whether data-parallel ranks own different parts."""
        if self.rows is not None:
            return not self.rows.is_whole
        return isinstance(self.parameter, DTensor) and any(
            isinstance(placement, Shard) for placement in self.parameter.placements
        )


NARROW = (torch.bfloat16, torch.float16)
"""Formats in which a sum over many microbatches would stall."""

_COALESCED = 1 << 20
"""Elements up to which gradients travel together; larger ones alone, without another copy."""


@memory_of_parts
class GradientSet:
    """The gradients of one rank's parameters.

    Args:
        roles: all trainable and frozen parameters of this rank.
        topology: the layout.
        lends: what this rank's optimizers step on in place of parameters.

    Attributes:
        lends: see above.
        last_norm: global norm as it was asked for the last time before clipping.
        complete: whether `finish` has completed the gradients that there are.
        before_use: called before anything is made of the gradients.
    """

    def __init__(
        self,
        roles: Sequence[ParameterRole],
        topology: Topology,
        lends: Mapping[nn.Parameter, RowShard] | None = None,
    ) -> None:
        self.roles = tuple(roles)
        self.lends: Mapping[Any, RowShard] = lends or {}
        self._topology = topology
        self.last_norm: Tensor | None = None
        self._known: _Squares | None = None
        self._asked: ParameterGroups | None = None
        self.complete = False
        self.before_use: Callable[[], None] | None = None
        self._aside: list[HeldGradient] = []
        world = topology.world_size > 1
        self._world_group = dist.group.WORLD if world else None
        self._sort()

    def _sort(self) -> None:
        """Find out which roles need what."""
        topology = self._topology
        self._partial = [
            r
            for r in self.roles
            if topology.tp.size > 1 and r.shard is not None and r.shard.sum_gradients
        ]
        # Rows that are wider than their parameters take wide gradients at all times.
        self._narrow = [
            r
            for r in self.roles
            if r.parameter.dtype in NARROW and (r.rows is None or not r.rows.is_wider)
        ]
        self._outside = [r for r in self.roles if r.outside]
        unmanaged = [r for r in self.roles if r.unmanaged]
        self._unmanaged = [
            (axes, found)
            for axes in topology.all_axes
            if (found := [r for r in unmanaged if r.axes(topology) is axes])
        ]
        self._tied: dict[tuple[int, ...], tuple[dist.ProcessGroup, list[ParameterRole]]] = {}
        # By name: ranks may hold the items that share parameters in another order.
        for role in sorted(self.roles, key=lambda role: role.name):
            if role.tied_group is not None:
                entry = self._tied.setdefault(role.tied_ranks, (role.tied_group, []))
                entry[1].append(role)
        tied = [role for _, roles in self._tied.values() for role in roles]
        summed = {id(role): role for role in (*self._partial, *self._outside, *tied)}
        self._summed = list(summed.values())
        self._with_rows = [r for r in self.roles if r.rows is not None]
        self._counted = {id(r.parameter): counts(r, topology) for r in self.roles}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All parameters, each once."""
        return [role.parameter for role in self.roles]

    @property
    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters that the layout knows."""
        return [role.parameter for role in self.roles if not role.of_optimizer]

    @property
    def beside(self) -> dict[Tensor, str]:
        """Parameters that only an optimizer knows, and their names."""
        return {role.parameter: role.name for role in self.roles if role.of_optimizer}

    def know_optimizers(self, parameters: Mapping[nn.Parameter, str]) -> None:
        """Give roles to parameters that the layout does not know, the same on all ranks.

        Args:
            parameters: with their names, in the place of those of an earlier call.
        """
        own = [role for role in self.roles if not role.of_optimizer]
        if len(own) == len(self.roles) and not parameters:
            return
        outside = self._topology.pp.size > 1
        self.roles = (
            *own,
            *(
                ParameterRole(
                    name=name, parameter=p, outside=outside, unmanaged=True, of_optimizer=True
                )
                for p, name in parameters.items()
            ),
        )
        self._sort()
        self._known = None
        self.forget_shard_specs()

    @cached_property
    def shard_specs(self) -> Mapping[Tensor, ShardSpec]:
        """Shard specs of the parameters, for the optimizers."""
        return {role.parameter: _shard_spec(role, self._topology) for role in self.roles}

    def forget_shard_specs(self) -> None:
        """Let go of the process groups that `shard_specs` knows."""
        self.__dict__.pop("shard_specs", None)

    def lends_nothing(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` steps on its parameters as they are, all of them whole."""
        members = [p for group in optimizer.param_groups for p in group["params"]]
        return all(p not in self.lends for p in members) and all(
            self.shard_specs[p].is_whole for p in members if p in self.shard_specs
        )

    def is_spread(self, role: ParameterRole) -> bool:
        """Whether other ranks have a part in the gradient of a parameter."""
        summed = any(role is one for one in self._summed)
        return summed or role.axes(self._topology).mean.size > 1

    @property
    def shared_by_stages(self) -> list[tuple[dist.ProcessGroup, list[ParameterRole]]]:
        """Parameters that several stages hold, and the groups of these; alike on their ranks."""
        return list(self._tied.values())

    @property
    def spread(self) -> bool:
        """Whether other ranks have a part in any of the gradients."""
        means = (axes.mean.size for axes in self._topology.all_axes)
        return bool(self._summed) or any(size > 1 for size in means)

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._topology.device

    @property
    def topology(self) -> Topology:
        """The layout."""
        return self._topology

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self._topology.seed

    def place(self, role: ParameterRole) -> tuple[str, int, int]:
        """Key that ranks share that own the same values: the name, and the ranks that divide it."""
        axes = role.axes(self._topology)
        sliced = role.shard is not None and role.shard.dim is not None
        return (
            role.name,
            axes.layer.rank if sliced else 0,
            axes.shard.rank if role.is_divided else 0,
        )

    def begin(self) -> None:
        """Add up gradients in float32 from now on, those of narrower parameters too."""
        self.set_aside()
        for role in self._narrow:
            _hold_gradient_in(role.parameter, torch.float32)

    def set_aside(self) -> None:
        """A backward begins: keep sums over ranks that are complete away from it, until `finish`.

        They would be summed again with what it adds. A mean of means is the same.
        """
        if self.complete and self._summed:
            self._aside += self._take_out(self._summed)
        self.complete = False

    def forget_rows(self) -> None:
        """Forget gradients that are with the owners of rows, as ``zero_grad`` is about to."""
        for role in self._with_rows:
            assert role.rows is not None
            role.rows.gradient = None

    @property
    def hidden(self) -> list[OwnedRows]:
        """The rows of parameters whose gradients come to their owners only."""
        found = (role.rows for role in self._with_rows)
        return [rows for rows in found if rows and not (rows.is_whole or rows.shows_gradient)]

    @property
    def assignable(self) -> list[nn.Parameter]:
        """Whole parameters whose gradients several ranks average, or hold wider than these."""
        return [
            role.parameter
            for role in self.roles
            if not isinstance(role.parameter, DTensor)
            and (
                role.axes(self._topology).mean.size > 1
                or (role.rows is not None and role.rows.is_wider)
            )
        ]

    def finish(self) -> None:
        """Complete the gradients; collective over the ranks of each group.

        They are in the format of what the optimizer steps on then, as optimizers expect them.
        """
        self._known = None
        self._complete()
        for role in self._narrow:
            _hold_gradient_in(role.parameter, role.parameter.dtype)
            if role.rows is not None and role.rows.gradient is not None:
                role.rows.gradient = role.rows.gradient.to(role.parameter.dtype)
        self.add(self._aside)
        self._aside = []
        self.complete = True

    def average_unmanaged(self) -> None:
        """Average what data parallelism leaves; collective over the ranks of each group."""
        for axes, roles in self._unmanaged:
            _sum_gradients(roles, axes.mean.group, mean=True)

    def _complete(self) -> None:
        self.average_unmanaged()
        if self._outside:
            _sum_gradients(self._outside, self._topology.pp.group)
        for group, roles in self._tied.values():
            _sum_gradients(roles, group)
        if self._partial:
            _sum_gradients(self._partial, self._topology.tp.group)

    def settle(self) -> None:
        """See to it that gradients are what the optimizer is to step on; see `before_use`."""
        if self.before_use is not None:
            self.before_use()

    def take_out(self) -> list["HeldGradient"]:
        """Take all gradients away from the parameters, to be put back by `add`."""
        return self._take_out(self.roles)

    @staticmethod
    def _take_out(roles: Sequence[ParameterRole]) -> list["HeldGradient"]:
        held = [
            (role, role.parameter.grad, None if role.rows is None else role.rows.gradient)
            for role in roles
        ]
        _drop(roles)
        return [entry for entry in held if entry[1] is not None or entry[2] is not None]

    def drop(self) -> None:
        """Forget all gradients."""
        self._aside = []
        _drop(self.roles)

    @staticmethod
    def add(taken: Sequence["HeldGradient"]) -> None:
        """Add gradients that were taken out to those that are there."""
        for role, whole, part in taken:
            if whole is not None:
                known = role.parameter.grad
                role.parameter.grad = whole if known is None else known.add_(whole)
            if part is not None:
                assert role.rows is not None
                known = role.rows.gradient
                role.rows.gradient = part if known is None else known.add_(part)
            _unite(role)

    def norm(self, optimizer: Optimizer | None = None) -> Tensor:
        """Global Euclidean norm of the gradients as they are; the same on every rank.

        Computed once for all who ask (clipping, logging, checks) while no gradient changes.

        Args:
            optimizer: of whose parameters, over all ranks; None for all parameters.
        """
        known = self._squares(optimizer)
        square = known.total if optimizer is None else known.held
        self.last_norm = square.sqrt()
        return self.last_norm

    def _squares(self, optimizer: Optimizer | None) -> "_Squares":
        """The squared norms there are, one of which is of ``optimizer``.

        What is in it is split by the optimizer that was asked about last, so that no other sum is
        needed for it: which ranks hold what may differ, so all compute at the same moments.
        """
        self.settle()
        groups = None if optimizer is None else optimizer.param_groups
        stamp, known = self.stamps(), self._known
        fits = known is not None and (groups is None or groups is known.groups)
        if known is None or not fits or known.stamp != stamp:
            self._asked = self._asked if groups is None else groups
            parts = self._split(self._asked)
            held, others = global_squares(parts, self._topology.device, self._world_group)
            known = self._known = _Squares(stamp, self._asked, held, others)
        return known

    def _split(self, groups: "ParameterGroups | None") -> list[tuple[list[Tensor], list[Tensor]]]:
        """Roles that this rank counts and those that others count, in some groups and outside."""
        members = _members(groups)
        parts = []
        for inside in (True, False):
            roles = [role for role in self.roles if (id(role.parameter) in members) is inside]
            parts.append((self._counted_of(roles), self._copies_of(roles)))
        return parts

    def by_name(self) -> list[tuple[str, Tensor]]:
        """The local gradients there are, with the names of their parameters."""
        self.settle()
        found = ((role.name, role.held_gradient) for role in self.roles)
        return [(name, gradient) for name, gradient in found if gradient is not None]

    def finiteness(self) -> Tensor:
        """A number of this rank's that is finite only where all its gradients are; see there."""
        return finiteness(self.local_gradients(), self._topology.device)

    def counted(self) -> list[Tensor]:
        """The gradients that this rank adds to global sums: over all ranks, each element once."""
        self.settle()
        return self._counted_of(self.roles)

    def _counted_of(self, roles: Iterable[ParameterRole]) -> list[Tensor]:
        found = (role.gradient for role in roles if self._counted[id(role.parameter)])
        return [gradient for gradient in found if gradient is not None]

    def parameter_norm(self) -> Tensor:
        """Global Euclidean norm of the trained parameters; collective, the same on every rank."""
        trained = (
            role.values
            for role in self.roles
            if role.parameter.requires_grad and self._counted[id(role.parameter)]
        )
        return self.norm_of(list(trained))

    def _copies_of(self, roles: Iterable[ParameterRole]) -> list[Tensor]:
        """The gradients that another rank adds to them, wholly or in part."""
        return [
            gradient
            for role in roles
            if (gradient := role.held_gradient) is not None
            and (not self._counted[id(role.parameter)] or role.holds_more_than_it_owns)
        ]

    def norm_of(self, counted: Sequence[Tensor]) -> Tensor:
        """Global Euclidean norm of tensors that lie like those of `counted`; collective."""
        squares = global_squares([(counted, ())], self._topology.device, self._world_group)
        return squares[0].sqrt()

    def stamps(self) -> list[tuple[int, int]]:
        """What differs when any gradient has changed."""
        # Not their local tensors, which are made anew for every look.
        rows = (r.rows.gradient for r in self.roles if r.rows is not None)
        found = (*rows, *(p.grad for p in self.parameters))
        return stamps([gradient for gradient in found if gradient is not None])

    def clip_norm(self, max_norm: float, optimizer: Optimizer | None = None) -> Tensor:
        """Scale gradients to a global norm of at most ``max_norm``.

        Args:
            max_norm: see above.
            optimizer: whose parameters are meant, on all ranks; None for all.

        Returns:
            Their norm before.
        """
        norm = self.norm(optimizer)
        factor = clip_coefficient(norm, max_norm)
        scale_(self.local_gradients(optimizer), factor)
        known = self._known
        assert known is not None
        others = known.others if optimizer is not None else known.others * factor.square()
        held = known.held * factor.square()
        self._known = replace(known, stamp=self.stamps(), held=held, others=others)
        return norm

    def clip_units(self, rule: UnitClip, optimizer: Optimizer | None = None) -> None:
        """Scale down the gradient of every output unit that is large beside its weights.

        A unit is what one index of dimension 0 belongs to, in a stack of matrices one row of one of
        them; of a vector all of it. Norms run over whole units: two all-reduces for each axis along
        which any unit is sharded.

        Args:
            rule: how much is large.
            optimizer: whose parameters are meant; None for all.
        """
        self.settle()
        chosen = [
            (role, gradient)
            for role in self._roles_of(optimizer)
            if (gradient := role.held_gradient) is not None
            and not any(fnmatchcase(role.name, pattern) for pattern in rule.exclude)
        ]
        members = [self._as_held(role, gradient) for role, gradient in chosen]
        sums = []
        for (role, _), (values, gradient, spec) in zip(chosen, members, strict=True):
            first = 2 if role.shard is not None and role.shard.stacked else 1
            dims = tuple(range(min(first, max(gradient.ndim - 1, 0)), gradient.ndim))
            for tensor in (values, gradient):
                squares = tensor.square().sum(dims, keepdim=True) if dims else tensor.square()
                sums.append(PartialSum(value=squares.contiguous(), spec=spec, dims=dims))
        reduce_sums(sums)
        for (_, gradient, _), weights, own in zip(members, sums[::2], sums[1::2], strict=True):
            most = weights.value.sqrt().clamp(min=rule.eps) * rule.ratio
            gradient.mul_((most / own.value.sqrt().clamp(min=EPSILON)).clamp(max=1.0))

    def _as_held(self, role: ParameterRole, gradient: Tensor) -> tuple[Tensor, Tensor, ShardSpec]:
        """Values and gradient as this rank has them, and the spec of both."""
        if role.rows is None or gradient is role.rows.gradient:
            return role.values, gradient, self.shard_specs[role.parameter]
        return role.parameter.detach(), gradient, _shard_spec(role, self._topology, divided=False)

    def clip_value(self, value: float, optimizer: Optimizer | None = None) -> None:
        """Clamp every gradient element to ``[-value, value]``; of an optimizer's, or of all."""
        clip_value_(self.local_gradients(optimizer), value)

    def _roles_of(self, optimizer: Optimizer | None) -> Sequence[ParameterRole]:
        if optimizer is None:
            return self.roles
        members = _members(optimizer.param_groups)
        return [role for role in self.roles if id(role.parameter) in members]

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients by a scalar."""
        scale_(self.local_gradients(), factor)

    def local_gradients(self, optimizer: Optimizer | None = None) -> list[Tensor]:
        """All that this rank has of the gradients of an optimizer's parameters, or of all."""
        self.settle()
        found = [role.held_gradient for role in self._roles_of(optimizer)]
        return [gradient for gradient in found if gradient is not None]


def counts(role: ParameterRole, topology: Topology, *, whole_rows: bool = False) -> bool:
    """Whether this rank is the one to add a gradient to global sums.

    Args:
        role: of its parameter.
        topology: the layout.
        whole_rows: whether ``.grad`` is meant, and not the rows of it that are owned.
    """
    axes, whole = role.axes(topology), role.shard is None or role.shard.dim is None
    first = 0 if role.outside else min(role.tied_ranks, default=topology.pp.rank)
    divided = role.is_divided and not (whole_rows and role.rows is not None)
    return (
        (axes.layer.rank == 0 or not whole)
        and (axes.shard.rank == 0 or divided)
        and axes.copies.rank == 0
        and topology.pp.rank == first
    )


ParameterGroups = list[dict[str, Any]]


@dataclass(frozen=True)
class _Squares:
    """Squared norms of the gradients of some parameters, and of all others."""

    stamp: list[tuple[int, int]]
    """Versions of the gradients."""
    groups: ParameterGroups | None
    """Parameters, by the groups of an optimizer; None for none."""
    held: Tensor
    others: Tensor

    @property
    def total(self) -> Tensor:
        return self.held + self.others


def _members(groups: ParameterGroups | None) -> set[int]:
    return {id(parameter) for group in groups or () for parameter in group["params"]}


def _shard_spec(role: ParameterRole, topology: Topology, *, divided: bool = True) -> ShardSpec:
    """ZeRO shards what tp or ep leaves, so its axis is the innermost."""
    shape = tuple(role.parameter.shape) if role.shard is None else role.shard.full_shape
    axes = role.axes(topology)
    found = [*_mesh_axes(role.parameter)]
    if role.rows is not None and not role.rows.is_whole and divided:
        found.append(_shard_axis(axes.shard, role.rows.dim))
    known = {axis.name for axis in found}
    dim = None if role.shard is None else role.shard.dim
    others = ((axes.shard, None), (axes.layer, dim), (axes.copies, None))
    found += [
        _shard_axis(axis, dim) for axis, dim in others if axis.size > 1 and axis.name not in known
    ]
    parts = None if role.shard is None else role.shard.segments
    segments = None if parts is None or dim is None else (dim, parts)
    return ShardSpec(name=role.name, full_shape=shape, axes=tuple(found), segments=segments)


def _mesh_axes(parameter: Tensor) -> Iterator[ShardAxis]:
    """Axes that shard a DTensor, from the innermost mesh dimension outwards."""
    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    for index in reversed(range(mesh.ndim)):
        dim = getattr(parameter.placements[index], "dim", None)
        if dim is not None and mesh.size(index) > 1:
            name = (mesh.mesh_dim_names or ())[index]
            yield ShardAxis(
                name="fsdp" if name == "dp_shard" else name,  # without cp they are one
                group=mesh.get_group(index),
                size=mesh.size(index),
                rank=mesh.get_local_rank(index),
                dim=dim,
            )


def _shard_axis(axis: Axis, dim: int | None) -> ShardAxis:
    assert axis.group is not None
    return ShardAxis(name=axis.name, group=axis.group, size=axis.size, rank=axis.rank, dim=dim)


def local(tensor: Tensor) -> Tensor:
    """The plain tensor behind a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_gradients(
    roles: Sequence[ParameterRole], group: dist.ProcessGroup | None, *, mean: bool = False
) -> None:
    """All-reduce the gradients over ``group``; a gradient that no rank has stays None.

    A rank without a gradient contributes zeros, and receives the sum, so that the parameter stays
    equal on all ranks. Only such a rank asks the device whether any other had one: the host of a
    rank with all gradients goes on at once.
    """
    if group is None:
        return
    by_dtype: dict[torch.dtype, list[ParameterRole]] = {}
    for role in roles:
        if role.parameter.requires_grad:
            by_dtype.setdefault(role.parameter.dtype, []).append(role)
    for dtype, members in by_dtype.items():
        wide = torch.promote_types(dtype, torch.float32)
        found = [role.held_gradient is not None for role in members]
        counts = from_host(found, wide, _target(members[0]).device)
        small = [role for role in members if _target(role).numel() <= _COALESCED]
        pieces = [_wide_gradient(role, wide) for role in small]
        flat = torch.cat([counts, *pieces])
        dist.all_reduce(flat, group=group)
        holders = [1.0] * len(members) if all(found) else flat[: len(members)].tolist()
        held = {role.name for role, count in zip(members, holders, strict=True) if count}
        parts = torch.split(flat[len(members) :], [piece.numel() for piece in pieces])
        sums = list(zip(small, parts, strict=True))
        for role in members:
            if _target(role).numel() > _COALESCED and role.name in held:
                part = _wide_gradient(role, wide)
                dist.all_reduce(part, group=group)
                sums.append((role, part))
        for role, part in sums:
            if role.name in held:
                _set_gradient(role, part / dist.get_world_size(group) if mean else part)


def _wide_gradient(role: ParameterRole, dtype: torch.dtype) -> Tensor:
    """The gradient, flat, or zeros where there is none; the very memory where it is like that."""
    gradient = role.held_gradient
    gradient = torch.zeros_like(_target(role)) if gradient is None else gradient
    return gradient.detach().reshape(-1).to(dtype)


def _target(role: ParameterRole) -> Tensor:
    """A tensor of the shape of the gradient that this rank would hold."""
    whole = local(role.parameter).detach()
    return whole if role.rows is None or role.rows.shows_gradient else role.rows.part_of(whole)


def _hold_gradient_in(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Hold ``.grad`` in ``dtype`` from now on; autograd adds to it in that."""
    gradient = parameter.grad
    if not parameter.requires_grad or parameter.grad_dtype == dtype:
        return
    parameter.grad = None
    parameter.grad_dtype = dtype
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def _unite(role: ParameterRole) -> None:
    """Bring a mean that somebody has made whole to that of a later batch, which is in rows."""
    rows, whole = role.rows, role.parameter.grad
    if rows is not None and rows.gradient is not None and whole is not None:
        rows.gradient.add_(rows.part_of(whole))
        role.parameter.grad = None


def _set_gradient(role: ParameterRole, flat: Tensor) -> None:
    held = role.held_gradient
    if held is not None:
        if held.data_ptr() != flat.data_ptr():
            held.copy_(flat.view(held.shape))
        return
    target = _target(role)
    if role.rows is not None and target.shape != role.parameter.shape:
        role.rows.gradient = flat.view(target.shape).clone()
        return
    parameter = role.parameter
    held_in = parameter.grad_dtype or parameter.dtype
    parameter.grad = torch.zeros_like(parameter, dtype=held_in)
    local(parameter.grad).copy_(flat.view(target.shape))


def _drop(roles: Iterable[ParameterRole]) -> None:
    for role in roles:
        role.parameter.grad = None
        if role.rows is not None:
            role.rows.gradient = None


HeldGradient = tuple[ParameterRole, Tensor | None, Tensor | None]
"""A parameter, what was in ``.grad``, and the gradient of its rows."""
