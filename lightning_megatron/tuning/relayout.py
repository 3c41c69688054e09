"""Moves the trunk of a run to other transforms, as `partition="measured"` does amid training.

The way goes through the map that checkpoints have. `checkpoint.chunks` and
`checkpoint.optimizer_state` say what a rank holds, under names and in rectangles that do not depend
on the layout; the trunk is built anew from its skeleton (`parallel.skeleton`), as what FSDP2 has
wrapped cannot be unwrapped; the same functions say what a rank needs then; and
`checkpoint.chunk_exchange` brings it there. So all that a checkpoint holds of the trunk moves, in
the form in which it is resumed: weights (those in float32 where there are narrow ones), persistent
buffers, state of optimizers, `get_extra_state`. Checkpoints lack what a new process makes anew.
That comes along as plain data, encoded as in a checkpoint: buffers that are not persistent,
``requires_grad``, training mode and other plain attributes.

Optimizers stay the same objects, as schedulers and callbacks hold them; their groups get the new
parameters. Whatever lies outside of the trunk stays as it is, generators of random numbers too.
Attributes that are neither plain nor tensors (lists, say), and hooks added to an item after the
layout was made, are those of the skeleton.

At most, a rank holds the tensors of the trunk twice: old ones on the host, until they were sent,
and the new ones where they live; with the messages of `ChunkExchange`.
"""

import gc
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatron._torch.devices import in_host_memory
from lightning_megatron.checkpoint.chunk_exchange import ChunkExchange
from lightning_megatron.checkpoint.chunks import Chunk, own_chunks, whole
from lightning_megatron.checkpoint.load.reader import MODEL_PREFIX
from lightning_megatron.checkpoint.optimizer_state import OptimizerRestore, capture_optimizer
from lightning_megatron.checkpoint.save.save_plan import OPTIMIZER_PREFIX
from lightning_megatron.checkpoint.trainer_state.codec import Decoder, Encoder
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.optim.held_tensors import keeps_others
from lightning_megatron.optim.sharded_step import steps_on_shards
from lightning_megatron.parallel.apply import ParallelModule, Transforms, parallelize_again
from lightning_megatron.parallel.skeleton import (
    changed_since,
    held_modules,
    skeleton_of,
    spare_modules,
    trunk_prefix,
)
from lightning_megatron.precision.sharded import ShardedPrecision
from lightning_megatron.whole.memory import own_weights

_WHAT = "moving the PipelineSequential"
_PLAIN = (bool, int, float, str, type(None))


class Host(Protocol):
    """Protocol of the strategy, whose module moves."""

    optimizers: list[Optimizer]

    @property
    def parallel(self) -> ParallelModule:
        """The module on its layout."""
        ...

    @property
    def precision(self) -> ShardedPrecision:
        """The precision plugin."""
        ...

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """All processes, for objects; None for the default group."""
        ...

    def let_go(self) -> None:
        """Forget the module's layout and everything made for it."""
        ...

    def adopt(self, parallel: ParallelModule) -> None:
        """Train the module on this layout from now on."""
        ...


@own_weights
def relayout(host: Host, transforms: Transforms) -> None:
    """Move the trunk to other transforms; collective over all processes.

    Args:
        host: whose module it is: pipelined, with a skeleton, without pending gradients, and with
            optimizers without `group_problems`.
        transforms: those of the present, with another partition, say.

    Raises:
        ConfigError: some rank has what cannot move (`obstacle`); raised on all ranks alike, and
            nothing has changed.
    """
    parallel, optimizers = host.parallel, host.optimizers
    assert parallel.trunk is not None
    assert parallel.spare is not None
    module, topology, trunk = parallel.module, parallel.topology, parallel.trunk
    order = {name: i for i, name in enumerate(dict.fromkeys(parallel.canonical.values()))}
    peers = Peers(host.host_group)
    described: list[tuple[_Trunk, tuple[str, bytes]]] = []
    peers.run(_WHAT, lambda: described.append(_describe(host)), lambda _: None)
    before, notes = described.pop()
    exchange = ChunkExchange(_WHAT, before.take(), peers=peers, device=topology.device)
    everyone = [_decode(*parts) for parts in Peers.over(topology.pp).all_gather(notes)]
    beside = [_empty(optimizer, trunk) for optimizer in optimizers]
    spare = parallel.spare
    del parallel, before
    host.let_go()
    trunk.refill(spare)
    trainable = _united([each["trainable"] for each in everyone])
    for name, parameter in trunk.named_parameters(prefix=trunk_prefix(module, trunk)):
        parameter.requires_grad_(trainable[name])
    again = skeleton_of(module)
    gc.collect()  # modules are full of circles
    new = replace(parallelize_again(module, topology, transforms), spare=again)
    for index, optimizer in enumerate(optimizers):
        _refill_groups(optimizer, beside[index], new, order, [n["groups"][index] for n in everyone])
    host.adopt(new)
    _fill(new, optimizers, exchange, everyone, peers)
    host.precision.forget_weights()
    new.data.gather_all()


