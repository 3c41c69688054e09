"""State that steps leave behind in a module, brought from a pipeline's last stage to the others.

Under a pipeline the code of a step behind the trunk runs on the last stage only, and with it
``metric.update(...)``, ``self.outputs.append(...)`` and ``self.count += 1``. Hooks run on every
rank, log what they compute there, and loggers, checkpoints and early stopping act on it. So before
the first hook at the end of an epoch, whatever has changed on the last stage since the time before
goes to the other stages, which then hold the same: attributes and buffers of the module and of the
modules beside the trunk, and with them the states of metrics. Attributes that hooks around a batch
mention go there after every step that has changed them, and only then: what such hooks change is
each rank's own. So do those that a step mentions before the call of its trunk and behind it. Code
that reaches attributes by names that it makes up (``getattr``) may mean any.

A digest of each attribute finds what changed. Values of any class that can be pickled are carried;
of others the items of a dict, or the attributes of an object. Modules, parameters, optimizers and
what refers to them stay what they are on each rank. Where a step has filled a container that hooks
use and nothing can carry, the run ends with an error; of other such objects a warning tells.

Cost: once per epoch of training or evaluation the attributes are pickled on the last stage, and
those that changed are broadcast along the pipeline; per batch the same for attributes that its
hooks use or that steps carry. Of containers that any hooks use, each step compares which objects
they hold.

The file is long because what to share, how to carry it and what cannot be carried are one decision.
"""

import hashlib
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric, Metric, MetricCollection
from typing_extensions import override

from lightning_megatron._lightning import (
    UPDATE_COUNT,
    forget_computed,
    initial_states,
    is_of_hyper_parameters,
)
from lightning_megatron.comm.objects import ObjectBroadcast, dump, load
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.strategy.code_inspection import (
    methods_of,
    names_in,
    names_on_both_sides,
    own_functions,
)
from lightning_megatron.strategy.observers import HOOKS
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import Topology

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
_Names: TypeAlias = frozenset[str]
_ANY: _Names = frozenset(
    (
        *("getattr", "setattr", "__getattribute__", "attrgetter", "methodcaller"),
        *("__dict__", "vars", "eval", "exec"),
    )
)
"""Ways to attributes that code does not mention: one of them stands for all names."""
_Shape: TypeAlias = tuple[tuple[int, int], ...]
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


