"""Process groups of a layout.

Each Trainer makes one `Topology`, after ``torch.distributed`` is initialised, and passes it to
every part that communicates: there is no "current mesh", so two Trainers in one process do not see
each other. The group of a single rank is None, and code with ``axis.size == 1`` communicates
nothing.
"""

import gc
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron._torch.devices import on_host
from lightning_megatron._torch.dtensor import forget_meshes, mend_operation_keys
from lightning_megatron._torch.groups import is_known, make_group, make_lone_group
from lightning_megatron.topology.auxiliary_seeds import AuxiliarySeeds
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.topology.coordinates import DERIVED_AXES, coordinates_of, groups_along
from lightning_megatron.topology.degrees import AXES, Degrees
from lightning_megatron.topology.expert_layout import ExpertConfig
from lightning_megatron.topology.meter import Meter
from lightning_megatron.topology.nodes import Nodes
from lightning_megatron.topology.rng import (
    RandomStreams,
    StepSeeds,
    default_state,
    set_default_state,
)

Parts: TypeAlias = tuple[tuple[int, ...], ...]
"""Disjoint lists of positions on an axis."""


@dataclass(frozen=True)
class ParameterAxes:
    """Axes over which one kind of parameters lies: those of the layers at large, or of experts."""

    layer: Axis
    """Ranks that hold different slices of a layer: tp, or ep."""
    shard: Axis
    """Ranks over which ZeRO divides what a rank's slice is: fsdp, or efsdp."""
    copies: Axis
    """Ranks that hold the same in other copies: dp_replicate, or expert_copies."""
    mean: Axis
    """Ranks over which gradients are averaged: loss, or expert_loss."""


_outlived: list["Topology"] = []


def close_with(topology: "Topology", owner: object) -> None:
    """Let `close_outlived` close a topology once its user, ``owner``, has been collected."""
    weakref.finalize(owner, _outlived.append, topology).atexit = False


def close_later(topology: "Topology") -> None:
    """Let `close_outlived` close a topology that nobody needs."""
    _outlived.append(topology)


def close_outlived() -> None:
    """Close every topology that nobody needs any more.

    The caller chooses the time, as garbage may be collected in the middle of a collective.
    """
    while _outlived:
        _outlived.pop().close()


@cache
def leave_garbage_to_parents() -> None:
    """Keep forks of this process from collecting garbage that the parent made.

    An object with a reference to a destroyed process group, such as a Trainer, ends the group's
    threads when it is collected. In a fork, such as a DataLoader worker, these threads do not
    exist, and ending them ends the process.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def destroy_groups(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Destroy process groups of this process, but for the default one; not collective."""
    leave_garbage_to_parents()
    for group in {id(g): g for g in groups if g is not None and g is not dist.group.WORLD}.values():
        if is_known(group):
            dist.destroy_process_group(group)


