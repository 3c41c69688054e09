"""State that steps leave behind in a module, brought from a pipeline's last stage to the others.

Under a pipeline the code of a step behind the trunk runs on the last stage only, and with it
``metric.update(...)``, ``self.outputs.append(...)`` and ``self.count += 1``. Hooks run on every
rank, log what they compute there, and loggers, checkpoints and early stopping act on it. So before
the first hook at the end of an epoch, whatever has changed on the last stage since the time before
goes to the other stages, which then hold the same: attributes and buffers of the module and of the
modules beside the trunk, and with them the states of metrics. Attributes that the code of steps and
that of hooks around a batch both mention go there after every step; those that only such hooks
mention are filled by each rank for itself, and stay.

A digest of each attribute finds what changed. Values of any class that can be pickled are carried;
of others the items of a dict, or the attributes of an object. Modules, parameters, optimizers and
what refers to them stay what they are on each rank. Where hooks use what steps fill and nothing can
carry, the run ends with an error (a container) or warns (another object).

Cost: once per epoch of training or evaluation the attributes are pickled on the last stage, and
those that changed are broadcast along the pipeline; per batch the same for attributes that its
hooks use, and nothing where there are none.
"""

import hashlib
import re
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, Metric, MetricCollection
from typing_extensions import override

from lightning_megatron.comm.objects import ObjectBroadcast, dump, load
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.strategy.code_inspection import names_in, own_functions
from lightning_megatron.strategy.observers import HOOKS
from lightning_megatron.topology.mesh import Axis

_Key = tuple[str, str]
"""Name of a module, and of its attribute."""
_OF_A_PROCESS = (nn.Module, nn.Parameter, Optimizer, Trainer, Callback, LightningDataModule)
_NO_STATE = (Dataset, DataLoader)
"""Classes of objects that steps do not change, and that are large."""
_CONTAINERS = (dict, list, set, tuple, deque)
_AROUND_A_BATCH = frozenset(
    (
        *(*HOOKS, "on_before_backward", "lr_scheduler_step"),
        *("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"),
        *(
            f"on_{k}_batch_{e}"
            for k in ("train", "validation", "test", "predict")
            for e in ("start", "end")
        ),
    )
)
_BUILDERS = ("__init__", "configure_model", "configure_optimizers", "setup", "prepare_data")


@dataclass(frozen=True)
class _Parts:
    """Parts of an object that cannot be pickled itself: items of a dict, or attributes."""

    parts: Mapping[Any, Any]

    def put_into(self, target: Any) -> None:
        """Make them those of another rank's object."""
        if isinstance(target, dict):
            target.clear()
            target.update(self.parts)
        else:
            vars(target).update(self.parts)


class _Value:
    """An attribute's value, as it is now."""

    def __init__(self, value: Any, device: torch.device) -> None:
        self._skeleton, leaves = dump(value, device.type, (*_OF_A_PROCESS, *_NO_STATE))
        self._leaves = [leaf.detach() for leaf in leaves]

    def keep(self) -> "_Value":
        """Itself, whatever becomes of the tensors."""
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


def _value_of(content: Any, device: torch.device) -> _Value | None:
    """None where the value cannot travel, not in parts either."""
    try:
        return _Value(content, device)
    except Exception:  # whatever a class raises that is not meant to be pickled
        parts = _parts_of(content, device)
    try:
        return None if parts is None else _Value(parts, device)
    except Exception:  # likewise of the items of a dict
        return None


def _parts_of(content: Any, device: torch.device) -> _Parts | None:
    if isinstance(content, dict):
        return _Parts(dict(content))
    stays = (*_OF_A_PROCESS, *_NO_STATE, *_CONTAINERS, type)
    if callable(content) or isinstance(content, stays) or not hasattr(content, "__dict__"):
        return None
    own = {k: v for k, v in vars(content).items() if _value_of(v, device) is not None}
    return _Parts(own) if own else None


