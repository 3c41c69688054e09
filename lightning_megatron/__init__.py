"""Plugins that train any LightningModule with tensor, pipeline and ZeRO data parallelism.

Strategy, configurations, modules, callbacks, precision plugins and conversions are offered here.
More is in the packages, each of which lists its names: `layers`, `models`, `optim`, `data`,
`precision`, `checkpoint`, `callbacks`, `topology`, `comm`.

Names are imported when they are first used, so that ``import lightning_megatron`` costs nothing.
"""

import sys
from typing import TYPE_CHECKING, Any

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.adoption.adopt import adopt
    from lightning_megatron.callbacks.batch_schedule import BatchSchedule
    from lightning_megatron.callbacks.fault_tolerance import FaultTolerance
    from lightning_megatron.callbacks.hang_detector import HangDetector
    from lightning_megatron.callbacks.number_guard import NumberGuard
    from lightning_megatron.callbacks.preemption import Preemption
    from lightning_megatron.callbacks.replica_check import ReplicaCheck
    from lightning_megatron.callbacks.restart_policy import RestartPolicy
    from lightning_megatron.callbacks.slow_rank_detector import SlowRankDetector
    from lightning_megatron.callbacks.worker_guard import WorkerGuard
    from lightning_megatron.checkpoint.config import CheckpointConfig, LocalCheckpointConfig
    from lightning_megatron.checkpoint.gather_state import gather
    from lightning_megatron.checkpoint.offline.export import (
        convert_to_lightning,
        export_safetensors,
        load_from_checkpoint,
    )
    from lightning_megatron.checkpoint.offline.huggingface.export_model import export_hugging_face
    from lightning_megatron.checkpoint.offline.huggingface.import_model import import_hugging_face
    from lightning_megatron.checkpoint.offline.huggingface.transformer import load_transformer
    from lightning_megatron.checkpoint.offline.lightning_import import import_lightning
    from lightning_megatron.checkpoint.offline.upcycle import upcycle
    from lightning_megatron.cli.checkpoint_cli import CheckpointCLI
    from lightning_megatron.data.reading.batch_sizes import NoiseScale, Rampup
    from lightning_megatron.data.reading.collate import Fragments, Pad
    from lightning_megatron.data.reading.lengths import LengthGrouped, TokenBudget
    from lightning_megatron.data.reading.sampler import ResumableSampler
    from lightning_megatron.data.text import TextDataModule
    from lightning_megatron.data.tokens.token_data import TokenData
    from lightning_megatron.errors import ConfigError
    from lightning_megatron.fault_tolerance.numbers.responses import RollbackConfig
    from lightning_megatron.fault_tolerance.numbers.spikes import SpikeConfig
    from lightning_megatron.layers.sequential import PipelineSequential
    from lightning_megatron.models.config import TransformerConfig
    from lightning_megatron.models.generation import generate
    from lightning_megatron.module import LanguageModel
    from lightning_megatron.monitoring.alert_rules import Rule
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
    from lightning_megatron.monitoring.monitor import Monitor
    from lightning_megatron.monitoring.noise_scale import GradientNoiseScale
    from lightning_megatron.monitoring.parameter_norm import ParameterNorm
    from lightning_megatron.monitoring.pipeline_monitor import PipelineMonitor
    from lightning_megatron.monitoring.profiler_window import ProfilerWindow
    from lightning_megatron.monitoring.prometheus import PrometheusEndpoint
    from lightning_megatron.monitoring.throughput import ThroughputMonitor
    from lightning_megatron.parallel.activations.config import ActivationConfig
    from lightning_megatron.parallel.compile import CompileConfig
    from lightning_megatron.parallel.plan import PipelineConfig
    from lightning_megatron.precision.bf16 import Bf16MixedPrecision, Bf16TruePrecision
    from lightning_megatron.precision.fp8 import Fp8Precision
    from lightning_megatron.precision.fp16 import Fp16Precision
    from lightning_megatron.strategy.data.batch_shares import MeasuredShares
    from lightning_megatron.strategy.megatron import MegatronStrategy
    from lightning_megatron.strategy.processes.connection import ConnectionConfig
    from lightning_megatron.topology.context_layout import ContextConfig
    from lightning_megatron.topology.expert_layout import ExpertConfig
    from lightning_megatron.zero.data_parallel import ShardingConfig

__version__ = "0.1.0"