def obstacle(host: Host) -> str | None:
    """Why the trunk cannot move, as far as this rank can tell; None if it can."""
    try:
        _describe(host)
    except ConfigError as error:
        return error.problems[0]
    return None


def group_problems(optimizers: Sequence[Optimizer], peers: Peers) -> list[str]:
    """Whether parameters can change stages within each group of the optimizers; collective.

    Args:
        optimizers: of this rank.
        peers: the pipeline ranks.
    """
    mine = [
        [
            repr(sorted((k, repr(v)) for k, v in g.items() if not k.startswith("param")))
            for g in groups
        ]
        for groups in (optimizer.param_groups for optimizer in optimizers)
    ]
    everyone = peers.all_gather(mine)
    if all(other == everyone[0] for other in everyone):
        return []
    return [
        "pp.partition='measured': the optimizers have other parameter groups on some pipeline "
        f"stages than on others ({[[len(g) for g in other] for other in everyone]} groups), so "
        "that it is not known which one a parameter would join; nearest valid: the same groups "
        "with the same options on every stage, empty where need be, or partition='parameters'"
    ]


# Out of the old places ----------------------------------------------------------------------------


class _Trunk:
    """Chunks of a trunk that this rank holds.

    Args:
        parallel: the module on its layout, comes to rest.
        optimizers: all that hold its parameters.

    Attributes:
        notes: description without tensors, for the ranks along pp: `requires_grad` by canonical
            name, plain attributes that differ from the skeleton's and extra state by module, the
            members of each optimizer's groups and their state that is no tensor, and buffers.

    Raises:
        ConfigError: the state of an optimizer depends on the layout.
    """

    @own_weights
    def __init__(self, parallel: ParallelModule, optimizers: Sequence[Optimizer]) -> None:
        assert parallel.trunk is not None
        assert parallel.spare is not None
        parallel.data.come_to_rest()
        prefix = trunk_prefix(parallel.module, parallel.trunk)
        modules = dict(held_modules(parallel.trunk, prefix))
        spare = spare_modules(parallel.spare, parallel.trunk, prefix)
        names, self._chunks = _parameters(parallel)
        self.notes: dict[str, Any] = {
            "trainable": {name: p.requires_grad for p, name in names.items()},
            "attributes": {
                p: found for p, m in modules.items() if (found := _changes(m, spare[p]))
            },
            "extra": {p: m.get_extra_state() for p, m in modules.items() if _has_extra_state(m)},
            "buffers": self._buffers(modules, parallel.topology.pp.ranks[0]),
            "groups": [_members(optimizer, names) for optimizer in optimizers],
            "values": [
                self._state(index, optimizer, names) for index, optimizer in enumerate(optimizers)
            ],
        }

    def take(self) -> dict[str, Chunk]:
        """Return the chunks, moved to the host to have room where they were."""
        chunks, self._chunks = self._chunks, {}
        return {name: replace(c, tensor=c.tensor.detach().cpu()) for name, c in chunks.items()}

    def _buffers(self, modules: Mapping[str, nn.Module], column: int) -> dict[str, Any]:
        """Note names of buffers, with their chunks, and whether they persist or lie on the host.

        Those of other data-parallel ranks may have other values, and other shapes.
        """
        keys: dict[Tensor, str] = {}
        notes = {}
        for path, module in modules.items():
            for leaf, buffer in module._buffers.items():
                if buffer is not None:
                    name = f"{path}.{leaf}"
                    key = keys.setdefault(buffer, f"buffer.{column}.{name}")
                    self._chunks[key] = whole(buffer, identical=False)
                    persists = leaf not in module._non_persistent_buffers_set
                    notes[name] = key, persists, in_host_memory(buffer.device)
        return notes

    def _state(self, index: int, optimizer: Optimizer, names: Mapping[Tensor, str]) -> Any:
        """Add the state of an optimizer; return what is no tensor."""
        if not steps_on_shards(optimizer) and keeps_others(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps tensors outside of its state, which would stay "
                "those of this layout; nearest valid: optimizer.state[p] for what it keeps of p"
            )
        view = _only(optimizer, names)
        keys = {key for state in view.state.values() for key in state}
        if odd := [key for key in keys if type(key) is not str]:
            raise ConfigError(
                f"{type(optimizer).__name__} state {odd[0]!r} has no name; nearest valid: strings "
                "as keys"
            )
        parameters = {name: self._chunks[f"{MODEL_PREFIX}.{name}"] for name in names.values()}
        snapshot = capture_optimizer(view, names, parameters)
        prefix = f"{OPTIMIZER_PREFIX}.{index}"
        self._chunks |= {f"{prefix}.{name}": chunk for name, chunk in snapshot.tensors.items()}
        return snapshot.values


