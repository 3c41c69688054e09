"""The state of an optimizer, by parameter name.

``Optimizer.state_dict`` numbers the parameters of this process, and these numbers mean nothing in
another layout. Here every state tensor belongs to a named parameter. A tensor of the parameter's
shape (like momentum) is sharded as the parameter is; a small one (``step``) is stored whole.
Options (learning rate, betas, ...) are stored with the names of their parameters, united over all
pipeline stages, and found again by those names under any layout. State of an optimizer inside
another one is stored beside that one's, with the attribute before its key: ``base:momentum``.

Restoring creates the state of this rank's parameters from the checkpoint alone, as optimizers
create theirs only in the first step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass
from lightning_megatron.checkpoint.chunks import Chunk, local_tensor, whole
from lightning_megatron.checkpoint.directory.manifest import TensorEntry
from lightning_megatron.errors import ConfigError, summary
from lightning_megatron.optim.held_tensors import states_in
from lightning_megatron.optim.quantized_state import QuantizedStateOptimizer
from lightning_megatron.optim.sharded_step import steps_on_shards
from lightning_megatron.whole.splits import place_of, split_of

# Implementation of a step: chosen by the current run, which may be on another device.
_OWN_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_BOOKKEEPING = frozenset({"params", "param_names"})


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options of a set of parameters."""

    index: int
    """Position of the parameter group in its optimizer."""
    options: Mapping[str, Any]
    """Learning rate and so on, by name."""
    parameters: tuple[str, ...]
    """Canonical names of the parameters."""


@dataclass(frozen=True, kw_only=True)
class OptimizerSnapshot:
    """The state of one optimizer on this process."""

    tensors: Mapping[str, Chunk]
    """State tensors by ``<parameter>.<key>``."""
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """State other than tensors, by parameter and key."""
    groups: Sequence[GroupOptions] = ()
    """Options of the local parameters."""
    kind: str | None = None
    """Class of the optimizer."""

    def without_tensors(self) -> "OptimizerSnapshot":
        """Return the snapshot without its tensors."""
        return replace(self, tensors={})

    def renamed(self, names: Mapping[str, str]) -> "OptimizerSnapshot":
        """Return the snapshot with other names of parameters."""

        def new(name: str) -> str:
            parameter, _, key = name.rpartition(".")
            return f"{names.get(parameter, parameter)}.{key}"

        return replace(
            self,
            tensors={new(name): chunk for name, chunk in self.tensors.items()},
            values={names.get(name, name): v for name, v in self.values.items()},
            groups=[
                replace(g, parameters=tuple(names.get(n, n) for n in g.parameters))
                for g in self.groups
            ],
        )


def capture_optimizer(
    optimizer: Optimizer, names: Mapping[Tensor, str], chunks: Mapping[str, Any]
) -> OptimizerSnapshot:
    """Return the state of an optimizer; its tensors share the optimizer's memory.

    Args:
        optimizer: one of torch, or one with the same form of ``state`` and ``param_groups``.
        names: canonical name of every tensor that the optimizer updates.
        chunks: the chunk of every parameter, as `model_chunks` returns it.

    Raises:
        ConfigError: the shape of a state tensor depends on the layout.
    """
    tensors: dict[str, Chunk] = {}
    values: dict[str, dict[str, Any]] = {}
    problems = []
    for path, parameter, state in _entries(optimizer):
        name = _name_of(parameter, names, optimizer)
        if isinstance(optimizer, QuantizedStateOptimizer):
            state = optimizer.dequantized_state(state)
        for own_key, value in state.items():
            key = f"{path}:{own_key}" if path else own_key
            if not isinstance(value, Tensor):
                values.setdefault(name, {})[key] = value
            elif (chunk := _state_chunk(key, value, chunks[name], optimizer)) is None or "." in str(
                key
            ):
                problems.append(
                    f"{type(optimizer).__name__} state {key!r} of {name!r} has shape "
                    f"{tuple(local_tensor(value).shape)}, its parameter's shard has "
                    f"{chunks[name].sizes} of {chunks[name].full_shape}: it cannot be loaded under "
                    "another layout; nearest valid: an optimizer with element-wise state"
                )
            else:
                tensors[f"{name}.{key}"] = chunk
    if problems:
        raise ConfigError(problems)
    groups = [
        GroupOptions(
            index=index,
            options={k: v for k, v in group.items() if k not in _BOOKKEEPING},
            parameters=tuple(_name_of(p, names, optimizer) for p in _saved(group, names, chunks)),
        )
        for index, group in enumerate(optimizer.param_groups)
    ]
    kind = type(optimizer).__name__
    return OptimizerSnapshot(tensors=tensors, values=values, groups=groups, kind=kind)