_HOMES = {
    "ActivationConfig": "parallel.activations.config",
    "Alerts": "monitoring.alerts",
    "Bf16MixedPrecision": "precision.bf16",
    "Bf16TruePrecision": "precision.bf16",
    "CheckpointCLI": "cli.checkpoint_cli",
    "CheckpointConfig": "checkpoint.config",
    "CheckpointMonitor": "monitoring.checkpoint_monitor",
    "CommunicationMonitor": "monitoring.communication",
    "CompileConfig": "parallel.compile",
    "ConfigError": "errors",
    "ConnectionConfig": "strategy.processes.connection",
    "ConsoleLine": "monitoring.console",
    "ContextConfig": "topology.context_layout",
    "ContextMonitor": "monitoring.context_monitor",
    "DataMonitor": "monitoring.data_monitor",
    "EventLogWriter": "monitoring.event_log",
    "ExpertConfig": "topology.expert_layout",
    "ExpertMonitor": "monitoring.expert_monitor",
    "FaultTolerance": "callbacks.fault_tolerance",
    "Fp16Precision": "precision.fp16",
    "Fp8Precision": "precision.fp8",
    "Fragments": "data.reading.collate",
    "GradientMonitor": "monitoring.gradients",
    "GradientNoiseScale": "monitoring.noise_scale",
    "HangDetector": "callbacks.hang_detector",
    "TransformerConfig": "models.config",
    "TextDataModule": "data.text",
    "LengthGrouped": "data.reading.lengths",
    "TokenData": "data.tokens.token_data",
    "LocalCheckpointConfig": "checkpoint.config",
    "LanguageModel": "module",
    "LoggerGuard": "monitoring.logger_guard",
    "MeasuredShares": "strategy.data.batch_shares",
    "MegatronStrategy": "strategy.megatron",
    "LossMonitor": "monitoring.loss_monitor",
    "MemoryMonitor": "monitoring.memory",
    "Monitor": "monitoring.monitor",
    "NumberGuard": "callbacks.number_guard",
    "Pad": "data.reading.collate",
    "ParameterNorm": "monitoring.parameter_norm",
    "PipelineConfig": "parallel.plan",
    "PipelineMonitor": "monitoring.pipeline_monitor",
    "PipelineSequential": "layers.sequential",
    "Preemption": "callbacks.preemption",
    "ProfilerWindow": "monitoring.profiler_window",
    "PrometheusEndpoint": "monitoring.prometheus",
    "RestartPolicy": "callbacks.restart_policy",
    "ReplicaCheck": "callbacks.replica_check",
    "BatchSchedule": "callbacks.batch_schedule",
    "NoiseScale": "data.reading.batch_sizes",
    "Rampup": "data.reading.batch_sizes",
    "ResumableSampler": "data.reading.sampler",
    "RollbackConfig": "fault_tolerance.numbers.responses",
    "Rule": "monitoring.alert_rules",
    "ShardingConfig": "zero.data_parallel",
    "adopt": "adoption.adopt",
    "gather": "checkpoint.gather_state",
    "SlowRankDetector": "callbacks.slow_rank_detector",
    "SpikeConfig": "fault_tolerance.numbers.spikes",
    "ThroughputMonitor": "monitoring.throughput",
    "TokenBudget": "data.reading.lengths",
    "WorkerGuard": "callbacks.worker_guard",
    "convert_to_lightning": "checkpoint.offline.export",
    "export_hugging_face": "checkpoint.offline.huggingface.export_model",
    "export_safetensors": "checkpoint.offline.export",
    "generate": "models.generation",
    "import_hugging_face": "checkpoint.offline.huggingface.import_model",
    "import_lightning": "checkpoint.offline.lightning_import",
    "load_from_checkpoint": "checkpoint.offline.export",
    "load_transformer": "checkpoint.offline.huggingface.transformer",
    "upcycle": "checkpoint.offline.upcycle",
}

__all__ = [
    "ActivationConfig",
    "Alerts",
    "Bf16MixedPrecision",
    "BatchSchedule",
    "Bf16TruePrecision",
    "CheckpointCLI",
    "CheckpointConfig",
    "CheckpointMonitor",
    "CommunicationMonitor",
    "CompileConfig",
    "ConfigError",
    "ConnectionConfig",
    "ConsoleLine",
    "ContextConfig",
    "ContextMonitor",
    "DataMonitor",
    "EventLogWriter",
    "ExpertConfig",
    "ExpertMonitor",
    "FaultTolerance",
    "Fp16Precision",
    "Fp8Precision",
    "Fragments",
    "GradientMonitor",
    "GradientNoiseScale",
    "HangDetector",
    "TransformerConfig",
    "TextDataModule",
    "TokenData",
    "LanguageModel",
    "LengthGrouped",
    "LocalCheckpointConfig",
    "LoggerGuard",
    "MeasuredShares",
    "MegatronStrategy",
    "LossMonitor",
    "MemoryMonitor",
    "Monitor",
    "NoiseScale",
    "NumberGuard",
    "Pad",
    "ParameterNorm",
    "PipelineConfig",
    "PipelineMonitor",
    "PipelineSequential",
    "Preemption",
    "ProfilerWindow",
    "PrometheusEndpoint",
    "Rampup",
    "RestartPolicy",
    "ReplicaCheck",
    "ResumableSampler",
    "RollbackConfig",
    "Rule",
    "ShardingConfig",
    "adopt",
    "gather",
    "SlowRankDetector",
    "SpikeConfig",
    "ThroughputMonitor",
    "TokenBudget",
    "WorkerGuard",
    "convert_to_lightning",
    "export_hugging_face",
    "export_safetensors",
    "generate",
    "import_hugging_face",
    "import_lightning",
    "load_from_checkpoint",
    "load_transformer",
    "upcycle",
]

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _megatron(**options: Any) -> "MegatronStrategy":
    """Build the strategy for ``Trainer(strategy="megatron")``."""
    from lightning_megatron.strategy.megatron import MegatronStrategy

    return MegatronStrategy(**options)


if (_strategies := sys.modules.get("lightning.pytorch.strategies")) is not None:
    # Whoever imports Lightning first has the names from here on; otherwise they are known as soon
    # as a strategy of this package is imported.
    from lightning_megatron.strategy.names import register

    register(_strategies.StrategyRegistry, _megatron)
