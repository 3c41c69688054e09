"""Throughput of the whole job by wall time: tokens/s, MFU, step time.

===============================  ===================================================================
``perf/tokens_per_s``            tokens of the global batches over wall time
``perf/tokens_per_s_per_device`` the same, per process
``perf/samples_per_s``           samples of the global batches over wall time
``perf/step_time_s``             wall time of a batch
``time/data_wait_s``             part of it in which the loop waited for data
``time/data_wait_fraction``      the same, as a share of it
``perf/tflops_per_device``       model FLOPs of a process per second, in 1e12
``perf/mfu``                     model FLOPs over what the devices can do at most, dense bfloat16
``perf/hfu``                     the same with the operations that really run, recomputed ones too
===============================  ===================================================================

Wall time is all time between the ends of two batches: waiting for data, communication and the
optimizer step included, since that is what a training run pays for. Validation does not count, nor,
under `MegatronStrategy`, does saving checkpoints; their time is reported by itself.

The global batch is this rank's batch times the number of data-parallel ranks: tensor and pipeline
peers work on the same batch and must not be counted again. That number is what the strategy tells
the distributed sampler (`distributed_sampler_kwargs["num_replicas"]`), so the callback is right
under any strategy, Lightning's own included. What FLOPs are is said in `monitoring.flops`, which
also knows the peaks of devices; where a peak is unknown (a CPU, a GPU that is not in the table,
products in FP8) there is no MFU unless ``peak_tflops`` is given.

Nothing is communicated but one number, once; no device is synchronised: on an asynchronous device
the queue keeps a constant depth, over which the window averages.
"""

import time
from collections import deque
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_megatron._torch.devices import device_module, is_cuda
from lightning_megatron.errors import raise_if_any
from lightning_megatron.monitoring.flops import (
    COUNTED,
    ModelFlops,
    OperationCounter,
    count_both,
    count_tokens,
    model_flops,
    peak_flops,
)
from lightning_megatron.monitoring.rank_stats import number_device
from lightning_megatron.monitoring.window import LoggingSteps
from lightning_megatron.run_log.sections import CHECKPOINT
from lightning_megatron.services import services_if_any

_COUNTED_BATCH = 3
"""Number of the batch whose operations are counted: by then a strategy that measures its first
batches has settled."""
_BAR_S = 1.0
"""Seconds after which the rate in the progress bar is renewed between two logged values."""


class _Mark(NamedTuple):
    """The end of a batch."""

    time: float
    tokens: int
    """Tokens of all batches until now."""
    samples: int
    waited: float
    """Seconds for data, until now."""


