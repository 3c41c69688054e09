"""Plugins that train any LightningModule with tensor, pipeline and ZeRO data parallelism.

Names are imported when they are first used, so that ``import lightning_megatron`` costs nothing.
"""

import sys
from typing import TYPE_CHECKING, Any

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.callbacks.alerts import Alerts
    from lightning_megatron.callbacks.chaos import ChaosMonkey
    from lightning_megatron.callbacks.checkpoints import CheckpointMonitor
    from lightning_megatron.callbacks.communication import CommunicationMonitor
    from lightning_megatron.callbacks.console import ConsoleLine
    from lightning_megatron.callbacks.event_log import EventLogWriter
    from lightning_megatron.callbacks.fault_tolerance import FaultTolerance
    from lightning_megatron.callbacks.gradients import GradientMonitor
    from lightning_megatron.callbacks.hang_detector import HangDetector
    from lightning_megatron.callbacks.logger_guard import LoggerGuard
    from lightning_megatron.callbacks.loss_monitor import LossMonitor
    from lightning_megatron.callbacks.memory import MemoryMonitor
    from lightning_megatron.callbacks.monitor import Monitor
    from lightning_megatron.callbacks.noise_scale import GradientNoiseScale
    from lightning_megatron.callbacks.number_guard import NumberGuard
    from lightning_megatron.callbacks.parameter_norm import ParameterNorm
    from lightning_megatron.callbacks.pipeline_monitor import PipelineMonitor
    from lightning_megatron.callbacks.preemption import Preemption
    from lightning_megatron.callbacks.profiler_window import ProfilerWindow
    from lightning_megatron.callbacks.prometheus import PrometheusEndpoint
    from lightning_megatron.callbacks.replica_check import ReplicaCheck
    from lightning_megatron.callbacks.restart_policy import RestartPolicy
    from lightning_megatron.callbacks.slow_rank import SlowRankDetector
    from lightning_megatron.callbacks.throughput import ThroughputMonitor
    from lightning_megatron.callbacks.worker_guard import WorkerGuard
    from lightning_megatron.checkpoint.config import CheckpointConfig
    from lightning_megatron.checkpoint.export import (
        convert_to_lightning,
        export_safetensors,
        load_from_checkpoint,
    )
    from lightning_megatron.checkpoint.gather import gather
    from lightning_megatron.checkpoint.hf_export import export_hugging_face
    from lightning_megatron.checkpoint.hf_import import import_hugging_face
    from lightning_megatron.checkpoint.lightning_import import import_lightning
    from lightning_megatron.checkpoint.local_config import LocalCheckpointConfig
    from lightning_megatron.checkpoint.transformer import load_transformer
    from lightning_megatron.data.sampler import ResumableSampler
    from lightning_megatron.data.text import TextDataModule
    from lightning_megatron.errors import ConfigError
    from lightning_megatron.layers.linear_loss import LinearCrossEntropy
    from lightning_megatron.models.config import TransformerConfig
    from lightning_megatron.models.generate import generate
    from lightning_megatron.module import LanguageModel
    from lightning_megatron.monitoring.alert_rules import Rule
    from lightning_megatron.optim.muon import Muon
    from lightning_megatron.parallel.data import ShardingConfig
    from lightning_megatron.parallel.memory import MemoryConfig
    from lightning_megatron.parallel.plan import PipelineConfig
    from lightning_megatron.pipeline.sequential import PipelineSequential
    from lightning_megatron.precision.bf16 import Bf16MixedPrecision, Bf16TruePrecision
    from lightning_megatron.precision.fp8 import Fp8Precision
    from lightning_megatron.precision.fp16 import Fp16Precision
    from lightning_megatron.resilience.responses import RollbackConfig
    from lightning_megatron.resilience.spikes import SpikeConfig
    from lightning_megatron.strategies.connection import ConnectionConfig
    from lightning_megatron.strategies.megatron import MegatronStrategy

__version__ = "0.1.0"

