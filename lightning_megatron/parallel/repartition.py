"""Cuts the trunk of a running pipeline anew, between two optimizer steps.

What FSDP2 has wrapped cannot be unwrapped, so the trunk is built a second time, from the copies of
its structure that `parallel.layer_skeletons` has kept, by the very transforms that built the first.
Then its tensors move in (`parallel.layer_transfer`): parameters, buffers (persistent or not) and
the optimizers' state; and with them what else the items have changed since they were copied:
``requires_grad``, training mode and other plain attributes, and the state of ``get_extra_state``.
Optimizers stay the same objects, as schedulers and callbacks hold them; their groups get the new
parameters. Whatever lies outside the trunk stays as it is.

Attributes that are neither plain nor tensors (lists, say), and hooks added to an item after the
layout was made, are those of the copies.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatron._torch import shard_of
from lightning_megatron.errors import ConfigError
from lightning_megatron.parallel.apply import ParallelModule, parallelize_again
from lightning_megatron.parallel.layer_skeletons import held_modules, spare_modules, trunk_prefix
from lightning_megatron.parallel.layer_transfer import (
    Key,
    Parcel,
    TensorInfo,
    ZeroShard,
    parcel,
    relocate,
)

_PLAIN = (bool, int, float, str, type(None))
_PARAMETER, _ROWS, _BUFFER, _STATE = "parameter", "rows", "buffer", "state"
Members = dict[str, Any]
"""Canonical names in an optimizer's group, with the names that the user gave, if any."""


@dataclass
class _PipelineInfo:
    """Description of one rank's part of the pipeline, for the others."""

    tensors: dict[Key, TensorInfo] = field(default_factory=dict)
    buffers: dict[str, tuple[Key, bool]] = field(default_factory=dict)
    """Key of each buffer and whether it is persistent, by each of its names."""
    trainable: dict[str, bool] = field(default_factory=dict)
    """``requires_grad`` by canonical name."""
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Plain attributes that differ from the copies', by module."""
    extra: dict[str, Any] = field(default_factory=dict)
    groups: list[list[Members]] = field(default_factory=list)
    """Members of the parameter groups, by optimizer and group."""
    state: list[dict[str, dict[str, tuple[Any, bool]]]] = field(default_factory=list)
    """Small state, by optimizer, canonical name and key, and whether it lives on the host."""