def _describe(host: Host) -> tuple[_Trunk, tuple[str, bytes]]:
    """Return what this rank holds, and its notes for other ranks; raises what `obstacle` says."""
    parallel = host.parallel
    assert parallel.trunk is not None
    assert parallel.spare is not None
    if (changed := changed_since(parallel.trunk, parallel.spare)) is not None:
        raise ConfigError(
            f"{_WHAT}: {changed} after the run had begun; nearest valid: the same in "
            "configure_model, or partition='parameters'"
        )
    held = _Trunk(parallel, host.optimizers)
    return held, _encode(held.notes)


def _parameters(parallel: ParallelModule) -> tuple[dict[Tensor, str], dict[str, Chunk]]:
    """Return the canonical names of the trunk's parameters on this rank, and their chunks."""
    assert parallel.trunk is not None
    inside = set(parallel.trunk.parameters())
    names: dict[Tensor, str] = {
        r.parameter: r.name for r in parallel.gradients.roles if r.parameter in inside
    }
    chunks = own_chunks(parallel.module, parallel.canonical, parallel.data.rows)
    return names, {f"{MODEL_PREFIX}.{name}": chunks[name] for name in names.values()}


def _only(optimizer: Optimizer, parameters: Collection[Tensor]) -> Optimizer:
    """Return the optimizer as it would be if it had these parameters only."""
    view: Optimizer = object.__new__(type(optimizer))
    view.__dict__.update(vars(optimizer))
    view.state = {p: s for p, s in optimizer.state.items() if p in parameters}  # type: ignore[assignment]
    view.param_groups = [
        {**group, "params": [p for p in group["params"] if p in parameters]}
        for group in optimizer.param_groups
    ]
    return view