class Topology:
    """Coordinates of this process in the layout, and its process groups.

    Args:
        degrees: sizes of all axes; their product must be the world size.
        device: device of this process.
        sequence_parallel: whether activations between parallel layers are split over tp along the
            sequence.
        seed: seed of the run, for initialisation and the random streams.
        timeout: timeout of the groups made here; that of the default group when None.
        nodes: name of the node of every rank, the same list on all ranks; one node when None.
        context: options of the cp axis; the defaults when None.
        experts: options of the ep axis; the defaults when None.

    Attributes:
        tp, pp, cp, dp_replicate, dp_shard: mesh axes.
        batch: dp_replicate x dp_shard; these ranks read different samples.
        loss: batch x cp; gradients are averaged over these ranks.
        fsdp: dp_shard x cp; ZeRO divides over these ranks.
        context: split of sequences over cp.
        ep, efsdp, expert_copies, expert_loss: axes of experts (`coordinates`).
        dense: axes of all parameters but experts.
        experts: axes of experts; `dense` itself where they are the same (tp and ep of 1).
        dispatch: how tokens reach the ranks of their experts.
        auxiliary_seeds: factors with which auxiliary losses enter the gradient.
        mesh: device mesh with the axes of size > 1, and always ``dp_shard`` and ``dp_replicate``.
        rng: random streams of this process.
        step_seeds: seeds of the user's step.
        is_closed: whether `close` was called, after which nothing communicates.
        nodes: nodes of the ranks.
        meters: meters of what this rank sends, by ``tp``, ``pp``, ``cp``, ``ep`` and
            ``dp``.
    """

    def __init__(
        self,
        degrees: Degrees,
        device: torch.device,
        *,
        sequence_parallel: bool = False,
        seed: int = 0,
        timeout: timedelta | None = None,
        nodes: Sequence[str] | None = None,
        context: ContextConfig | None = None,
        experts: ExpertConfig | None = None,
    ) -> None:
        if degrees.world_size != dist.get_world_size():
            raise RuntimeError(f"{degrees} does not match {dist.get_world_size()} processes")
        self.degrees = degrees
        self.device = device
        self.sequence_parallel = sequence_parallel
        self.seed = seed
        self.rank = dist.get_rank()
        self.world_size = degrees.world_size
        self._timeout = timeout
        self._made: list[dist.ProcessGroup] = []
        self._parts: dict[tuple[str, Parts], dist.ProcessGroup | None] = {}
        self._derived: dict[tuple[str, ...], dist.ProcessGroup | None] = {}
        self.is_closed = False
        self.nodes = Nodes(nodes or ("",) * self.world_size)
        self.meters = {kind: Meter(self.nodes, device) for kind in ("tp", "pp", "cp", "ep", "dp")}
        mend_operation_keys()
        forget_meshes()
        self.mesh = self._device_mesh()
        self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp = (
            self._mesh_axis(axis) for axis in AXES
        )
        self.batch = self._derived_axis("batch")
        self.loss = self._derived_axis("loss")
        self.fsdp = self._derived_axis("fsdp")
        self.ep = self._expert_axis("ep")
        self.efsdp = self._expert_axis("efsdp")
        self.expert_copies = self._expert_axis("expert_copies")
        self.expert_loss = self._expert_axis("expert_loss")  # may have the group of efsdp
        self.dense = ParameterAxes(self.tp, self.fsdp, self.dp_replicate, self.loss)
        self.experts = self.dense
        if degrees.tp * degrees.ep > 1:
            self.experts = ParameterAxes(self.ep, self.efsdp, self.expert_copies, self.expert_loss)
        self.dispatch = (experts or ExpertConfig(degree=degrees.ep)).dispatch
        self.auxiliary_seeds = AuxiliarySeeds()
        self.context = self._context(context or ContextConfig(degree=degrees.cp))
        self.context.ranks_per_node = min(Counter(self.nodes[r] for r in self.cp.ranks).values())
        self.rng = RandomStreams(seed, self.tp.rank, (self.loss.rank, self.pp.rank), device)
        self.step_seeds = self._step_seeds()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Topology":
        """Return itself: a copy of a layer is on the same ranks."""
        return self

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Context in which layers split sequences neither over cp nor over tp."""
        before, self.sequence_parallel = self.sequence_parallel, False
        try:
            with self.context.suspended():
                yield
        finally:
            self.sequence_parallel = before

    @cached_property
    def position(self) -> dict[str, int]:
        """Coordinate on every mesh axis."""
        return coordinates_of(self.rank, self.degrees)

    @property
    def all_axes(self) -> tuple[ParameterAxes, ...]:
        """The axes of all kinds of parameters, each once."""
        return (self.dense,) if self.experts is self.dense else (self.dense, self.experts)

    def axes_of(self, layer: Literal["tp", "ep"]) -> ParameterAxes:
        """Axes of the parameters that are divided over tp, or over ep."""
        return self.experts if layer == "ep" else self.dense

    def _device_mesh(self) -> DeviceMesh:
        """Make the mesh, and a group for each of its axes (collectively).

        torch's ``init_device_mesh`` would give these groups ten minutes on NCCL.
        """
        degrees = self.degrees
        axes = [a for a in AXES if getattr(degrees, a) > 1 or a in ("dp_replicate", "dp_shard")]
        ranks = torch.empty(
            [getattr(degrees, axis) for axis in axes], dtype=torch.int, device="cpu"
        )
        for rank in range(degrees.world_size):
            position = coordinates_of(rank, degrees)
            ranks[tuple(position[axis] for axis in axes)] = rank
        groups = [self._mesh_group(axis) for axis in axes]
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=tuple(axes))

    def _mesh_group(self, axis: str) -> dist.ProcessGroup:
        size = getattr(self.degrees, axis)
        if size == self.world_size:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        group = None if size == 1 else self.new_group(axis)
        return self._alone if group is None else group

    @cached_property
    def _alone(self) -> dist.ProcessGroup:
        """The group of this rank, along all axes of size 1; it ends with the default group."""
        return make_lone_group(self._timeout)

    def _ranks(self, axis: str) -> tuple[int, ...]:
        return next(g for g in groups_along(axis, self.degrees) if self.rank in g)

    def _mesh_axis(self, axis: str) -> Axis:
        ranks = self._ranks(axis)
        group = self.mesh.get_group(axis) if len(ranks) > 1 else None
        return Axis(axis, self.position[axis], ranks, group, self._meter(axis))

    def _derived_axis(self, name: str) -> Axis:
        """Reuse the group of the member axes above size 1, or make one (collectively)."""
        ranks = self._ranks(name)
        wide = tuple(a for a in DERIVED_AXES[name] if getattr(self.degrees, a) > 1)
        if not wide:
            group = None
        elif len(wide) == 1:
            group = self.mesh.get_group(wide[0])
        else:
            if wide not in self._derived:
                self._derived[wide] = self.new_group(name)
            group = self._derived[wide]
        return Axis(name, ranks.index(self.rank), ranks, group, self._meter(name))

    def _expert_axis(self, name: str) -> Axis:
        """Make the group of an axis of experts, or reuse one of the same ranks (collectively)."""
        ranks = self._ranks(name)
        meter = self._meter(name)
        known = ("dp_replicate", "dp_shard", "cp", "tp", "loss", "fsdp", "efsdp")
        groups = set(groups_along(name, self.degrees))
        same = next((a for a in known if groups == set(groups_along(a, self.degrees))), None)
        if len(ranks) == 1:
            group = None
        elif same not in (None, name) and name != "ep":
            group = getattr(self, str(same)).group
        else:
            group = self.new_group(name)
        return Axis(name, ranks.index(self.rank), ranks, group, meter)

    def _step_seeds(self) -> StepSeeds:
        model = self._ranks("model")
        wide = [axis for axis in DERIVED_AXES["model"] if getattr(self.degrees, axis) > 1]
        group = None
        if len(wide) == 1 and on_host(self.device):
            group = self.mesh.get_group(wide[0])
        elif wide:
            group = self.new_group("model", backend="gloo")
        return StepSeeds(self.batch.rank, self.device, min(model), group)

    def _context(self, config: ContextConfig) -> Context:
        tp = self.tp.size if self.sequence_parallel else 1
        u, p = config.ulysses or 1, self.cp.size
        if u == 1 or p == 1:
            return Context(config, self.cp, tp=tp)
        rows = tuple(tuple(range(first, first + u)) for first in range(0, p, u))
        columns = tuple(zip(*rows, strict=True))
        return Context(
            config,
            self.cp,
            tp=tp,
            ulysses=self._part_of_cp("ulysses", rows),
            ring=self._part_of_cp("ring", columns),
        )

    def _part_of_cp(self, name: str, parts: Parts) -> Axis:
        group = self.part_group("cp", parts)
        mine = next(part for part in parts if self.cp.rank in part)
        ranks = tuple(self.cp.ranks[place] for place in mine)
        return Axis(name, mine.index(self.cp.rank), ranks, group, self.meters["cp"])

    def _meter(self, axis: str) -> Meter:
        """Meter of an axis; all data-parallel axes share one."""
        return self.meters.get(axis, self.meters["dp"])

    def new_group(self, axes: str, backend: str | None = None) -> dist.ProcessGroup | None:
        """Make a further group along ``axes``; every process must call this at the same point."""
        parts = groups_along(axes, self.degrees)
        group = make_group(parts, self._timeout, backend=backend, name=axes)
        return None if group is None else self.keep(group)

    def zero_mesh(self) -> DeviceMesh:
        """Mesh over which ZeRO 3 divides, its last dimension, and copies, the one before it.

        Every process must call this at the same point. Without cp it is a part of `mesh`. Else
        `fsdp` is made of two of its axes; the group is a new one, as the attention exchanges
        keys and values over that of cp meanwhile.
        """
        hybrid = self.dp_replicate.size > 1
        if self.cp.size == 1:
            names: Any = ("dp_replicate", "dp_shard") if hybrid else "dp_shard"
            return self.mesh[names]
        device, group = self.device.type, self.new_group("fsdp")
        assert group is not None
        if not hybrid:
            return DeviceMesh.from_group(group, device, mesh_dim_names=("fsdp",))
        copies, mine = self.dp_replicate.group, set(self.dp_replicate.ranks)
        assert copies is not None
        rows = [ranks for ranks in groups_along("fsdp", self.degrees) if mine & set(ranks)]
        return DeviceMesh.from_group(
            [copies, group],
            device,
            torch.tensor(rows, dtype=torch.int, device="cpu"),
            mesh_dim_names=("dp_replicate", "fsdp"),
        )

    def expert_mesh(self) -> DeviceMesh:
        """Mesh over which ZeRO 3 divides experts, and copies, like `zero_mesh`.

        Every process must call this at the same point. The group of its last dimension is a new
        one, and that of this rank alone where no other has the same experts.
        """
        device, group = self.device.type, self.new_group("efsdp")
        if group is None:
            group = self._alone
        copies, mine = self.expert_copies.group, set(self.expert_copies.ranks)
        if copies is None:
            return DeviceMesh.from_group(group, device, mesh_dim_names=("efsdp",))
        rows = [ranks for ranks in groups_along("efsdp", self.degrees) if mine & set(ranks)]
        return DeviceMesh.from_group(
            [copies, group],
            device,
            torch.tensor(rows, dtype=torch.int, device="cpu"),
            mesh_dim_names=("expert_copies", "efsdp"),
        )

    def part_group(
        self, axes: str, parts: Parts, name: str | None = None
    ) -> dist.ProcessGroup | None:
        """Group of this rank's part of the ranks along ``axes``; made once, for all parts at once.

        Every process must call this at the same point.

        Args:
            axes: name of a mesh or derived axis.
            parts: positions on the axis; every position in one part.
            name: what the flight recorder calls it; ``axes`` when None.

        Returns:
            The group; None for a part of one rank.
        """
        if (axes, parts) not in self._parts:
            self._parts[axes, parts] = self.new_part_group(axes, parts, name or axes)
        return self._parts[axes, parts]

    def new_part_group(self, axes: str, parts: Parts, name: str) -> dist.ProcessGroup | None:
        """Make a group of this rank's part, like `part_group`, that nobody else gets.

        Args:
            axes: name of a mesh or derived axis.
            parts: positions on the axis; every position in one part.
            name: what the flight recorder calls it.
        """
        lists = [
            [ranks[position] for position in part]
            for ranks in groups_along(axes, self.degrees)
            for part in parts
        ]
        group = make_group(lists, self._timeout, name=name)
        if group is not None:
            self.keep(group)
        return None if group is None or group.size() == 1 else group

    def keep(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Register a group that was made for this layout, for `close` to destroy."""
        self._made.append(group)
        return group

    def close(self) -> None:
        """Destroy all groups that were made for this layout; not collective."""
        if self.is_closed:
            return
        self.is_closed = True
        destroy_groups(self._made)
        self._made.clear()
        self._parts.clear()
        self._derived.clear()
        parts = (self.context.ulysses, self.context.ring)
        axes = (*(getattr(self, name) for name in AXES), self.batch, self.loss, self.fsdp, *parts)
        axes += (self.ep, self.efsdp, self.expert_copies, self.expert_loss)
        for axis in axes:
            if axis is not None:
                axis.forget_group()
        del self.mesh
        forget_meshes()


def share_draws(topology: Topology) -> None:
    """Have PyTorch's default generator go on alike on all ranks of one network; collective.

    Ranks of other dp coordinates go on as they are.
    """
    state = default_state(topology.device).to(topology.device)
    for axis in (topology.pp, topology.cp, topology.tp):
        if axis.group is not None:
            dist.broadcast(state, axis.ranks[0], group=axis.group)
    set_default_state(topology.device, state.cpu())