_HOMES = {
    "Alerts": "callbacks.alerts",
    "Bf16MixedPrecision": "precision.bf16",
    "Bf16TruePrecision": "precision.bf16",
    "ChaosMonkey": "callbacks.chaos",
    "CheckpointConfig": "checkpoint.config",
    "CheckpointMonitor": "callbacks.checkpoints",
    "CommunicationMonitor": "callbacks.communication",
    "ConfigError": "errors",
    "ConnectionConfig": "strategies.connection",
    "ConsoleLine": "callbacks.console",
    "EventLogWriter": "callbacks.event_log",
    "FaultTolerance": "callbacks.fault_tolerance",
    "Fp16Precision": "precision.fp16",
    "Fp8Precision": "precision.fp8",
    "GradientMonitor": "callbacks.gradients",
    "GradientNoiseScale": "callbacks.noise_scale",
    "HangDetector": "callbacks.hang_detector",
    "TransformerConfig": "models.config",
    "TextDataModule": "data.text",
    "Muon": "optim.muon",
    "LinearCrossEntropy": "layers.linear_loss",
    "LocalCheckpointConfig": "checkpoint.local_config",
    "LanguageModel": "module",
    "LoggerGuard": "callbacks.logger_guard",
    "MegatronStrategy": "strategies.megatron",
    "MemoryConfig": "parallel.memory",
    "LossMonitor": "callbacks.loss_monitor",
    "MemoryMonitor": "callbacks.memory",
    "Monitor": "callbacks.monitor",
    "NumberGuard": "callbacks.number_guard",
    "ParameterNorm": "callbacks.parameter_norm",
    "PipelineConfig": "parallel.plan",
    "PipelineMonitor": "callbacks.pipeline_monitor",
    "PipelineSequential": "pipeline.sequential",
    "Preemption": "callbacks.preemption",
    "ProfilerWindow": "callbacks.profiler_window",
    "PrometheusEndpoint": "callbacks.prometheus",
    "RestartPolicy": "callbacks.restart_policy",
    "ReplicaCheck": "callbacks.replica_check",
    "ResumableSampler": "data.sampler",
    "RollbackConfig": "resilience.responses",
    "Rule": "monitoring.alert_rules",
    "ShardingConfig": "parallel.data",
    "gather": "checkpoint.gather",
    "SlowRankDetector": "callbacks.slow_rank",
    "SpikeConfig": "resilience.spikes",
    "ThroughputMonitor": "callbacks.throughput",
    "WorkerGuard": "callbacks.worker_guard",
    "convert_to_lightning": "checkpoint.export",
    "export_hugging_face": "checkpoint.hf_export",
    "export_safetensors": "checkpoint.export",
    "generate": "models.generate",
    "import_hugging_face": "checkpoint.hf_import",
    "import_lightning": "checkpoint.lightning_import",
    "load_from_checkpoint": "checkpoint.export",
    "load_transformer": "checkpoint.transformer",
}

__all__ = [
    "Alerts",
    "Bf16MixedPrecision",
    "Bf16TruePrecision",
    "ChaosMonkey",
    "CheckpointConfig",
    "CheckpointMonitor",
    "CommunicationMonitor",
    "ConfigError",
    "ConnectionConfig",
    "ConsoleLine",
    "EventLogWriter",
    "FaultTolerance",
    "Fp16Precision",
    "Fp8Precision",
    "GradientMonitor",
    "GradientNoiseScale",
    "HangDetector",
    "TransformerConfig",
    "TextDataModule",
    "Muon",
    "LinearCrossEntropy",
    "LanguageModel",
    "LocalCheckpointConfig",
    "LoggerGuard",
    "MegatronStrategy",
    "MemoryConfig",
    "LossMonitor",
    "MemoryMonitor",
    "Monitor",
    "NumberGuard",
    "ParameterNorm",
    "PipelineConfig",
    "PipelineMonitor",
    "PipelineSequential",
    "Preemption",
    "ProfilerWindow",
    "PrometheusEndpoint",
    "RestartPolicy",
    "ReplicaCheck",
    "ResumableSampler",
    "RollbackConfig",
    "Rule",
    "ShardingConfig",
    "gather",
    "SlowRankDetector",
    "SpikeConfig",
    "ThroughputMonitor",
    "WorkerGuard",
    "convert_to_lightning",
    "export_hugging_face",
    "export_safetensors",
    "generate",
    "import_hugging_face",
    "import_lightning",
    "load_from_checkpoint",
    "load_transformer",
]

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _megatron(**options: Any) -> "MegatronStrategy":
    """Build the strategy for ``Trainer(strategy="megatron")``."""
    from lightning_megatron.strategies.megatron import MegatronStrategy

    return MegatronStrategy(**options)


if (_lightning := sys.modules.get("lightning.pytorch.strategies")) is not None:
    # Whoever imports Lightning first has the name from here on; otherwise it is known as soon as
    # a strategy of this package is imported.
    _lightning.StrategyRegistry.register("megatron", _megatron, override=True)