class ThroughputMonitor(pl.Callback):
    """Logs throughput and the use of the hardware; tokens per second also in the progress bar.

    The first batch is not measured, as it pays for everything that happens once.

    Args:
        window: number of batches to average over.
        every: batches between two values; None: the steps in which the Trainer logs, and in the
            progress bar, if there is one, once a second.
        flops_per_token: model FLOPs of forward and backward, where the formulas do not fit.
        peak_tflops: what a device can do, in 1e12 operations per second, where the table does not
            know it or another number format counts.

    Attributes:
        formula: how model FLOPs are known; None where they are not.

    Raises:
        ConfigError: a window is smaller than one batch, or a rate is not positive.
    """

    def __init__(
        self,
        window: int = 20,
        every: int | None = None,
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
    ) -> None:
        counts = {"window": window, "every": every}
        rates = {"flops_per_token": flops_per_token, "peak_tflops": peak_tflops}
        raise_if_any(
            [
                *(
                    f"{n}={v}: must be at least 1; nearest valid: 1"
                    for n, v in counts.items()
                    if v is not None and v < 1
                ),
                *(
                    f"{n}={v}: must be positive; nearest valid: None"
                    for n, v in rates.items()
                    if v is not None and not v > 0
                ),
            ]
        )
        self._every = every
        self._logging = LoggingSteps()
        self._bar_at = 0.0
        self._marks: deque[_Mark] = deque(maxlen=window + 1)
        self._given = flops_per_token
        self._peak_tflops = peak_tflops
        self._clock = time.perf_counter
        self._left_out = self._paused_at = self._waited = self._ended_at = 0.0
        self._saving = 0.0
        self._batches = 0
        self._model: ModelFlops | None = None
        self._hardware: float | None = None
        self._counter: OperationCounter | None = None
        self._peak: float | None = None

    @property
    def formula(self) -> str | None:
        """Formula of the model FLOPs."""
        return None if self._model is None else self._model.formula

    @property
    def tokens_per_s(self) -> float | None:
        """The current rate of the job; None until two batches are done."""
        return self._rates()["perf/tokens_per_s"] if len(self._marks) > 1 else None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._marks.clear()
        self._left_out = self._waited = 0.0
        self._saving = seconds_saving(trainer)
        self._batches = 0
        self._peak = self._find_peak(trainer)
        self._model = None
        self._hardware = None
        self._ended_at = self._clock()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._leave_out_saving(trainer)
        self._waited += self._clock() - self._left_out - self._ended_at
        if self._batches == _COUNTED_BATCH and _runs_eagerly(trainer):
            self._counter = OperationCounter()
            self._counter.start()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        factor = _global_batch_factor(trainer)
        tokens, samples = (round(factor * count) for count in count_both(batch))
        if self._counter is not None:
            self._counter.stop()
            self._use_count(trainer, self._counter.flops, tokens)
            self._counter = None
        if self._batches == 0:
            self._model = self._find_formula(pl_module, batch)
        self._leave_out_saving(trainer)
        self._ended_at = self._clock() - self._left_out
        last = self._marks[-1] if self._marks else _Mark(0, 0, 0, 0)
        self._marks.append(
            _Mark(self._ended_at, last.tokens + tokens, last.samples + samples, self._waited)
        )
        self._batches += 1
        if len(self._marks) > 1:
            self._log(trainer, pl_module)

    def _log(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the values of the window."""
        if self._every is None:
            due = self._logging.now(trainer)
        else:
            due = self._batches % self._every == 0
        due = due or len(self._marks) == 2
        shown = getattr(trainer, "progress_bar_callback", None) is not None
        if due or (shown and self._ended_at - self._bar_at >= _BAR_S):
            self._bar_at = self._ended_at
            values = self._values(trainer.world_size)
            bar = {"perf/tokens_per_s": values.pop("perf/tokens_per_s")}
            pl_module.log_dict(bar, prog_bar=True, batch_size=1)
            if due:
                pl_module.log_dict(values, batch_size=1)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused_at = self._clock()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._left_out += self._clock() - self._paused_at

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._counter is not None:
            self._counter.stop()
            self._counter = None

    def _rates(self) -> dict[str, float]:
        first, last = self._marks[0], self._marks[-1]
        batches, seconds = len(self._marks) - 1, max(last.time - first.time, 1e-9)
        waited = last.waited - first.waited
        return {
            "perf/tokens_per_s": (last.tokens - first.tokens) / seconds,
            "perf/samples_per_s": (last.samples - first.samples) / seconds,
            "perf/step_time_s": seconds / batches,
            "time/data_wait_s": waited / batches,
            "time/data_wait_fraction": waited / seconds,
        }

    def _values(self, world_size: int) -> dict[str, float]:
        values = self._rates()
        rate = values["perf/tokens_per_s"] / world_size
        values["perf/tokens_per_s_per_device"] = rate
        if self._model is not None:
            values["perf/tflops_per_device"] = rate * self._model.per_token / 1e12
            if self._peak is not None:
                values["perf/mfu"] = rate * self._model.per_token / self._peak
        if self._hardware is not None and self._peak is not None:
            values["perf/hfu"] = rate * self._hardware / self._peak
        return values

    def _find_formula(self, module: Any, batch: Any) -> ModelFlops | None:
        if self._given is not None:
            return ModelFlops(self._given, "flops_per_token, as given")
        found = model_flops(module, batch, count_tokens(batch))
        if found is not None:
            rank_zero_info(f"perf/tflops_per_device and perf/mfu: {found.formula}")
        return found

    def _use_count(self, trainer: pl.Trainer, flops: int, tokens: int) -> None:
        """Take what this batch took, on all ranks, for what every batch takes per token."""
        total = torch.tensor(float(flops), dtype=torch.float64, device=number_device(trainer))
        if dist.is_initialized() and trainer.world_size > 1:
            dist.all_reduce(total)
        if not tokens or not float(total):
            return
        self._hardware = float(total) / tokens
        if self._model is None and _recomputes_nothing(trainer):
            self._model = ModelFlops(self._hardware, COUNTED)
            rank_zero_info(f"perf/tflops_per_device and perf/mfu: {COUNTED}")

    def _find_peak(self, trainer: pl.Trainer) -> float | None:
        if self._peak_tflops is not None:
            return self._peak_tflops * 1e12
        device = trainer.strategy.root_device
        if not is_cuda(device) or "Fp8" in type(trainer.precision_plugin).__name__:
            return None
        return peak_flops(device_module(device).get_device_name(device))

    def _leave_out_saving(self, trainer: pl.Trainer) -> None:
        saving = seconds_saving(trainer)
        self._left_out += saving - self._saving
        self._saving = saving


def seconds_saving(trainer: pl.Trainer) -> float:
    """Seconds this run has spent on checkpoints, where the strategy counts them."""
    services = services_if_any(trainer)
    return 0.0 if services is None else services.clock.seconds_in(CHECKPOINT)


def _global_batch_factor(trainer: pl.Trainer) -> float:
    """Number of batches like this rank's in the global one."""
    services = services_if_any(trainer)
    if services is not None:
        return services.global_batch_factor
    return data_parallel_size(trainer)


def data_parallel_size(trainer: pl.Trainer) -> int:
    """Number of ranks with different batches."""
    strategy = trainer.strategy
    if not isinstance(strategy, ParallelStrategy):
        return trainer.world_size
    return int(strategy.distributed_sampler_kwargs.get("num_replicas", trainer.world_size))


def _runs_eagerly(trainer: pl.Trainer) -> bool:
    """Whether operations pass one by one: a compiled block would be compiled anew, or not seen."""
    services = services_if_any(trainer)
    return services is None or services.parallel.transforms.compile.scope == "none"


def _recomputes_nothing(trainer: pl.Trainer) -> bool:
    services = services_if_any(trainer)
    return services is None or services.parallel.transforms.activations.recompute == "none"
