"""What steps leave behind in a module, brought from a pipeline's last stage to the others.

Under a pipeline the code of a step behind the trunk runs on the last stage only, and with it
``metric.update(...)``, ``self.outputs.append(...)`` and ``self.count += 1``. Hooks at the end of an
epoch run on every rank, log what they compute there, and loggers, checkpoints and early stopping
act on it. So before the first of these hooks, whatever has changed on the last stage since the time
before goes to the other stages, which then hold the same: attributes and buffers of the module and
of the modules beside the trunk, and with them the states of metrics.

A digest of each attribute finds what changed. Values of any class that can be pickled are carried.
Modules, parameters, optimizers and what refers to them stay what they are on each rank.

Cost: once per epoch of training or evaluation the attributes are pickled on the last stage, and
those that changed are broadcast along the pipeline.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
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
from lightning_megatron.pipeline.sequential import PipelineSequential
from lightning_megatron.topology.mesh import Axis

_Key = tuple[str, str]
"""Name of a module, and of its attribute."""
_OF_A_PROCESS = (nn.Module, nn.Parameter, Optimizer, Trainer, Callback, LightningDataModule)
_NO_STATE = (Dataset, DataLoader)
"""What steps do not change, and is large."""


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
        """Equal for equal values."""
        found = hashlib.blake2b(self._skeleton, digest_size=16)
        for leaf in self._leaves:
            plain = leaf.cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(plain.numpy().data)
        return found.digest()

    def restored(self) -> Any:
        """The value once more."""
        leaves = iter(self._leaves)
        return load(self._skeleton, lambda *_: next(leaves))


def _value_of(content: Any, device: torch.device) -> _Value | None:
    """None where the value cannot travel."""
    try:
        return _Value(content, device)
    except Exception:  # whatever a class raises that is not meant to be pickled
        return None


class StepState(Callback):
    """First of a Trainer's callbacks under a pipeline: makes true everywhere what steps filled.

    Args:
        module: the user's.
        pp: pipeline axis.
        source: rank of the last stage on that axis.
        device: of this process.
        host_group: gloo group over the axis, where the axis' own group is not gloo.
    """

    def __init__(
        self,
        module: LightningModule,
        pp: Axis,
        source: int,
        device: torch.device,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._module, self._device, self._gives = module, device, pp.rank == source
        self._broadcast = ObjectBroadcast(pp, pp.ranks[source], device, host_group)
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

    def share(self) -> None:
        """Bring what changed on the last stage to the others; collective over the pipeline."""
        self._hooks_ran = True
        changed = self._broadcast(self._changed() if self._gives else None)
        if not self._gives:
            modules = dict(_beside_trunk(self._module))
            for (path, name), value in changed.items():
                _set(modules[path], name, value)

    def _changed(self) -> dict[_Key, Any]:
        """What differs from the last time, of which it takes note."""
        found: dict[_Key, Any] = {}
        for _, module in _beside_trunk(self._module):
            if isinstance(module, MetricCollection):
                # Only the first of several metrics with equal states is updated.
                list(module.values(copy_state=False))
        for path, module in _beside_trunk(self._module):
            for name, content in _attributes(module):
                value = _value_of(content, self._device)
                if value is None:
                    continue
                key, digest = (path, name), value.digest()
                if self._known.get(key) != digest:
                    self._known[key], found[key] = digest, content
        return found


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
    """The modules that every stage holds, with their names."""
    yield path, module
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
