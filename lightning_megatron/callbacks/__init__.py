"""Callbacks and their configs; the docstring of each says whether it needs `MegatronStrategy`.

Faults: `FaultTolerance` is all of these as one callback.

- `Preemption`: on SIGTERM, SIGUSR1 and Ctrl-C all ranks save after the same step, and the run ends.
- `HangDetector`: a rank that hangs is named, with its stacks, and the attempt ends.
- `SlowRankDetector`: a rank that is slower than its peers is named, with the section of the step.
- `NumberGuard`, with `SpikeConfig` and `RollbackConfig`: NaN, Inf and spikes of the loss are found
  before the update; the step is skipped, run again or rolled back, or the run ends.
- `WorkerGuard`: DataLoader workers that die or hang are replaced.
- `RestartPolicy`: a run whose attempts fail without a new step ends.
- `ReplicaCheck`: copies of weights and optimizer state are compared bit by bit.

Monitoring: `Monitor` is all of these as one callback.

- `ThroughputMonitor`: tokens/s, MFU, time of a step.
- `DataMonitor`: share of padding, lengths of samples, the longest wait for data.
- `LossMonitor`: mean and highest loss of the ranks, learning rates.
- `MemoryMonitor`: memory of devices and hosts.
- `CommunicationMonitor`: bytes and time of collectives, by axis.
- `GradientMonitor`, `ParameterNorm`, `GradientNoiseScale`: norms, clipping, critical batch size.
- `PipelineMonitor`: share of the time in which pipeline ranks are idle.
- `ContextMonitor`: how equally attention is divided over cp ranks.
- `ExpertMonitor`: how equally tokens go to experts.
- `CheckpointMonitor`: time, size and failures of saves.
- `EventLogWriter`: events as JSON lines, of which `report` makes a page; goodput.
- `LoggerGuard`: an error of a logger becomes a warning.
- `ConsoleLine`: one line on the console each time that metrics are logged.
- `PrometheusEndpoint`: ``/metrics`` and ``/healthz`` over HTTP.
- `Alerts`, with `Rule`: a log line, webhook or function when a metric crosses a threshold.

Others: `BatchSchedule` changes the size of global batches, `ProfilerWindow` traces some steps with
torch.profiler, and `CallbackGroup` is several callbacks as one. Names are imported when they are
first used.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.callback_group import CallbackGroup as CallbackGroup
    from lightning_megatron.callbacks.batch_schedule import BatchSchedule as BatchSchedule
    from lightning_megatron.callbacks.fault_tolerance import FaultTolerance as FaultTolerance
    from lightning_megatron.callbacks.hang_detector import HangDetector as HangDetector
    from lightning_megatron.callbacks.number_guard import NumberGuard as NumberGuard
    from lightning_megatron.callbacks.preemption import Preemption as Preemption
    from lightning_megatron.callbacks.replica_check import ReplicaCheck as ReplicaCheck
    from lightning_megatron.callbacks.restart_policy import RestartPolicy as RestartPolicy
    from lightning_megatron.callbacks.slow_rank_detector import (
        SlowRankDetector as SlowRankDetector,
    )
    from lightning_megatron.callbacks.worker_guard import WorkerGuard as WorkerGuard
    from lightning_megatron.fault_tolerance.numbers.responses import (
        RollbackConfig as RollbackConfig,
    )
    from lightning_megatron.fault_tolerance.numbers.spikes import SpikeConfig as SpikeConfig
    from lightning_megatron.monitoring.alert_rules import Rule as Rule
    from lightning_megatron.monitoring.alerts import Alerts as Alerts
    from lightning_megatron.monitoring.checkpoint_monitor import (
        CheckpointMonitor as CheckpointMonitor,
    )
    from lightning_megatron.monitoring.communication import (
        CommunicationMonitor as CommunicationMonitor,
    )
    from lightning_megatron.monitoring.console import ConsoleLine as ConsoleLine
    from lightning_megatron.monitoring.context_monitor import ContextMonitor as ContextMonitor
    from lightning_megatron.monitoring.data_monitor import DataMonitor as DataMonitor
    from lightning_megatron.monitoring.event_log import EventLogWriter as EventLogWriter
    from lightning_megatron.monitoring.expert_monitor import ExpertMonitor as ExpertMonitor
    from lightning_megatron.monitoring.gradients import GradientMonitor as GradientMonitor
    from lightning_megatron.monitoring.logger_guard import LoggerGuard as LoggerGuard
    from lightning_megatron.monitoring.loss_monitor import LossMonitor as LossMonitor
    from lightning_megatron.monitoring.memory import MemoryMonitor as MemoryMonitor
    from lightning_megatron.monitoring.monitor import Monitor as Monitor
    from lightning_megatron.monitoring.noise_scale import GradientNoiseScale as GradientNoiseScale
    from lightning_megatron.monitoring.parameter_norm import ParameterNorm as ParameterNorm
    from lightning_megatron.monitoring.pipeline_monitor import PipelineMonitor as PipelineMonitor
    from lightning_megatron.monitoring.profiler_window import ProfilerWindow as ProfilerWindow
    from lightning_megatron.monitoring.prometheus import PrometheusEndpoint as PrometheusEndpoint
    from lightning_megatron.monitoring.throughput import ThroughputMonitor as ThroughputMonitor

_HOMES = {
    "Alerts": ".monitoring.alerts",
    "BatchSchedule": "batch_schedule",
    "CallbackGroup": ".callback_group",
    "CheckpointMonitor": ".monitoring.checkpoint_monitor",
    "CommunicationMonitor": ".monitoring.communication",
    "ConsoleLine": ".monitoring.console",
    "ContextMonitor": ".monitoring.context_monitor",
    "DataMonitor": ".monitoring.data_monitor",
    "EventLogWriter": ".monitoring.event_log",
    "ExpertMonitor": ".monitoring.expert_monitor",
    "FaultTolerance": "fault_tolerance",
    "GradientMonitor": ".monitoring.gradients",
    "GradientNoiseScale": ".monitoring.noise_scale",
    "HangDetector": "hang_detector",
    "LoggerGuard": ".monitoring.logger_guard",
    "LossMonitor": ".monitoring.loss_monitor",
    "MemoryMonitor": ".monitoring.memory",
    "Monitor": ".monitoring.monitor",
    "NumberGuard": "number_guard",
    "ParameterNorm": ".monitoring.parameter_norm",
    "PipelineMonitor": ".monitoring.pipeline_monitor",
    "Preemption": "preemption",
    "ProfilerWindow": ".monitoring.profiler_window",
    "PrometheusEndpoint": ".monitoring.prometheus",
    "ReplicaCheck": "replica_check",
    "RestartPolicy": "restart_policy",
    "RollbackConfig": ".fault_tolerance.numbers.responses",
    "Rule": ".monitoring.alert_rules",
    "SlowRankDetector": "slow_rank_detector",
    "SpikeConfig": ".fault_tolerance.numbers.spikes",
    "ThroughputMonitor": ".monitoring.throughput",
    "WorkerGuard": "worker_guard",
}

__all__ = [
    "Alerts",
    "BatchSchedule",
    "CallbackGroup",
    "CheckpointMonitor",
    "CommunicationMonitor",
    "ConsoleLine",
    "ContextMonitor",
    "DataMonitor",
    "EventLogWriter",
    "ExpertMonitor",
    "FaultTolerance",
    "GradientMonitor",
    "GradientNoiseScale",
    "HangDetector",
    "LoggerGuard",
    "LossMonitor",
    "MemoryMonitor",
    "Monitor",
    "NumberGuard",
    "ParameterNorm",
    "PipelineMonitor",
    "Preemption",
    "ProfilerWindow",
    "PrometheusEndpoint",
    "ReplicaCheck",
    "RestartPolicy",
    "RollbackConfig",
    "Rule",
    "SlowRankDetector",
    "SpikeConfig",
    "ThroughputMonitor",
    "WorkerGuard",
]

__getattr__ = lazy_names(__name__, _HOMES)
