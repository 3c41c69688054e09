"""Everything that watches a run, switched on by one callback: ``callbacks=[Monitor()]``.

Each member can be used by itself, with options of its own; what each of them logs is said there.
"""

import os
from collections.abc import Sequence

import lightning.pytorch as pl

from lightning_megatron.callback_group import CallbackGroup
from lightning_megatron.monitoring.alerts import Alerts
from lightning_megatron.monitoring.checkpoint_monitor import CheckpointMonitor
from lightning_megatron.monitoring.communication import CommunicationMonitor
from lightning_megatron.monitoring.console import ConsoleLine
from lightning_megatron.monitoring.context_monitor import ContextMonitor
from lightning_megatron.monitoring.data_monitor import DataMonitor
from lightning_megatron.monitoring.event_log import EventLogWriter
from lightning_megatron.monitoring.expert_monitor import ExpertMonitor
from lightning_megatron.monitoring.gradients import GradientMonitor
from lightning_megatron.monitoring.logger_guard import LoggerGuard
from lightning_megatron.monitoring.loss_monitor import LossMonitor
from lightning_megatron.monitoring.memory import MemoryMonitor
from lightning_megatron.monitoring.noise_scale import GradientNoiseScale
from lightning_megatron.monitoring.parameter_norm import ParameterNorm
from lightning_megatron.monitoring.pipeline_monitor import PipelineMonitor
from lightning_megatron.monitoring.prometheus import PrometheusEndpoint
from lightning_megatron.monitoring.throughput import ThroughputMonitor


class Monitor(CallbackGroup):
    """Throughput, data, loss, memory, communication, norms, pipeline, experts, saves, events.

    Works under `MegatronStrategy`. The names of the metrics begin with ``perf/``, ``time/``,
    ``data/``, ``mem/``, ``comm/``, ``pp/``, ``cp/``, ``moe/``, ``optim/``, ``loss/``, ``ckpt/`` and
    ``ft/``; they go to the Trainer's loggers, to one line of the console each time that these are
    written, and to the event log, of which ``lightning-megatron report`` makes a page. A logger
    that fails costs a warning.

    Args:
        run_dir: where events go; None: the Trainer's ``default_root_dir``. All attempts of a run
            must have the same.
        every: batches between two values of what costs a collective.
        window: batches over which throughput is averaged.
        peak_tflops: what a device can do (see `ThroughputMonitor`); None: as the table says.
        noise_scale: also estimate the critical batch size, for a copy of the gradients.
        console: print the line.
        prometheus: also serve the metrics on this port of this machine (see `PrometheusEndpoint`;
            needs the extra ``monitor``).
        alerts: also watch for these rules, ``"perf/mfu < 0.3 for 20"`` (see `Alerts`).

    Raises:
        ConfigError: an option is out of range, or the strategy is another.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str] | None = None,
        *,
        every: int = 50,
        window: int = 20,
        peak_tflops: float | None = None,
        noise_scale: bool = False,
        console: bool = True,
        prometheus: int | None = None,
        alerts: Sequence[str] = (),
    ) -> None:
        members: list[pl.Callback] = [
            LoggerGuard(),
            EventLogWriter(run_dir),
            ThroughputMonitor(window, peak_tflops=peak_tflops),
            DataMonitor(every),
            LossMonitor(),
            MemoryMonitor(every, None if run_dir is None else os.fspath(run_dir)),
            CommunicationMonitor(every),
            GradientMonitor(every=None),
            ParameterNorm(every),
            PipelineMonitor(every),
            ContextMonitor(every),
            ExpertMonitor(every),
            CheckpointMonitor(),
        ]
        if noise_scale:
            members.append(GradientNoiseScale(every=max(every, 2)))
        if console:
            members.append(ConsoleLine())
        if prometheus is not None:
            members.append(PrometheusEndpoint(prometheus))
        if alerts:
            members.append(Alerts(alerts))
        super().__init__(members)