def _value_of(content: Any, device: torch.device) -> _Value | None:
    """Value as it can travel; None where it cannot, not in parts either."""
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
        microbatches: gives the number of microbatches of the latest training batch.
    """

    def __init__(
        self,
        module: LightningModule,
        pp: Axis,
        source: int,
        device: torch.device,
        host_group: dist.ProcessGroup | None = None,
        callbacks: Iterable[object] = (),
        *,
        microbatches: Callable[[], int],
    ) -> None:
        self._microbatches = microbatches
        self._before: dict[_Key, bytes] = {}
        self._warned: set[str] = set()
        self._module = module
        self._device = device
        self._gives = pp.rank == source
        self._broadcast = ObjectBroadcast(pp, pp.ranks[source], device, host_group)
        observers = (module, *callbacks)
        in_hooks, in_steps = _names_of_hooks(observers), _names_of_steps(module)
        in_both = _meant_by_both(in_hooks, in_steps)
        carried = _names_that_steps_carry(module)
        found = in_hooks, in_both, _names_of_hooks(observers, _AROUND_A_BATCH) | carried, carried
        # The last stage decides for all: code may not be the same in every process.
        self._in_hooks, self._in_both, self._around_a_batch, self._carried = self._broadcast(found)
        self._shapes: dict[_Key, _Shape] = {}
        self._cannot_travel: set[_Key] = set()
        self._stuck: dict[str, None] = {}
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
        """Note attributes before the first step after hooks, which change all stages alike."""
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

    def detach(self, trainer: Trainer) -> None:
        """Be no callback of the Trainer any more."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.remove(self)

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Context of a step, after which hooks around the batch see what it has filled."""
        self.begin_step()
        yield
        self.end_step()

    def begin_step(self) -> None:
        """Note what hooks use, as it is before the step."""
        if self._gives:
            self._before = {k: v.digest() for k, _, v in self._values(self._around_a_batch)}
            self._note_containers()

    def end_step(self) -> None:
        """Give hooks around the batch what the step has filled; collective over the pipeline."""
        changed: dict[_Key, Any] = {}
        if self._gives:
            self._check_containers()
            changed = {
                key: content
                for key, content, value in self._values(self._around_a_batch)
                if self._before.get(key) != value.digest()
            }
        if self._around_a_batch:
            self._warn_of_microbatches(changed)
            self._hand_over(changed)

    def _warn_of_microbatches(self, changed: Iterable[_Key]) -> None:
        """Warn where the first stage would need in a batch what the last makes of it."""
        count = self._microbatches()
        stale = [f"self.{_dotted(*key)}" for key in changed if _is_meant(key, self._carried)]
        if count > 1 and self._module.training and stale and stale[0] not in self._warned:
            self._warned.add(stale[0])
            warnings.warn(
                f"{stale[0]}: training_step reads it before its trunk and changes it behind, for "
                f"each of {count} microbatches of a batch: stages before the last see what it was "
                "when the batch began; num_microbatches=1 keeps batches whole",
                stacklevel=2,
            )

    def _note_containers(self) -> None:
        """Shapes of containers before a step; what others than steps have filled is tried anew."""
        for key, content in self._containers():
            shape = _shape(content)
            if self._shapes.get(key) != shape:
                self._shapes[key] = shape
                self._cannot_travel.discard(key)
                if _value_of(content, self._device) is None:
                    self._cannot_travel.add(key)

    def _check_containers(self) -> None:
        """Find containers that the step has changed and nothing can carry.

        Only items that are new are tried: a list may grow by one in each step of an epoch.
        """
        for key, content in self._containers():
            before, now = self._shapes.get(key, ()), _shape(content)
            if now == before:
                continue
            self._shapes[key] = now
            old = {one for one, _ in before}
            new = [item for item in _items(content) if id(item) not in old]
            doubtful = key in self._cannot_travel or _value_of(new, self._device) is None
            if doubtful and _value_of(content, self._device) is None:
                self._stuck[f"self.{_dotted(*key)}"] = None

    def share(self) -> None:
        """Bring what changed on the last stage to the others; collective over the pipeline."""
        self._hooks_ran = True
        self._hand_over(self._changed() if self._gives else {})

    def _hand_over(self, changed: Mapping[_Key, Any]) -> None:
        self._warn_of_others()
        received, stuck = self._broadcast((_packed(changed, self._device), list(self._stuck)))
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
            if self._known.get(key) != digest and not _is_meant(key, self._around_a_batch):
                self._known[key], found[key] = digest, content
        return found

    def _values(self, names: _Names = _ANY) -> Iterator[tuple[_Key, Any, _Value]]:
        """Attributes that names mean, with values that can travel."""
        if not names:
            return
        for _, module in _beside_trunk(self._module):
            if isinstance(module, MetricCollection):
                # Only the first of several metrics with equal states is updated.
                list(module.values(copy_state=False))
        for key, content in self._meant(names):
            value = _value_of(content, self._device)
            if value is not None:
                yield key, content, value

    def _meant(self, names: _Names) -> Iterator[tuple[_Key, Any]]:
        for path, module in _beside_trunk(self._module):
            for name, content in _attributes(module):
                if _is_meant((path, name), names):
                    yield (path, name), content

    def _containers(self) -> Iterator[tuple[_Key, Any]]:
        """Containers that hooks may use."""
        for key, content in self._meant(self._in_hooks):
            if isinstance(content, _CONTAINERS):
                yield key, content

    def _warn_of_others(self) -> None:
        """Warn of objects of which nothing tells whether steps change them."""
        if not self._gives:
            return
        stay = (*_OF_A_PROCESS, *_NO_STATE, *_CONTAINERS)
        for key, content in self._meant(self._in_both - _ANY):
            name = f"self.{_dotted(*key)}"
            if callable(content) or isinstance(content, stay) or name in self._warned:
                continue
            if _value_of(content, self._device) is None:
                self._warned.add(name)
                warnings.warn(
                    f"{name} ({type(content).__name__}) cannot be pickled: what steps leave in it "
                    "behind the trunk is there on the last pipeline stage only, and hooks use it",
                    stacklevel=2,
                )


def _shape(content: Any) -> _Shape:
    """Numbers that change when items are added to a container, taken away, replaced or written."""
    return tuple((id(item), _mark(item)) for item in _items(content))


def _mark(item: Any) -> int:
    if isinstance(item, Tensor):
        return 0 if item.is_inference() else item._version
    return len(item) if isinstance(item, _CONTAINERS) else 0


def _items(content: Any) -> Iterator[Any]:
    """Items of a container and of those in it."""
    seen, to_read = set[int](), [content]
    while to_read:
        container = to_read.pop()
        if id(container) not in seen:
            seen.add(id(container))
            is_dict = isinstance(container, dict)
            items = (*container.keys(), *container.values()) if is_dict else tuple(container)
            yield from items
            to_read += [item for item in items if isinstance(item, _CONTAINERS)]


def share_over_stages(
    trainer: Trainer,
    module: LightningModule,
    topology: Topology,
    source: int,
    host_group: dist.ProcessGroup | None,
    *,
    microbatches: Callable[[], int],
) -> StepState | None:
    """Make true on all stages what steps leave behind on the last; None without a pipeline.

    Args:
        trainer: whose first callback sees to it.
        module: the user's.
        topology: the layout.
        source: rank of the last stage on the pipeline axis.
        host_group: gloo group over the axis, where the axis' own group is not gloo.
        microbatches: gives the number of microbatches of the latest training batch.
    """
    if topology.pp.size == 1:
        return None
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    state = StepState(
        module,
        topology.pp,
        source,
        topology.device,
        host_group,
        callbacks,
        microbatches=microbatches,
    )
    callbacks.insert(0, state)
    return state


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


def _names_that_steps_carry(module: LightningModule) -> frozenset[str]:
    """Names that a step mentions before the call of its trunk and behind it.

    What it changes behind the call, on the last stage, another batch may use before it, on all.
    """
    trunks = {
        part
        for path, child in module.named_modules()
        if isinstance(child, PipelineSequential)
        for part in path.split(".")
    }
    methods = methods_of(module)
    steps = ("training_step", "validation_step", "test_step", "predict_step")
    found = (names_on_both_sides(methods, step, trunks) for step in steps)
    return frozenset().union(*found) - _ANY


def _names_of_hooks(
    observers: Iterable[object], hooks: frozenset[str] | None = None
) -> frozenset[str]:
    """Names that hooks mention, or functions that they call; all hooks, or those given."""
    found: set[str] = set()
    for observer in observers:
        to_read: list[FunctionType] = [
            function
            for name, function in own_functions(observer)
            if (name in hooks if hooks else name.startswith("on_") or name in _AROUND_A_BATCH)
        ]
        methods = _functions_within_reach(observer) if to_read else {}
        seen = set()
        while to_read:
            function = to_read.pop()
            if function not in seen:
                seen.add(function)
                names = names_in(function)
                found |= names
                for name in names & methods.keys():
                    to_read += methods[name]
    return frozenset(found)


def _functions_within_reach(observer: object) -> dict[str, list[FunctionType]]:
    """Functions by name, of an object and of those that it holds, to which it may be handed."""
    held = (*vars(observer).values(), *getattr(observer, "_modules", {}).values())
    found: dict[str, list[FunctionType]] = {}
    for owner in (observer, *held):
        if hasattr(owner, "__dict__") and not isinstance(owner, type):
            for name, function in own_functions(owner):
                found.setdefault(name, []).append(function)
    return found


def _meant_by_both(some: _Names, others: _Names) -> _Names:
    """Names that code with ``some`` and code with ``others`` mention or may mean."""
    found = some & others
    if some & _ANY:
        found |= others
    if others & _ANY:
        found |= some
    return found


def _is_meant(key: _Key, names: _Names) -> bool:
    """Whether code with these names may reach an attribute."""
    path, name = key
    root = re.split(r"[.:]", path.lstrip(":"))[0] if path else name
    return root in names or bool(names & _ANY)


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


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
        if name not in _not_the_users(_kind(module)) and not is_of_hyper_parameters(name):
            yield name, value
    for name, buffer in module.named_buffers(recurse=False):
        yield name, buffer
    if isinstance(module, Metric):
        yield UPDATE_COUNT, getattr(module, UPDATE_COUNT)


def _set(module: nn.Module, name: str, value: Any) -> None:
    if name in module._buffers and isinstance(module._buffers[name], Tensor):
        module._buffers[name].copy_(value)  # type: ignore[union-attr]
        return
    if isinstance(value, _Parts):
        value.put_into(getattr(module, name))
    else:
        setattr(module, name, value)
    if isinstance(module, Metric):
        forget_computed(module)


def _kind(module: nn.Module) -> str:
    if isinstance(module, Metric):
        return "metric"
    return "lightning" if isinstance(module, LightningModule) else "torch"


@cache
def _not_the_users(kind: str) -> frozenset[str]:
    """Attributes that every module of a kind has."""
    if kind == "metric":
        metric = MeanMetric()
        return frozenset(metric.__dict__.keys() - initial_states(metric).keys())
    bare = LightningModule() if kind == "lightning" else nn.Module()
    return frozenset({*bare.__dict__, "log"})