class StepState(Callback):
    """First of a Trainer's callbacks under a pipeline: makes true everywhere what steps filled.

    Args:
        module: the user's.
        pp: pipeline axis.
        source: rank of the last stage on that axis.
        device: of this process.
        host_group: gloo group over the axis, where the axis' own group is not gloo.
        callbacks: the user's.
    """

    def __init__(
        self,
        module: LightningModule,
        pp: Axis,
        source: int,
        device: torch.device,
        host_group: dist.ProcessGroup | None = None,
        callbacks: Iterable[object] = (),
    ) -> None:
        self._before: dict[_Key, bytes] = {}
        self._warned: set[str] = set()
        self._module, self._device, self._gives = module, device, pp.rank == source
        self._broadcast = ObjectBroadcast(pp, pp.ranks[source], device, host_group)
        filled = _names_of_steps(module)
        observers = (module, *callbacks)
        around_a_batch = _names_of_hooks(observers, _AROUND_A_BATCH)
        found = (
            filled & _names_of_hooks(observers),
            filled & around_a_batch,
            around_a_batch - filled,
        )
        # The last stage decides for all: code may not be the same in every process.
        self._used, self._used_each_batch, self._filled_by_hooks = self._broadcast(found)
        self._known: dict[_Key, bytes] = {}
        self._hooks_ran = True

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self._note()

    @override
    def on_validation_batch_start(self, *args: Any) -> None:
        self._note()

    @override
    def on_test_batch_start(self, *args: Any) -> None:
        self._note()

    @override
    def on_predict_batch_start(self, *args: Any) -> None:
        self._note()

    def _note(self) -> None:
        """Before the first step after such hooks, which have changed all stages alike."""
        if self._hooks_ran and self._gives:
            self._changed()
        self._hooks_ran = False

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.share()

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.share()

    @override
    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.share()

    @override
    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.share()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.share()  # hooks may look at what training has filled

    def begin_step(self) -> None:
        """Note what hooks around the batch use."""
        if self._used_each_batch and self._gives:
            self._before = {k: v.digest() for k, _, v in self._values() if self._serves_batch(k)}

    def end_step(self) -> None:
        """Give these hooks what the step has filled; collective over the pipeline."""
        if not self._used_each_batch:
            return
        changed: dict[_Key, Any] = {}
        if self._gives:
            changed = {
                key: content
                for key, content, value in self._values()
                if self._serves_batch(key) and self._before.get(key) != value.digest()
            }
        self._hand_over(changed)

    def share(self) -> None:
        """Bring what changed on the last stage to the others; collective over the pipeline."""
        self._hooks_ran = True
        self._hand_over(self._changed() if self._gives else {})

    def _hand_over(self, changed: Mapping[_Key, Any]) -> None:
        stuck = self._stuck() if self._gives else ()
        received, stuck = self._broadcast((_packed(changed, self._device), stuck))
        if stuck:
            raise ConfigError(
                f"{', '.join(stuck)}: steps fill and hooks use what cannot be pickled, so that "
                "other pipeline stages than the last do not get it; nearest valid: a list or dict "
                "of numbers and tensors, a torchmetrics.Metric, or pp=1"
            )
        if not self._gives:
            modules = dict(_beside_trunk(self._module))
            for (path, name), value in received.items():
                _set(modules[path], name, value)

    def _changed(self) -> dict[_Key, Any]:
        """Attributes that differ from the last time, of which it takes note."""
        found: dict[_Key, Any] = {}
        for key, content, value in self._values():
            digest = value.digest()
            if self._known.get(key) != digest and _root_of(key) not in self._filled_by_hooks:
                self._known[key], found[key] = digest, content
        return found

    def _values(self) -> Iterator[tuple[_Key, Any, _Value]]:
        for _, module in _beside_trunk(self._module):
            if isinstance(module, MetricCollection):
                # Only the first of several metrics with equal states is updated.
                list(module.values(copy_state=False))
        for path, module in _beside_trunk(self._module):
            for name, content in _attributes(module):
                value = _value_of(content, self._device)
                if value is not None:
                    yield (path, name), content, value

    def _serves_batch(self, key: _Key) -> bool:
        return _root_of(key) in self._used_each_batch

    def _stuck(self) -> tuple[str, ...]:
        """Names of containers that hooks use and that cannot travel; warns of other objects."""
        found = []
        for path, module in _beside_trunk(self._module):
            for name, content in _attributes(module):
                used = _root_of((path, name)) in self._used
                if not used or callable(content) or _value_of(content, self._device) is not None:
                    continue
                if isinstance(content, _CONTAINERS):
                    if not _holds_modules(content):
                        found.append(f"self.{_dotted(path, name)}")
                elif not isinstance(content, (*_OF_A_PROCESS, *_NO_STATE)):
                    self._warn(f"self.{_dotted(path, name)}", content)
        return tuple(found)

    def _warn(self, name: str, content: object) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{name} ({type(content).__name__}) cannot be pickled: what steps leave in it "
                "behind the trunk is there on the last pipeline stage only, and hooks use it",
                stacklevel=2,
            )


