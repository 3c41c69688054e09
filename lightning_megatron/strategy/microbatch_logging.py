"""Makes ``self.log`` mean the same under microbatches and pipelines as in ordinary Lightning.

Inside a pipelined step ``self.log`` is called once per microbatch, and only on the rank of the last
stage, while progress bar, loggers, ModelCheckpoint and EarlyStopping live on all ranks and expect
one value per batch. So the calls are *recorded*, averaged over the microbatches, carried to the
other stages in one small packed tensor per step, and *replayed* through Lightning's own ``log`` on
every rank. The names and options of the calls travel only when they change.

A logged ``torchmetrics.Metric`` is updated where the step runs. The other stages log a stand-in
whose ``compute`` receives the value from the last stage.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_megatron._lightning.results import (
    count_first_update,
    count_update,
    replaced_log,
    set_value_on_batch,
    value_on_batch,
)
from lightning_megatron._torch.devices import from_host, scalar_on
from lightning_megatron.comm.objects import ObjectBroadcast
from lightning_megatron.pipeline.microbatch import weighted_mean
from lightning_megatron.topology.axis import Axis

_SAME, _CHANGED = 0.0, 1.0


@dataclass
class LogCall:
    """One key logged during a step, over all microbatches."""

    name: str
    options: dict[str, Any]
    values: list[Any] = field(default_factory=list)
    """Value of each microbatch that logged the key."""
    weights: list[float] = field(default_factory=list)
    """Share of the batch's samples in each of these microbatches."""
    batch_sizes: list[Any] = field(default_factory=list)
    """Values that the user gave as ``batch_size``: numbers, or tensors of one."""

    @property
    def metric(self) -> Metric | None:
        """The logged metric object, if it is one."""
        return self.values[-1] if isinstance(self.values[-1], Metric) else None

    def merged(self) -> Tensor:
        """The batch's value in float64: the mean over microbatches, or what ``reduce_fx`` says.

        A microbatch counts in the mean with the ``batch_size`` that the user gave, else with its
        samples. Nothing is read from a device.
        """
        values = [_wide(v) for v in self.values]
        reduce_fx = self.options.get("reduce_fx", "mean")
        if reduce_fx in ("sum", torch.sum, sum):
            return torch.stack(values).sum()
        if reduce_fx in ("max", torch.max, max):
            return torch.stack(values).max()
        if reduce_fx in ("min", torch.min, min):
            return torch.stack(values).min()
        if len(self.batch_sizes) < len(values):
            total = sum(self.weights)
            return weighted_mean(values, [weight / total for weight in self.weights])
        parts = []
        for value, size in zip(values, self.batch_sizes, strict=True):
            given = _wide(size) if isinstance(size, Tensor) else size
            wide = scalar_on(value.device, given, torch.float64)
            # The mean over no token is not a number, and counts as little.
            parts.append(torch.stack([torch.where(wide > 0, value * wide, 0.0), wide]))
        sums = torch.stack(parts).sum(0)
        return sums[0] / sums[1]

    def size(self) -> Tensor | None:
        """The batch's ``batch_size``, where the user gave one."""
        if not self.batch_sizes:
            return None
        return torch.stack([_wide(size) for size in self.batch_sizes]).sum()


@dataclass(frozen=True)
class Replay:
    """All that another rank needs to repeat a call, but for the value."""

    name: str
    options: dict[str, Any]
    attribute: str | None
    """Name of the logged metric object; None for a number."""
    has_forward: bool
    """Whether the metric has a value on the batch alone."""
    sized: bool
    """Whether the user gave a ``batch_size``."""