def _entries(optimizer: Optimizer) -> Iterator[tuple[str, Tensor, Any]]:
    """State of parameters in an optimizer and in those inside it, with the paths of these."""
    for path, states in states_in(optimizer).items():
        for parameter, state in states.items():
            yield path, parameter, state


def merge_snapshots(snapshots: Iterable[OptimizerSnapshot]) -> dict[str, Any]:
    """Unite the ranks' snapshots of one optimizer, without tensors, to plain data."""
    values: dict[str, Mapping[str, Any]] = {}
    groups: dict[tuple[int, str], tuple[GroupOptions, dict[str, None]]] = {}
    kind = None
    for snapshot in snapshots:
        kind = kind or snapshot.kind
        values |= {name: v for name, v in snapshot.values.items() if name not in values}
        for group in snapshot.groups:
            key = group.index, _fingerprint(group.options)
            _, parameters = groups.setdefault(key, (group, {}))
            parameters |= dict.fromkeys(group.parameters)
    return {
        "kind": kind,
        "values": values,
        "groups": [
            {"index": g.index, "options": dict(g.options), "parameters": list(parameters)}
            for g, parameters in sorted(groups.values(), key=lambda item: item[0].index)
        ],
    }


def _saved(
    group: Mapping[str, Any], names: Mapping[Tensor, str], chunks: Mapping[str, Any]
) -> list[Tensor]:
    """Return the parameters of a group without the placeholder of an empty stage."""
    return [p for p in group["params"] if names.get(p) is None or names[p] in chunks]