def _packed(changed: Mapping[_Key, Any], device: torch.device) -> dict[_Key, Any]:
    """Values with objects that cannot be pickled in parts."""
    found = {}
    for key, content in changed.items():
        try:
            _Value(content, device)
            found[key] = content
        except Exception:  # see `_value_of`
            found[key] = _parts_of(content, device)
    return found


def _names_of_steps(module: LightningModule) -> frozenset[str]:
    """Names that functions of the module mention which a step may call."""
    functions = (
        function
        for name, function in own_functions(module)
        if name not in (*_BUILDERS, *HOOKS) and not name.startswith("on_")
    )
    return frozenset().union(*map(names_in, functions))


def _names_of_hooks(
    observers: Iterable[object], hooks: frozenset[str] | None = None
) -> frozenset[str]:
    """Names that hooks mention, or methods that they call; all hooks, or those given."""
    found: set[str] = set()
    for observer in observers:
        methods = dict(own_functions(observer))
        to_read: list[FunctionType] = [
            function
            for name, function in own_functions(observer)
            if (name in hooks if hooks else name.startswith("on_") or name in _AROUND_A_BATCH)
        ]
        seen = set()
        while to_read:
            function = to_read.pop()
            if function not in seen:
                seen.add(function)
                names = names_in(function)
                found |= names
                to_read += [methods[name] for name in names & methods.keys()]
    return frozenset(found)


def _root_of(key: _Key) -> str:
    """Attribute of the user's module by which his code reaches a value."""
    path, name = key
    return re.split(r"[.:]", path.lstrip(":"))[0] if path else name


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _holds_modules(content: Any) -> bool:
    values = content.values() if isinstance(content, dict) else content
    return all(isinstance(value, nn.Module) for value in values)


@contextmanager
def unchanged(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards attributes, buffers, metrics and frozen parameters are what they were before.

    For a microbatch that runs for the sake of its collectives only, and is to count nowhere.

    Args:
        module: the user's.
        device: of this process.
    """
    before = {
        (path, name): value.keep()
        for path, child in module.named_modules()
        for name, content in _attributes(child)
        if (value := _value_of(content, device)) is not None
    }
    frozen = [p for p in module.parameters() if not p.requires_grad]
    copies = [(p, p.detach().clone(), p._version) for p in frozen]
    try:
        yield
    finally:
        modules = dict(module.named_modules())
        for path, child in modules.items():
            for name, content in list(_attributes(child)):
                value, now = before.get((path, name)), _value_of(content, device)
                if value is not None and (now is None or now.digest() != value.digest()):
                    _set(child, name, value.restored())
        with torch.no_grad():
            for parameter, copy, version in copies:
                if parameter._version != version:
                    parameter.copy_(copy)


def _beside_trunk(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules that every stage holds, with their names; and metrics in lists and dicts."""
    yield path, module
    for name, content in vars(module).items():
        if name not in _not_the_users(_kind(module)) and isinstance(content, list | tuple | dict):
            items = content.items() if isinstance(content, dict) else enumerate(content)
            for place, metric in items:
                if isinstance(metric, Metric):
                    yield f"{path}:{name}:{place}", metric
    for name, child in module.named_children():
        if not isinstance(child, PipelineSequential):
            yield from _beside_trunk(child, f"{path}.{name}" if path else name)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in module.__dict__.items():
        if name not in _not_the_users(_kind(module)) and not name.startswith("_hparams"):
            yield name, value
    for name, buffer in module.named_buffers(recurse=False):
        yield name, buffer
    if isinstance(module, Metric):
        yield "_update_count", module._update_count


def _set(module: nn.Module, name: str, value: Any) -> None:
    if name in module._buffers and isinstance(module._buffers[name], Tensor):
        module._buffers[name].copy_(value)  # type: ignore[union-attr]
        return
    if isinstance(value, _Parts):
        value.put_into(getattr(module, name))
    else:
        setattr(module, name, value)
    if isinstance(module, Metric):
        module._computed = None


def _kind(module: nn.Module) -> str:
    if isinstance(module, Metric):
        return "metric"
    return "lightning" if isinstance(module, LightningModule) else "torch"


@cache
def _not_the_users(kind: str) -> frozenset[str]:
    """Attributes that every module of a kind has."""
    if kind == "metric":
        metric = MeanMetric()
        return frozenset(metric.__dict__.keys() - metric._defaults.keys())
    bare = LightningModule() if kind == "lightning" else nn.Module()
    return frozenset({*bare.__dict__, "log"})