class Recut:
    """Takes the trunk's tensors out of a module, and `finish` brings them to their new places.

    Between the two the owner lets go of ``parallel``, and whatever else holds parameters of the
    trunk, so that the memory can be used again.

    Args:
        parallel: a pipelined module on its layout, with spare items, without pending gradients.
        optimizers: all that hold its parameters.
    """

    def __init__(self, parallel: ParallelModule, optimizers: Sequence[Optimizer]) -> None:
        assert parallel.trunk is not None
        assert parallel.spare is not None
        parallel.data.come_to_rest()
        self._module = parallel.module
        self._trunk = parallel.trunk
        self._topology = parallel.topology
        self._transforms = parallel.transforms
        self._prefix = trunk_prefix(parallel.module, parallel.trunk)
        self._spare = list(parallel.spare)
        self._order = {n: i for i, n in enumerate(dict.fromkeys(parallel.canonical.values()))}
        self._optimizers = list(optimizers)
        self._parcels: dict[Key, Parcel] = {}
        self._notes = _PipelineInfo()
        inside = set(parallel.trunk.parameters())
        names = {role.parameter: role.name for role in parallel.gradients.roles}
        self._rows = dict(parallel.data.rows)
        self._take_parameters({p: n for p, n in names.items() if p in inside})
        self._take_buffers()
        self._take_attributes()
        self._kept = [self._take_state(i, o, names, inside) for i, o in enumerate(optimizers)]
        self._rows.clear()

    def finish(self, stages: Sequence[range]) -> ParallelModule:
        """Build the trunk anew and fill it; collective over all processes.

        Args:
            stages: the item indices of every stage.
        """
        topology = self._topology
        everyone: list[_PipelineInfo] = topology.pp.all_gather_object(self._notes)
        self._trunk.refill(self._spare)
        trainable = _united([notes.trainable for notes in everyone])
        for name, parameter in self._trunk.named_parameters(prefix=self._prefix):
            parameter.requires_grad_(trainable[name])
        gc.collect()  # modules are full of circles
        config = replace(self._transforms.pipeline, partition=[len(stage) for stage in stages])
        parallel = parallelize_again(
            self._module, topology, replace(self._transforms, pipeline=config)
        )
        with torch.no_grad():
            self._unpack(parallel, everyone)
        return parallel

    # Out of the old places -----------------------------------------------------------------------

    def _add(self, key: Key, tensor: Tensor, cut: ZeroShard | None) -> None:
        self._parcels[key] = taken = parcel(tensor, cut)
        self._notes.tensors[key] = taken.about

    def _take_parameters(self, names: Mapping[nn.Parameter, str]) -> None:
        for parameter, name in names.items():
            parameter.grad = None
            rows = self._rows.get(parameter)
            self._add((_PARAMETER, name), parameter, ZeroShard.of(parameter))
            if rows is not None and rows.is_copy:
                self._add((_ROWS, name), rows.refresh(), None)
            self._notes.trainable[name] = parameter.requires_grad

    def _take_buffers(self) -> None:
        keys: dict[Tensor, Key] = {}
        for path, module in held_modules(self._trunk, self._prefix):
            for leaf, buffer in module._buffers.items():
                if buffer is None:
                    continue
                name = f"{path}.{leaf}"
                if buffer not in keys:
                    keys[buffer] = (_BUFFER, name)
                    self._add(keys[buffer], buffer, None)
                persistent = leaf not in module._non_persistent_buffers_set
                self._notes.buffers[name] = keys[buffer], persistent

    def _take_attributes(self) -> None:
        spare = spare_modules(self._spare, self._trunk, self._prefix)
        for path, module in held_modules(self._trunk, self._prefix):
            before = vars(spare[path])
            changed = {
                name: value
                for name, value in vars(module).items()
                if type(value) in _PLAIN and (name not in before or before[name] != value)
            }
            if changed:
                self._notes.attributes[path] = changed
            if _has_extra_state(module):
                self._notes.extra[path] = module.get_extra_state()

    def _take_state(
        self,
        index: int,
        optimizer: Optimizer,
        names: Mapping[nn.Parameter, str],
        inside: set[nn.Parameter],
    ) -> list[list[tuple[Tensor, Any]]]:
        """Empty an optimizer of the trunk; returns what stays in each group, with given names."""
        small: dict[str, dict[str, tuple[Any, bool]]] = {}
        for parameter in inside:
            state = optimizer.state.pop(parameter, None)
            if state and parameter in names:
                small[names[parameter]] = self._take_values(
                    index, names[parameter], parameter, state
                )
        self._notes.state.append(small)
        groups: list[Members] = []
        kept = []
        for group in optimizer.param_groups:
            given = group.get("param_names") or [None] * len(group["params"])
            pairs = list(zip(group["params"], given, strict=True))
            groups.append({names[p]: name for p, name in pairs if p in inside and p in names})
            kept.append([pair for pair in pairs if pair[0] not in inside])
            group["params"].clear()
        self._notes.groups.append(groups)
        return kept

    def _take_values(
        self, index: int, name: str, parameter: nn.Parameter, state: Mapping[str, Any]
    ) -> dict[str, tuple[Any, bool]]:
        """Pack the tensors of one parameter's state; returns the rest."""
        rows = self._rows.get(parameter)
        cut = ZeroShard.of(parameter)
        shape = _local(parameter).shape if rows is None else rows.values.shape
        rest: dict[str, tuple[Any, bool]] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and _local(value).shape == shape:
                self._add((_STATE, index, name, key), value, cut)
            elif isinstance(value, Tensor) and value.numel() > 1:
                self._add((_STATE, index, name, key), value, None)
            elif isinstance(value, Tensor):
                rest[key] = value.cpu(), value.device.type == "cpu"
            else:
                rest[key] = value, True
        return rest

    # Into the new places -------------------------------------------------------------------------

    def _unpack(self, parallel: ParallelModule, everyone: Sequence[_PipelineInfo]) -> None:
        assert parallel.trunk is not None
        modules = list(held_modules(parallel.trunk, self._prefix))
        inside = set(parallel.trunk.parameters())
        new = {r.name: r.parameter for r in parallel.gradients.roles if r.parameter in inside}
        announced = [notes.tensors for notes in everyone]
        wanted: dict[Key, bool] = {
            key: not isinstance(new[str(_owner(key))], DTensor)
            for given in announced
            for key in given
            if _owner(key) in new
        }
        buffers = _united(
            [everyone[self._topology.pp.rank].buffers, *(n.buffers for n in everyone)]
        )
        mine = {name: buffers[name] for name in _names_under(modules, buffers)}
        wanted |= {key: True for key, _ in mine.values()}
        arrived: dict[Key, Tensor] = {}

        def deliver(key: Key, tensor: Tensor, about: TensorInfo) -> None:
            if key[0] == _BUFFER:
                arrived[key] = tensor
                return
            parameter = new[str(_owner(key))]
            cut = ZeroShard.of(parameter)
            if cut is not None and about.whole_shape is None:
                tensor = _cut_anew(key, tensor, cut)
            if key[0] == _PARAMETER:
                _local(parameter).copy_(tensor)
            elif key[0] == _ROWS:
                parallel.data.rows[parameter].values.copy_(tensor)
            else:
                _, index, _, name = key
                state = self._optimizers[int(index)].state[parameter]
                state[name] = cut.wrap(tensor) if about.distributed and cut is not None else tensor

        relocate(self._parcels, announced, wanted, deliver, self._topology)
        _fill_buffers(modules, mine, arrived)
        _change_attributes(modules, everyone)
        for index, optimizer in enumerate(self._optimizers):
            small = _united([notes.state[index] for notes in everyone])
            for name, parameter in new.items():
                for key, (value, on_host) in small.get(name, {}).items():
                    optimizer.state[parameter][key] = (
                        value if on_host else value.to(self._topology.device)
                    )
            self._refill_groups(index, optimizer, new, parallel, everyone)

    def _refill_groups(
        self,
        index: int,
        optimizer: Optimizer,
        new: Mapping[str, nn.Parameter],
        parallel: ParallelModule,
        everyone: Sequence[_PipelineInfo],
    ) -> None:
        names: dict[Tensor, str] = {r.parameter: r.name for r in parallel.gradients.roles}
        for number, group in enumerate(optimizer.param_groups):
            members = _united([notes.groups[index][number] for notes in everyone])
            pairs = self._kept[index][number] + [
                (new[name], given) for name, given in members.items() if name in new
            ]
            pairs.sort(key=lambda pair: self._order.get(names.get(pair[0], ""), len(self._order)))
            group["params"].extend(parameter for parameter, _ in pairs)  # the same list
            if "param_names" in group:
                group["param_names"] = [given for _, given in pairs]


