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
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric, Metric, MetricCollection
from typing_extensions import override

from lightning_megatron.pipeline.sequential import PipelineSequential
from lightning_megatron.topology.mesh import Axis

_Key = tuple[str, str]
"""Name of a module, and of its attribute."""
_OF_A_PROCESS = (nn.Module, nn.Parameter, Optimizer, Trainer, Callback)


@dataclass(frozen=True)
class _Value:
    """An attribute's value as bytes, beside the tensors in it."""

    pickled: bytes
    tensors: tuple[Tensor, ...]
    on_device: tuple[bool, ...]
    """Which of the tensors, held on the host here, live on the device."""

    @classmethod
    def of(cls, value: Any) -> "_Value | None":
        """None where the value cannot travel."""
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        try:
            pickler.dump(value)
        except Exception:  # whatever a class raises that is not meant to be pickled
            return None
        return cls(
            stream.getvalue(),
            tuple(t.detach().to("cpu", copy=True) for t in pickler.tensors),
            tuple(t.device.type != "cpu" for t in pickler.tensors),
        )

    def digest(self) -> bytes:
        """Equal for equal values."""
        found = hashlib.blake2b(self.pickled, digest_size=16)
        for tensor in self.tensors:
            found.update(repr((tensor.dtype, tensor.shape)).encode())
            found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.digest()

    def unpacked(self, device: torch.device) -> Any:
        """The value, on this process' device."""
        pairs = zip(self.tensors, self.on_device, strict=True)
        tensors = [t.to(device) if moved else t for t, moved in pairs]
        return _Unpickler(io.BytesIO(self.pickled), tensors).load()


class _Pickler(pickle.Pickler):
    """Puts tensors aside, and refuses what belongs to a process."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, _OF_A_PROCESS):
            raise pickle.PicklingError
        if not isinstance(obj, Tensor):
            return None
        if type(obj) is not Tensor or obj.layout is not torch.strided or obj.is_meta:
            raise pickle.PicklingError
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, stream: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    @override
    def persistent_load(self, pid: Any) -> Tensor:
        found: Tensor = self._tensors[pid]
        return found


class StepState(Callback):
    """First of a Trainer's callbacks under a pipeline: makes true everywhere what steps filled.

    Args:
        module: the user's.
        pp: pipeline axis.
        source: rank of the last stage on that axis.
        device: of this process.
    """

    def __init__(
        self, module: LightningModule, pp: Axis, source: int, device: torch.device
    ) -> None:
        self._module, self._pp, self._device = module, pp, device
        self._source, self._gives = pp.ranks[source], pp.rank == source
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
        box: list[Any] = [self._changed() if self._gives else None]
        dist.broadcast_object_list(box, self._source, group=self._pp.group)
        if not self._gives:
            modules = dict(_beside_trunk(self._module))
            for (path, name), value in box[0].items():
                _set(modules[path], name, value.unpacked(self._device))

    def _changed(self) -> dict[_Key, _Value]:
        """What differs from the last time, of which it takes note."""
        found: dict[_Key, _Value] = {}
        for _, module in _beside_trunk(self._module):
            if isinstance(module, MetricCollection):
                # Only the first of several metrics with equal states is updated.
                list(module.values(copy_state=False))
        for path, module in _beside_trunk(self._module):
            for name, content in _attributes(module):
                value = _Value.of(content)
                if value is None:
                    continue
                key, digest = (path, name), value.digest()
                if self._known.get(key) != digest:
                    self._known[key], found[key] = digest, value
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
        (path, name): value
        for path, child in module.named_modules()
        for name, content in _attributes(child)
        if (value := _Value.of(content)) is not None
    }
    frozen = [p for p in module.parameters() if not p.requires_grad]
    copies = [(p, p.detach().clone(), p._version) for p in frozen]
    try:
        yield
    finally:
        modules = dict(module.named_modules())
        for path, child in modules.items():
            for name, content in list(_attributes(child)):
                value, now = before.get((path, name)), _Value.of(content)
                if value is not None and (now is None or now.digest() != value.digest()):
                    _set(child, name, value.unpacked(device))
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