def _members(optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[dict[str, Any]]:
    """Return the canonical names in each group, with the names that the user gave, if any."""
    return [
        {names[p]: given for p, given in _named(group) if p in names}
        for group in optimizer.param_groups
    ]


def _named(group: Mapping[str, Any]) -> list[tuple[Tensor, Any]]:
    given = group.get("param_names") or [None] * len(group["params"])
    return list(zip(group["params"], given, strict=True))


def _empty(optimizer: Optimizer, trunk: nn.Module) -> list[list[tuple[Tensor, Any]]]:
    """Take the trunk out of an optimizer; return the others of each group, with given names."""
    inside = set(trunk.parameters())
    beside = []
    for parameter in inside:
        parameter.grad = None
        optimizer.state.pop(parameter, None)
    for group in optimizer.param_groups:
        beside.append([pair for pair in _named(group) if pair[0] not in inside])
        group["params"].clear()
    return beside


def _changes(module: nn.Module, before: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module that are others than before."""
    known = vars(before)
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in _PLAIN and (name not in known or known[name] != value)
    }


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _encode(notes: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return notes in the form of a checkpoint's state, which no rank unpickles."""
    encoder = Encoder()
    text = json.dumps(encoder.encode(dict(notes), _WHAT))
    objects = [
        f"{place}: a {type(value).__module__}.{type(value).__qualname__} has no plain form"
        for place, value in encoder.objects.items()
    ]
    raise_if_any(encoder.problems + objects)
    return text, safetensors_save(encoder.tensors)


def _decode(text: str, tensors: bytes) -> dict[str, Any]:
    notes: dict[str, Any] = Decoder(safetensors_load(tensors)).decode(json.loads(text))
    return notes


# Into the new places ------------------------------------------------------------------------------


def _refill_groups(
    optimizer: Optimizer,
    beside: Sequence[Sequence[tuple[Tensor, Any]]],
    parallel: ParallelModule,
    order: Mapping[str, int],
    everyone: Sequence[Sequence[Mapping[str, Any]]],
) -> None:
    """Let an optimizer have the new parameters of this rank, in the order of the module."""
    names: dict[Tensor, str] = {r.parameter: r.name for r in parallel.gradients.roles}
    new = {name: parameter for parameter, name in names.items()}
    for number, group in enumerate(optimizer.param_groups):
        members = _united([groups[number] for groups in everyone])
        pairs = [*beside[number], *((new[n], given) for n, given in members.items() if n in new)]
        pairs.sort(key=lambda pair: order.get(names.get(pair[0], ""), len(order)))
        group["params"].extend(parameter for parameter, _ in pairs)  # the same list
        if "param_names" in group:
            group["param_names"] = [given for _, given in pairs]


@own_weights
def _fill(
    parallel: ParallelModule,
    optimizers: Sequence[Optimizer],
    exchange: ChunkExchange,
    everyone: Sequence[Mapping[str, Any]],
    peers: Peers,
) -> None:
    """Bring what the new trunk needs to this rank; collective."""
    topology, trunk = parallel.topology, parallel.trunk
    assert trunk is not None
    names, parameters = _parameters(parallel)
    modules = dict(held_modules(trunk, trunk_prefix(parallel.module, trunk)))
    # This rank's own go before those of others.
    buffers = _united([n["buffers"] for n in (everyone[topology.pp.rank], *everyone)])
    mine = {n: about for n, about in buffers.items() if n.rpartition(".")[0] in modules}
    arriving: dict[str, Chunk] = {}
    for key, _, on_host in mine.values():
        if key not in arriving:
            entry = exchange.tensors[key]
            device = torch.device("cpu") if on_host else topology.device
            arriving[key] = whole(torch.empty(entry.shape, dtype=entry.torch_dtype, device=device))

    def restores() -> list[tuple[Optimizer, Optimizer, OptimizerRestore]]:
        found = []
        for index, optimizer in enumerate(optimizers):
            view = _only(optimizer, names)
            groups = [notes["groups"][index] for notes in everyone]
            restore = OptimizerRestore(
                view,
                names,
                {name: parameters[f"{MODEL_PREFIX}.{name}"] for name in names.values()},
                stored_names={},
                prefix=f"{OPTIMIZER_PREFIX}.{index}",
                tensors=exchange.tensors,
                saved={
                    "values": _united([notes["values"][index] for notes in everyone]),
                    "groups": [
                        {"index": i, "options": {}, "parameters": _united(members)}
                        for i, members in enumerate(zip(*groups, strict=True))
                    ],
                },
            )
            found.append((optimizer, view, restore))
        return found

    made: list[tuple[Optimizer, Optimizer, OptimizerRestore]] = []
    peers.run(_WHAT, lambda: made.extend(restores()), lambda _: None)
    state = {name: chunk for _, _, r in made for name, chunk in r.chunks.items()}
    exchange.fill({**parameters, **arriving, **state})
    for optimizer, view, restore in made:
        restore.apply()
        optimizer.state.update(view.state)
    _fill_buffers(modules, mine, {key: chunk.tensor for key, chunk in arriving.items()})
    attributes = _united([notes["attributes"] for notes in everyone])
    extra = _united([notes["extra"] for notes in everyone])
    for path, module in modules.items():
        vars(module).update(attributes.get(path, {}))
        if path in extra:
            module.set_extra_state(extra[path])


def _fill_buffers(
    modules: Mapping[str, nn.Module],
    mine: Mapping[str, tuple[str, bool, bool]],
    arrived: Mapping[str, Tensor],
) -> None:
    for path, module in modules.items():
        for leaf, buffer in module._buffers.items():
            if buffer is not None and f"{path}.{leaf}" not in mine:
                module._buffers[leaf] = None  # it was given up in the meantime
    for name, (key, persistent, _) in mine.items():
        path, _, leaf = name.rpartition(".")
        module = modules[path]
        if leaf not in module._buffers:
            module.register_buffer(leaf, None, persistent=persistent)
        module._buffers[leaf] = arrived[key]


def _united(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return all entries; of several with one name, the first."""
    united: dict[str, Any] = {}
    for part in parts:
        united |= {name: value for name, value in part.items() if name not in united}
    return united