class LogRecorder:
    """Stands in for ``module.log`` while a step runs on microbatches."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self.calls: dict[str, LogCall] = {}
        self._weight: float | None = 1.0
        self._forward_values: dict[str, list[tuple[float, Tensor]]] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block ``module.log`` records instead of logging."""
        with replaced_log(self._module, self.log):
            yield

    def begin_microbatch(self, weight: float | None) -> None:
        """Say what share of the batch the following calls stand for; None: they do not count."""
        self._weight = weight

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Record one call; takes what ``LightningModule.log`` takes."""
        if self._weight is None:
            return
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph")
        options |= dict(zip(names, args, strict=False))
        options.pop("enable_graph", None)
        batch_size = options.pop("batch_size", None)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"self.log({name!r}, <tensor of shape {tuple(value.shape)}>): a logged tensor has "
                f"a single element; nearest valid: self.log({name!r}, value.mean())"
            )
        call = self.calls.setdefault(name, LogCall(name, options))
        if isinstance(value, Metric):
            self._keep_forward_value(name, value_on_batch(value), self._weight)
        call.values.append(value.detach() if isinstance(value, Tensor) else value)
        call.weights.append(self._weight)
        if batch_size is not None:
            call.batch_sizes.append(batch_size)

    def forward_value(self, name: str) -> Any:
        """Mean over microbatches of a metric's value on its batch; None when it has none."""
        kept = self._forward_values.get(name)
        if not kept:
            return None
        return sum(w * v for w, v in kept) / sum(w for w, _ in kept)

    def _keep_forward_value(self, name: str, value: Any, weight: float) -> None:
        if isinstance(value, Tensor) and value.ndim == 0:
            kept = self._forward_values.setdefault(name, [])
            kept.append((weight, value.detach().to(torch.float64)))


