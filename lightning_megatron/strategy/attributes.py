"""Attributes of a module and of the modules beside its trunk: which there are, copies, digests.

Attributes that every module of a kind has are not among them, nor are modules and parameters.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, Metric, MetricCollection

from lightning_megatron._lightning.hooks import is_of_hyper_parameters
from lightning_megatron._lightning.results import UPDATE_COUNT, forget_computed, initial_states
from lightning_megatron.comm.objects import dump, load
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.whole.memory import on_memory, weights_in_parts

OF_A_PROCESS = (
    *(nn.Module, nn.Parameter, Optimizer, Trainer, Callback, LightningDataModule),
    *(Dataset, DataLoader),
)
"""Classes of objects that stay in their process; steps do not change data sets, which are large."""
_WITHOUT_METRICS = (type(None), bool, int, float, str, bytes, Tensor)
_ALONE = (type, FunctionType, MethodType, ModuleType, *OF_A_PROCESS)
"""Objects that are not searched for metrics."""
OURS = "_lightning_megatron_"
"""Beginning of the names under which this library keeps something in a module."""
_SCANNED = 100
"""Items of the longest list or dict, or attributes of an object, searched for metrics."""
_LIBRARIES = ("torch.", "lightning.", "pytorch_lightning.", "lightning_megatron.")
_PICKLING = ("__reduce_ex__", "__reduce__")


class Value:
    """An attribute's value, as it is now."""

    def __init__(self, value: Any, device: torch.device) -> None:
        self._skeleton, leaves = dump(value, device.type, OF_A_PROCESS)
        self._leaves = [leaf.detach() for leaf in leaves]

    def keep(self) -> "Value":
        """Return itself, safe from later changes of the tensors."""
        self._leaves = [leaf.clone() for leaf in self._leaves]
        return self

    def digest(self) -> bytes:
        """Hash that is equal for equal values."""
        found = hashlib.blake2b(self._skeleton, digest_size=16)
        for leaf in self._leaves:
            plain = leaf.cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(plain.numpy().data)
        return found.digest()

    def restored(self) -> Any:
        """A copy of the value."""
        leaves = iter(self._leaves)
        return load(self._skeleton, lambda *_: next(leaves))


@dataclass(frozen=True)
class _Parts:
    """Parts of an object that cannot be pickled itself: items of a dict, or attributes."""

    parts: Mapping[Any, Any]

    def put_into(self, target: Any) -> None:
        """Make them those of another object."""
        if isinstance(target, dict):
            target.clear()
            target.update(self.parts)
        else:
            vars(target).update(self.parts)


def value_of(content: Any, device: torch.device) -> Value | None:
    """Value of an attribute; None if it cannot be pickled, not in parts either."""
    try:
        return Value(content, device)
    except Exception:  # whatever a class raises that is not meant to be pickled
        parts = _parts_of(content, device)
    try:
        return None if parts is None else Value(parts, device)
    except Exception:  # likewise of the items of a dict
        return None


def _parts_of(content: Any, device: torch.device) -> _Parts | None:
    if isinstance(content, dict):
        return _Parts(dict(content))
    stays = (*OF_A_PROCESS, list, set, tuple, deque, type)
    if callable(content) or isinstance(content, stays) or not hasattr(content, "__dict__"):
        return None
    own = {k: v for k, v in vars(content).items() if value_of(v, device) is not None}
    return _Parts(own) if own else None