class OptimizerRestore:
    """Restoration of an optimizer, in two steps.

    The constructor checks and allocates. Nothing changes before `apply`, which is called after
    ``chunks`` were read.

    Args:
        optimizer: the optimizer to restore.
        names: canonical name of every tensor that the optimizer updates.
        chunks: the chunk of every parameter.
        stored_names: for canonical names, the name in the checkpoint where it is another.
        prefix: prefix of this optimizer's tensors in the checkpoint, like ``optimizer.0``.
        tensors: all tensors of the checkpoint, by name.
        saved: the result of `merge_snapshots`, decoded.

    Attributes:
        chunks: chunks to read, by stored name.
        anew: parameters whose state begins anew, as the checkpoint has none, or one of another
            shape.

    Raises:
        ConfigError: an optimizer of another class wrote the state; or parameters of one group have
            different stored options, or none.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Mapping[Tensor, str],
        chunks: Mapping[str, Chunk],
        *,
        stored_names: Mapping[str, str],
        prefix: str,
        tensors: Mapping[str, TensorEntry],
        saved: Mapping[str, Any],
    ) -> None:
        _refuse_other_kind(type(optimizer).__name__, saved.get("kind"))
        self._optimizer = optimizer
        self.chunks: dict[str, Chunk] = {}
        self._state: dict[Tensor, dict[str, Any]] = {}
        self._held_in: dict[Tensor, torch.dtype] = {}
        entries = _entries_by_parameter(tensors, prefix)
        groups = [
            GroupOptions(index=g["index"], options=g["options"], parameters=tuple(g["parameters"]))
            for g in saved["groups"]
        ]
        self._options: list[Mapping[str, Any]] = []
        self.anew: list[str] = []
        known = {name for group in groups for name in group.parameters}
        for index, group in enumerate(optimizer.param_groups):
            local = {_name_of(p, names, optimizer): p for p in _saved(group, names, chunks)}
            stored = {name: stored_names.get(name, name) for name in local}
            for name, stored_name in list(stored.items()):
                model_entry = tensors.get(f"model.{stored_name}")
                lacks = stored_name not in known and model_entry is None
                if lacks or _is_of_other_shape(chunks[name], model_entry, entries.get(stored_name)):
                    del stored[name]
                    self.anew.append(name)
            beginning = bool(local) and not stored
            kind = type(optimizer).__name__
            self._options.append(
                {} if beginning else _find_options(index, list(stored.values()), groups, kind)
            )
            for name, stored_name in stored.items():
                parameter = local[name]
                state = dict(saved["values"].get(stored_name, {}))
                self._held_in[parameter] = chunks[name].tensor.dtype
                model_entry = tensors.get(f"model.{stored_name}")
                for key, entry in entries.get(stored_name, {}).items():
                    state[key], chunk = _allocate(
                        key, entry, parameter, chunks[name], group, model_entry, optimizer
                    )
                    self.chunks[f"{prefix}.{stored_name}.{key}"] = chunk
                if state:
                    self._state[parameter] = state

    def apply(self) -> None:
        """Put the state and the options into the optimizer."""
        states = states_in(self._optimizer)
        for own in states.values():
            own.clear()
        for parameter, state in self._state.items():
            for key in [key for key in state if str(key).rpartition(":")[0] in states]:
                path, _, own_key = str(key).rpartition(":")
                if path:
                    states[path].setdefault(parameter, {})[own_key] = state.pop(key)
            if isinstance(self._optimizer, QuantizedStateOptimizer):
                local = {
                    key: local_tensor(v) if isinstance(v, Tensor) else v for key, v in state.items()
                }
                state = self._optimizer.requantized_state(local, self._held_in[parameter])
            if state or len(states) == 1:
                self._optimizer.state[parameter] = state
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            for key, value in options.items():
                if key in _OWN_OPTIONS or key in _BOOKKEEPING:
                    continue
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor | float | int):
                    group[key].copy_(torch.as_tensor(value))
                else:
                    group[key] = value


def _refuse_other_kind(ours: str, stored: str | None) -> None:
    alike = stored is None or ours == stored or {ours, stored} == {"Adam", "AdamW"}
    if not alike:
        raise ConfigError(
            f"the checkpoint has the state of {stored}, which the module's optimizer, {ours}, "
            f"cannot use; nearest valid: {stored}, or "
            "checkpoint=CheckpointConfig(exclude=['optimizer', 'lr_schedulers']) to begin anew"
        )


def _name_of(parameter: Tensor, names: Mapping[Tensor, str], optimizer: Optimizer) -> str:
    if parameter not in names:
        raise ConfigError(
            f"{type(optimizer).__name__} updates a tensor of shape {tuple(parameter.shape)} that "
            "is no parameter of the module, so its state cannot be stored by name; nearest valid: "
            "only parameters of the module in the optimizer"
        )
    return names[parameter]


def _state_chunk(key: str, value: Tensor, parameter: Chunk, optimizer: Optimizer) -> Chunk | None:
    """Return the chunk of one state tensor; None if its shape depends on the layout."""
    is_part = place_of(value) is not None or split_of(value) is not None
    with DisableTorchFunctionSubclass():  # whose shape is that of this rank's part
        local = local_tensor(value)
        local = local.as_subclass(Tensor) if is_part else local
    if (reduced := _without(key, parameter, optimizer)) is not None:
        return replace(reduced, tensor=local) if tuple(local.shape) == reduced.sizes else None
    if steps_on_shards(optimizer) or parameter.is_whole or is_part:
        if tuple(local.shape) == parameter.sizes:
            return replace(parameter, tensor=local, aliases=())
        return whole(local) if local.numel() == 1 or parameter.is_whole else None
    # It is lent whole tensors, on every rank; a shard of one row may look like a sum over rows.
    if tuple(local.shape) == parameter.full_shape:
        return replace(parameter, tensor=parameter.cut(local), aliases=())
    if local.numel() == 1 or set(local.shape) <= {1, *parameter.full_shape}:
        return whole(local)
    return None


def _without(key: str, parameter: Chunk, optimizer: Optimizer) -> Chunk | None:
    """Return the chunk of a state without one dimension of the parameter; None for others."""
    missing = getattr(optimizer, "reduced_state", {}).get(key)
    if missing is None or len(parameter.full_shape) < -missing:
        return None
    dim = len(parameter.full_shape) + missing

    def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return replace(
        parameter,
        tensor=parameter.tensor.new_empty(put(parameter.sizes, 1), device="meta"),
        full_shape=put(parameter.full_shape, 1),
        offsets=put(parameter.offsets, 0),
        pieces=() if parameter.piece_dim == dim else parameter.pieces,
        aliases=(),
    )


def _fingerprint(options: Mapping[str, Any]) -> str:
    plain = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in options.items()}
    return repr(sorted(plain.items()))


def _entries_by_parameter(
    tensors: Mapping[str, TensorEntry], prefix: str
) -> dict[str, dict[str, TensorEntry]]:
    found: dict[str, dict[str, TensorEntry]] = {}
    for full_name, entry in tensors.items():
        if full_name.startswith(f"{prefix}."):
            name, _, key = full_name[len(prefix) + 1 :].rpartition(".")
            found.setdefault(name, {})[key] = entry
    return found


def _is_of_other_shape(
    parameter: Chunk, stored: TensorEntry | None, state: Mapping[str, TensorEntry] | None
) -> bool:
    """Return whether the stored state of a parameter has another shape than the parameter."""
    if stored is not None:
        return stored.shape != parameter.full_shape
    sizes = [entry.shape for entry in (state or {}).values()]
    alike = [size for size in sizes if len(size) == len(parameter.full_shape) > 0]
    return bool(alike) and parameter.full_shape not in alike


def _find_options(
    index: int, names: Sequence[str], groups: Sequence[GroupOptions], optimizer: str
) -> Mapping[str, Any]:
    """Return the stored options that all of ``names`` share."""
    if not names:  # a stage without parameters of this group: its position has to do
        same = [g for g in groups if g.index == index]
        return same[0].options if len(same) == 1 else {}
    owner = {name: group for group in groups for name in group.parameters}
    unknown = [name for name in names if name not in owner]
    if unknown:
        raise ConfigError(
            f"{optimizer} group {index}: no options are stored for {summary(unknown)}; nearest "
            "valid: the parameters that the checkpoint's optimizer had"
        )
    found: dict[str, tuple[str, GroupOptions]] = {}
    for name in names:
        found.setdefault(_fingerprint(owner[name].options), (name, owner[name]))
    if len(found) > 1:
        (first, one), (second, other) = list(found.values())[:2]
        differing = sorted(
            k for k in {*one.options, *other.options} if one.options.get(k) != other.options.get(k)
        )
        raise ConfigError(
            f"{optimizer} group {index} unites parameters that had different options: "
            + "; ".join(
                f"{k}={one.options.get(k)!r} for {first!r} but {other.options.get(k)!r} for "
                f"{second!r}"
                for k in differing
            )
            + "; nearest valid: the parameter groups of the run that wrote the checkpoint"
        )
    return next(iter(found.values()))[1].options


def _allocate(
    key: str,
    entry: TensorEntry,
    parameter: Tensor,
    chunk: Chunk,
    group: Mapping[str, Any],
    model_entry: TensorEntry | None,
    optimizer: Optimizer,
) -> tuple[Tensor, Chunk]:
    """Allocate one state tensor of this rank; return it with the chunk to read into."""
    dtype = entry.torch_dtype
    device = chunk.tensor.device
    reduced = _without(key, chunk, optimizer)
    if reduced is not None and entry.shape == reduced.full_shape:
        value = torch.zeros(reduced.sizes, dtype=dtype, device=device)
        return value, replace(reduced, tensor=value)
    if entry.shape == chunk.full_shape and (steps_on_shards(optimizer) or chunk.is_whole):
        # State in the parameter's format follows it when a run goes on in another precision.
        if model_entry is not None and model_entry.torch_dtype == dtype:
            dtype = chunk.tensor.dtype
        like = parameter.detach() if isinstance(parameter, DTensor) else chunk.tensor
        value = torch.zeros_like(like, dtype=dtype)
        return value, replace(chunk, tensor=local_tensor(value), aliases=())
    # Optimizers keep the step count on the host unless the whole step runs on the device.
    on_device = (
        str(key).rpartition(":")[2] != "step" or group.get("capturable") or group.get("fused")
    )
    value = torch.zeros(entry.shape, dtype=dtype, device=device if on_device else "cpu")
    return value, whole(value)