class StageMetric(Metric):
    """A metric that lives on the last stage, seen from any stage of the pipeline.

    Args:
        metric: the metric on the rank of the last stage, None on the others.
        pp: pipeline axis.
        source: rank of the last stage on that axis.
        device: of this process.
        host_group: gloo group along pp, where the device's own backend is another.
    """

    full_state_update = False

    def __init__(
        self,
        metric: Metric | None,
        pp: Axis,
        source: int,
        device: torch.device,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        # `compute` communicates by itself, every time it is called.
        super().__init__(sync_on_compute=False, compute_with_cache=False)
        self.__dict__["_source"] = metric
        self._share = ObjectBroadcast(pp, pp.ranks[source], device, host_group)
        self.to(device)

    @override
    def update(self, *args: Any, **kwargs: Any) -> None:
        count_update(self)

    @override
    def compute(self) -> Any:
        """Value over the epoch, from the last stage; collective over the pipeline."""
        source: Metric | None = self.__dict__["_source"]
        return self._share(None if source is None else source.compute())

    @override
    def reset(self) -> None:
        super().reset()
        source: Metric | None = self.__dict__["_source"]
        if source is not None:
            source.reset()


class LogReplay:
    """Carries recorded calls from the last stage to all stages and replays them.

    Args:
        module: whose ``log`` is replayed.
        pp: pipeline axis; size 1 replays locally.
        source: rank of the last stage on that axis.
        device: for the packed tensor.
        dtype: of the logged values.
        host_group: gloo group along pp, where the device's own backend is another.
    """

    def __init__(
        self,
        module: LightningModule,
        pp: Axis,
        source: int,
        device: torch.device,
        dtype: torch.dtype,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._host_group = host_group
        self._module = module
        self._pp = pp
        self._device = device
        self._dtype = dtype
        self._schemas: dict[str, list[Replay]] = {}
        self._metrics: dict[str, StageMetric] = {}
        self._source = source
        self._is_last = pp.rank == source
        self._tell = ObjectBroadcast(pp, pp.ranks[source], device, host_group)

    def share(
        self, hook: str, recorder: LogRecorder, extra: Sequence[float | Tensor] = ()
    ) -> list[float | Tensor]:
        """Replay the calls of one step on this rank; collective over the pipeline.

        Args:
            hook: the step's name; each step keeps its own list of keys.
            recorder: what this rank recorded; only the last stage's counts.
            extra: further numbers to carry, the same number of them in every step of ``hook``.

        Returns:
            ``extra`` of the last stage; there as it was given, so that no device is waited for.
        """
        schema = [
            Replay(
                name=call.name,
                options=call.options,
                attribute=self._attribute(call),
                has_forward=recorder.forward_value(call.name) is not None,
                sized=bool(call.batch_sizes),
            )
            for call in recorder.calls.values()
        ]
        calls = recorder.calls.values()
        values = [number for call in calls for number in self._packed(recorder, call)]
        if self._pp.group is not None:
            schema, values, extra = self._exchange(hook, schema, values, extra)
        for call, value, size in zip(schema, values[::2], values[1::2], strict=True):
            options = dict(call.options)
            if call.sized:  # Lightning counts with tensors as well
                options["batch_size"] = scalar_on(self._device, size, torch.int64)
            if call.attribute is None:
                self._module.log(call.name, self._scalar(value), **options)
            else:
                metric = self._stage_metric(recorder, call.name, call.attribute)
                cache: Any = self._scalar(value) if call.has_forward else None
                set_value_on_batch(metric, cache)
                options["metric_attribute"] = call.attribute
                self._module.log(call.name, metric, **options)
        return list(extra)

    def _scalar(self, value: float | Tensor) -> Tensor:
        return scalar_on(self._device, value, self._dtype)

    def _packed(self, recorder: LogRecorder, call: LogCall) -> list[float | Tensor]:
        """Value and batch size."""
        size = call.size()
        rest: list[float | Tensor] = [float("nan") if size is None else size]
        if call.metric is None:
            return [call.merged(), *rest]
        forward = recorder.forward_value(call.name)
        return [float("nan") if forward is None else torch.as_tensor(forward), *rest]

    def _exchange(
        self,
        hook: str,
        schema: list[Replay],
        values: list[float | Tensor],
        extra: Sequence[float | Tensor],
    ) -> tuple[list[Replay], list[float | Tensor], list[float | Tensor]]:
        known = self._schemas.get(hook)
        size = 1 + len(extra) + 2 * len(known or [])
        if self._is_last:
            changed = known is None or known != schema
            packed = [_CHANGED if changed else _SAME, *extra, *(values if not changed else [])]
            packed += [0.0] * (size - len(packed))
            self._broadcast(self._pack(packed))
            if changed:
                self._schemas[hook] = schema
                self._tell(schema)
                self._broadcast(self._pack(values))
            return schema, values, list(extra)
        numbers = self._broadcast(self._pack([0.0] * size)).tolist()
        shared: list[float | Tensor] = numbers[1 + len(extra) :]
        if numbers[0] == _CHANGED:
            schema = self._schemas[hook] = self._tell(None)
            shared = self._broadcast(self._pack([0.0] * 2 * len(schema))).tolist()
        return self._schemas[hook], shared, numbers[1 : 1 + len(extra)]

    def _pack(self, numbers: Sequence[float | Tensor]) -> Tensor:
        known = [0.0 if isinstance(number, Tensor) else float(number) for number in numbers]
        packed = from_host(known, torch.float64, self._device)
        for place, number in enumerate(numbers):
            if isinstance(number, Tensor):
                packed[place] = _wide(number)
        return packed

    def _broadcast(self, message: Tensor) -> Tensor:
        if message.numel():
            dist.broadcast(message, self._pp.ranks[self._source], group=self._pp.group)
        return message

    def _attribute(self, call: LogCall) -> str | None:
        metric = call.metric
        if metric is None:
            return None
        given: str | None = call.options.get("metric_attribute")
        if given is not None:
            return given
        for name, module in self._module.named_modules():
            if module is metric:
                return str(name)
        raise ValueError(
            f"self.log({call.name!r}, <{type(metric).__name__}>): the metric is not an attribute "
            "of the module; set it as one, or pass metric_attribute="
        )

    def _stage_metric(self, recorder: LogRecorder, name: str, attribute: str) -> Metric:
        source = recorder.calls[name].metric if name in recorder.calls else None
        if self._pp.size == 1:
            assert source is not None
            return source
        metric = self._metrics.get(attribute)
        if metric is None:
            held = source if self._is_last else None
            metric = StageMetric(held, self._pp, self._source, self._device, self._host_group)
            self._metrics[attribute] = metric
        count_first_update(metric)
        return metric


def _wide(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach().squeeze()