@contextmanager
def unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards attributes, buffers, metrics and frozen parameters are what they were before.

    For a microbatch that runs for the sake of its collectives only, and is to count nowhere.

    Args:
        module: the user's.
        device: of this process.
    """
    with weights_in_parts():  # without those of other stages
        modules = {**dict(modules_beside_trunk(module)), **dict(module.named_modules())}
    before = {
        (path, name): (content, value.keep())
        for path, child in modules.items()
        for name, content in attributes_of(child)
        if (value := value_of(content, device)) is not None
    }
    copies = _frozen(module)
    try:
        yield
    finally:
        for path, child in modules.items():
            for name, content in list(attributes_of(child)):
                was, value = before.get((path, name), (None, None))
                now = value_of(content, device)
                if value is not None and (now is None or now.digest() != value.digest()):
                    set_attribute(child, name, _as_before(was, value.restored()))
        _restore(copies)


def _as_before(holder: Any, restored: Any) -> Any:
    """Return an object that others may know with what was in it, or else ``restored``."""
    if type(holder) is not type(restored):
        return restored
    if isinstance(holder, list):
        holder[:] = restored
    elif isinstance(holder, dict | set):
        holder.clear()
        holder.update(restored)
    elif isinstance(holder, deque):
        holder.clear()
        holder.extend(restored)
    elif is_open(holder) and hasattr(holder, "__dict__"):
        vars(holder).clear()
        vars(holder).update(vars(restored))
    else:
        return restored
    return holder


@on_memory
def _frozen(module: nn.Module) -> list[tuple[nn.Parameter, Tensor, int]]:
    """Frozen parameters of this rank, with copies and versions."""
    frozen = [p for p in module.parameters() if not p.requires_grad]
    return [(p, p.detach().clone(), p._version) for p in frozen]


@on_memory
def _restore(copies: Sequence[tuple[nn.Parameter, Tensor, int]]) -> None:
    """Undo what has changed parameters since `_frozen`."""
    with torch.no_grad():
        for parameter, copy, version in copies:
            if parameter._version != version:
                parameter.copy_(copy)


def modules_beside_trunk(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that every stage holds, with their names; metrics in objects and lists, too."""
    yield path, module
    known = not_the_users(module)
    for name, content in vars(module).items():
        if name not in known and not isinstance(content, _WITHOUT_METRICS):
            for place, metric in _metrics_in(content, f"{path}:{name}", set()):
                yield from modules_beside_trunk(metric, place)
    for name, child in module.named_children():
        if not isinstance(child, PipelineSequential):
            yield from modules_beside_trunk(child, dotted(path, name))


def _metrics_in(content: Any, place: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Metrics in a list, dict or object of the user's, and in those inside."""
    if isinstance(content, _WITHOUT_METRICS) or id(content) in seen:
        return
    seen.add(id(content))
    if isinstance(content, nn.Module):
        if {Metric, MetricCollection} & {*type(content).__mro__}:
            yield place, content
        return
    if isinstance(content, dict):
        items: Any = content.items()
    elif isinstance(content, list | tuple):
        items = enumerate(content)
    elif is_open(content) and hasattr(content, "__dict__") and not isinstance(content, _ALONE):
        content = vars(content)
        items = content.items()
    else:
        return
    if len(content) <= _SCANNED:
        for key, item in tuple(items):
            yield from _metrics_in(item, f"{place}:{key}", seen)


def is_open(content: Any) -> bool:
    """Whether the attributes of an object are what it consists of."""
    kind: Any = type(content)
    return _is_open(kind)


@cache
def _is_open(kind: Any) -> bool:
    if f"{kind.__module__}.".startswith(_LIBRARIES) or hasattr(kind, "__next__"):
        return False
    return all(getattr(kind, name) is getattr(object, name) for name in _PICKLING)


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Attributes and buffers of one module by name, and how often a metric was updated."""
    known = not_the_users(module)
    for name, value in module.__dict__.items():
        ours = name.startswith(OURS)  # the layout, which would live on in what is kept of it
        if not ours and name not in known and not is_of_hyper_parameters(name):
            yield name, value
    for name, buffer in module._buffers.items():
        if buffer is not None:
            yield name, buffer
    if UPDATE_COUNT in module.__dict__ and isinstance(module, Metric):
        yield UPDATE_COUNT, getattr(module, UPDATE_COUNT)


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set an attribute; a buffer keeps its memory."""
    buffer = module._buffers.get(name)
    if isinstance(buffer, Tensor) and buffer.shape == value.shape:
        with torch.no_grad():
            buffer.copy_(value)
    elif isinstance(value, _Parts):
        value.put_into(getattr(module, name))
    else:
        setattr(module, name, value)
    if isinstance(module, Metric):
        forget_computed(module)


def dotted(path: str, name: str) -> str:
    """Name of an attribute in the module."""
    return f"{path}.{name}" if path else name


def not_the_users(module: nn.Module) -> frozenset[str]:
    """Attributes that every module of a module's kind has."""
    kind: Any = type(module)
    return _of_kind(kind)


@cache
def _of_kind(kind: Any) -> frozenset[str]:
    if Metric in kind.__mro__:
        return _names_of("metric")
    return _names_of("lightning" if LightningModule in kind.__mro__ else "torch")


@cache
def _names_of(kind: str) -> frozenset[str]:
    if kind == "metric":
        metric = MeanMetric()
        return frozenset(metric.__dict__.keys() - initial_states(metric).keys())
    bare = LightningModule() if kind == "lightning" else nn.Module()
    return frozenset({*bare.__dict__, "log"})
