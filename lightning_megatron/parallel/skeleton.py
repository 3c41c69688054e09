"""The skeleton of a trunk: copies of its structure, without its values.

A pipeline rank drops the items of other stages, and what ZeRO has wrapped cannot be unwrapped. A
trunk whose stages are to change later therefore needs its items once more, as the user built them:
the same modules with the same ties, all parameters and buffers on the meta device, so that they
cost next to no memory. Everything outside the trunk that an item refers to is shared, not copied.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import PipelineSequential, RemoteItem
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import Topology

_SHARED = (Tensor, dist.ProcessGroup, DeviceMesh, Axis, Topology)
"""Attributes of a module that its copy refers to. Tensors that are neither parameters nor buffers
are constants that only the constructor could make again."""


def skeleton_of(module: nn.Module) -> list[nn.Module]:
    """Copies of all items of a trunk that has not been cut yet, on the meta device.

    Args:
        module: holds the one trunk.

    Raises:
        ConfigError: an item cannot be copied.
    """
    trunk = next(m for m in module.modules() if isinstance(m, PipelineSequential))
    inside = _modules_inside(trunk)
    memo: dict[int, Any] = {id(m): m for m in module.modules() if m not in inside}
    for child in inside:
        for own in (child._parameters, child._buffers):
            for tensor in own.values():
                if tensor is not None and id(tensor) not in memo:
                    memo[id(tensor)] = _twin(tensor)
    for child in inside:
        for value in vars(child).values():
            if isinstance(value, _SHARED):
                memo.setdefault(id(value), value)
    copies = []
    for name, item in zip(trunk.item_names, trunk.items(), strict=True):
        try:
            copies.append(copy.deepcopy(item, memo))
        except Exception as error:
            raise ConfigError(
                f"pp.partition='measured': item {name!r} ({type(item).__name__}) cannot be copied: "
                f"{error}; nearest valid: an item that copy.deepcopy can copy, or "
                "partition='parameters'"
            ) from error
    return copies


def skeleton_problems(module: nn.Module, trunk: PipelineSequential, trunk_name: str) -> list[str]:
    """Reasons why the items of a trunk cannot be replaced by copies later.

    Args:
        module: the LightningModule.
        trunk: inside ``module``, not cut yet.
        trunk_name: its name there.
    """
    inside = _modules_inside(trunk)
    parts = {id(m) for m in inside} | {id(p) for m in inside for p in m.parameters(recurse=False)}
    containers = {m for m in trunk.modules() if m not in inside}
    problems = [
        f"pp.partition='measured': {place} refers to a part of the PipelineSequential, which is "
        f"built anew when the stages change; nearest valid: reach it through self.{trunk_name} in "
        "every step, or partition='parameters'"
        for name, child in module.named_modules()
        if child not in inside and child not in containers
        for place in _references(name, child, parts)
    ]
    problems += [
        f"pp.partition='measured': item {name!r} is compiled in place, which its copy would not "
        "be; nearest valid: an item made by torch.compile(item), or partition='parameters'"
        for name, item in zip(trunk.item_names, trunk.items(), strict=True)
        if any(getattr(m, "_compiled_call_impl", None) is not None for m in item.modules())
    ]
    return problems


def changed_since(trunk: PipelineSequential, items: Sequence[nn.Module]) -> str | None:
    """Why the spare items no longer stand for this rank's items; None if they do."""
    spare = spare_modules(items, trunk, "")
    held = dict(held_modules(trunk, ""))
    mine = [i for part in trunk.held for i in part]
    names = {trunk.item_names[i] for i in mine}
    lost = [n for n in spare if n not in held and any(f"{n}.".startswith(f"{i}.") for i in names)]
    if lost:
        return f"{lost[0]} was removed"
    for path, module in held.items():
        twin = spare.get(path)
        own = {name for name, p in module._parameters.items() if p is not None}
        if twin is None or own != {n for n, p in twin._parameters.items() if p is not None}:
            return f"{path} ({type(module).__name__}) was added or exchanged"
        if getattr(module, "_compiled_call_impl", None) is not None:
            return f"{path} was compiled in place"
    return None


def trunk_prefix(module: nn.Module, trunk: PipelineSequential) -> str:
    """Name of the trunk in the module."""
    names: dict[nn.Module, str] = {child: name for name, child in module.named_modules()}
    return names[trunk]


def held_modules(trunk: PipelineSequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Modules in the items of this rank, by each of their names."""
    for name, item in zip(trunk.item_names, trunk.items(), strict=True):
        if not isinstance(item, RemoteItem):
            path = f"{prefix}.{name}" if prefix else name
            yield from item.named_modules(prefix=path, remove_duplicate=False)


def spare_modules(
    items: Sequence[nn.Module], trunk: PipelineSequential, prefix: str
) -> dict[str, nn.Module]:
    """Modules in the spare items of a trunk, by each of their names."""
    return {
        path: module
        for name, item in zip(trunk.item_names, items, strict=True)
        for path, module in item.named_modules(
            prefix=f"{prefix}.{name}" if prefix else name, remove_duplicate=False
        )
    }


def _modules_inside(trunk: PipelineSequential) -> set[nn.Module]:
    return {child for item in trunk.items() for child in item.modules()}


def _references(name: str, module: nn.Module, parts: set[int]) -> Iterator[str]:
    """Attributes of ``module`` that are, or directly contain, one of ``parts``."""
    own = {**vars(module), **module._modules}
    for attribute, value in own.items():
        if attribute in ("_modules", "_parameters", "_buffers"):
            continue
        held: list[Any] = [value]
        if isinstance(value, list | tuple | set):
            held += value
        elif isinstance(value, dict):
            held += value.values()
        if any(id(v) in parts or id(getattr(v, "__self__", None)) in parts for v in held):
            yield f"{name}.{attribute}" if name else f"self.{attribute}"


def _twin(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