def group_problems(
    optimizers: Sequence[Optimizer], pp: int, group: dist.ProcessGroup | None
) -> list[str]:
    """Whether parameters can change stages within each group of the optimizers; collective.

    Args:
        optimizers: of this rank.
        pp: number of pipeline ranks.
        group: of these ranks.
    """
    mine = [
        [
            repr(sorted((k, repr(v)) for k, v in g.items() if not k.startswith("param")))
            for g in groups
        ]
        for groups in (optimizer.param_groups for optimizer in optimizers)
    ]
    everyone: list[Any] = [mine] * pp
    dist.all_gather_object(everyone, mine, group=group)
    if all(other == everyone[0] for other in everyone):
        return []
    return [
        "pp.partition='measured': the optimizers have other parameter groups on some pipeline "
        f"stages than on others ({[[len(g) for g in other] for other in everyone]} groups), so "
        "that it is not known which one a parameter would join; nearest valid: the same groups "
        "with the same options on every stage, empty where need be, or partition='parameters'"
    ]


def _options(group: Mapping[str, Any]) -> str:
    return repr(sorted((k, repr(v)) for k, v in group.items() if not k.startswith("param")))


def _names_under(
    modules: Sequence[tuple[str, nn.Module]], names: Mapping[str, Any]
) -> Iterator[str]:
    paths = {path for path, _ in modules}
    return (name for name in names if name.rpartition(".")[0] in paths)


def _fill_buffers(
    modules: Sequence[tuple[str, nn.Module]],
    mine: Mapping[str, tuple[Key, bool]],
    arrived: Mapping[Key, Tensor],
) -> None:
    by_path = dict(modules)
    for path, module in modules:
        for leaf, buffer in module._buffers.items():
            if buffer is not None and f"{path}.{leaf}" not in mine:
                module._buffers[leaf] = None  # it was given up in the meantime
    for name, (key, persistent) in mine.items():
        path, _, leaf = name.rpartition(".")
        module = by_path[path]
        if leaf not in module._buffers:
            module.register_buffer(leaf, None, persistent=persistent)
        module._buffers[leaf] = arrived[key]


def _change_attributes(
    modules: Sequence[tuple[str, nn.Module]], everyone: Sequence[_PipelineInfo]
) -> None:
    attributes = _united([notes.attributes for notes in everyone])
    extra = _united([notes.extra for notes in everyone])
    for path, module in modules:
        vars(module).update(attributes.get(path, {}))
        if path in extra:
            module.set_extra_state(extra[path])


def _cut_anew(key: Key, whole: Tensor, cut: ZeroShard) -> Tensor:
    if tuple(whole.shape) != cut.shape:
        raise ConfigError(
            f"pp.partition='measured': optimizer state {key[-1]!r} of {key[2]!r} has shape "
            f"{tuple(whole.shape)}, which cannot be sharded like the parameter; nearest valid: an "
            "optimizer with element-wise state, or partition='parameters'"
        )
    return cut.part_of(whole).clone()


def _owner(key: Key) -> str | int | None:
    """Canonical name of the parameter that a tensor belongs to."""
    if key[0] == _BUFFER:
        return None
    return key[1] if key[0] in (_PARAMETER, _ROWS) else key[-2]


def _united(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All entries; of several with one name, the first."""
    united: dict[str, Any] = {}
    for part in parts:
        united |= {name: value for name, value in part.items() if name not in united}
    return united


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _local(tensor: Tensor) -> Tensor:
    return shard_of(tensor) if isinstance(tensor, DTensor) else tensor
