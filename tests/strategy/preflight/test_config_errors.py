"""A wrong configuration is one ConfigError: on every rank, the same, before any group forms."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import (
    ActivationConfig,
    CompileConfig,
    ConfigError,
    ConnectionConfig,
    ContextConfig,
    ExpertConfig,
    LanguageModel,
    PipelineConfig,
    PipelineSequential,
    ShardingConfig,
)
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from tests.strategy.refusals import refusal
from tests.strategy.small import WIDTH, Small, make_trainer, samples


class NoTrunk(Small):
    """An ordinary module."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class TwoItems(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net = PipelineSequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class TwoTrunks(Small):
    def __init__(self) -> None:
        super().__init__()
        self.other = PipelineSequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


class SharedOutside(Small):
    """The head, outside the trunk, uses a parameter inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.net.layers[0][0].weight


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Hooked(Small):
    """Has a hook on a weight of which each rank would have a part."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = ColumnParallelLinear(4, 4)
        self.wide.weight.register_hook(lambda gradient: gradient)


class Unfit(Small):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 4, max_norm=1.0, sparse=True)
        self.late = nn.LazyLinear(4)


class BuiltLate(Small):
    def configure_model(self) -> None:
        self.more = nn.Linear(2, 2)


class OwnBackward(Small):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Layered(Small):
    """One parallel layer, made in ``configure_model``."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.make = make

    def configure_model(self) -> None:
        self.net = PipelineSequential(self.make(), nn.Linear(WIDTH, WIDTH))


def column() -> nn.Module:
    return ColumnParallelLinear(WIDTH, 6)


def row() -> nn.Module:
    return RowParallelLinear(6, WIDTH)


def mixture() -> nn.Module:
    return MixtureOfExperts(WIDTH, 8, num_experts=6)


def vocabulary() -> nn.Module:
    return VocabParallelEmbedding(50, WIDTH)


def language_model(**sizes: Any) -> pl.LightningModule:
    tiny = {"vocab_size": 64, "hidden_size": 24, "num_layers": 2, "num_heads": 4, "mlp_size": 48}
    return LanguageModel({**tiny, **sizes})


class Data(pl.LightningDataModule):
    """Says how long its sequences are."""

    seq_len = 31
    batch_size = 8

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mistake."""

    layout: Mapping[str, Any]
    says: tuple[str, ...]
    """What the message must hold: values, rule, nearest legal choice."""
    devices: int = 4
    module: Callable[..., pl.LightningModule] = Small
    sizes: Mapping[str, Any] = field(default_factory=dict)
    data: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1


def layered(make: Callable[[], nn.Module]) -> dict[str, Any]:
    return {"module": Layered, "sizes": {"make": make}}


TP4 = {"tp": 4}
CASES = {
    "tp does not divide the world": Case(
        layout={"tp": 3}, says=("tp=3", "= 4", "divide", "nearest valid", "tp=2")
    ),
    "tp * pp does not divide the world": Case(
        layout={"tp": 2, "pp": 3}, says=("tp=2, pp=3", "tp*pp = 6", "6 processes")
    ),
    "more stages than processes": Case(layout={"pp": 8}, says=("pp=8", "divide", "8 processes")),
    "tp is zero": Case(layout={"tp": 0}, says=("tp=0", "at least 1", "nearest valid: tp=1")),
    "pp is negative": Case(layout={"pp": -2}, says=("pp=-2", "at least 1", "pp=1")),
    "tp is a float": Case(layout={"tp": 2.0}, says=("tp=2.0", "whole number")),
    "tp is a word": Case(layout={"tp": "two"}, says=("tp='two'", "whole number", "tp=1")),
    "pp is a boolean": Case(layout={"pp": True}, says=("pp=True", "whole number")),
    "pp is nothing": Case(layout={"pp": None}, says=("pp=None", "whole number", "pp=1")),
    "zero is nothing": Case(layout={"zero": None}, says=("zero=None", "0, 1, 2 or 3", "zero=1")),
    "the config of another axis": Case(
        layout={"pp": ShardingConfig(stage=1)},
        says=("pp=ShardingConfig(", "a number or a PipelineConfig"),
    ),
    "a negative degree in a config": Case(
        layout={"pp": PipelineConfig(degree=-2, schedule="zbv")}, says=("pp=-2", "pp=1")
    ),
    "a word for a degree in a config": Case(
        layout={"pp": PipelineConfig(degree="2")},  # type: ignore[arg-type]
        says=("pp='2'", "nearest valid: pp=2"),
    ),
    "parts of sequences for too few processes": Case(
        layout={"cp": 3},
        says=("cp=3", "must divide the number of processes", "cp=2 or cp=4 on 4"),
    ),
    "a word for a degree of cp": Case(layout={"cp": "2"}, says=("cp='2'", "nearest valid: cp=2")),
    "no such exchange of keys": Case(
        layout={"cp": ContextConfig(degree=2, kind="rings")},  # type: ignore[arg-type]
        says=("cp.kind='rings'", "ring, gather or ulysses", "kind='auto'"),
    ),
    "heads exchanged without a ring": Case(
        layout={"cp": ContextConfig(degree=4, kind="gather", ulysses=2)},
        says=("cp.ulysses=2, kind='gather'", "kind='ring'"),
    ),
    "groups of heads that do not divide cp": Case(
        layout={"cp": ContextConfig(degree=4, kind="ring", ulysses=3)},
        says=("cp.ulysses=3, degree=4", "ulysses=2 or 4"),
    ),
    "heads that cp does not divide": Case(
        layout={"cp": ContextConfig(degree=4, kind="ulysses")},
        says=("cp=4, kind='ulysses', num_heads=6, tp=1", "cp=3 or 6, or kind='ring'"),
        module=LanguageModel,
        sizes={"config": {"hidden_size": 24, "num_heads": 6}},
    ),
    "dropout of weights in a ring": Case(
        layout={"cp": ContextConfig(degree=2, kind="ring")},
        says=("kind='ring', attention_dropout=0.1", "nearest valid: kind='gather'"),
        module=LanguageModel,
        sizes={"config": {"hidden_size": 24, "num_heads": 6, "attention_dropout": 0.1}},
    ),
    "experts over more ranks than there are": Case(
        layout={"ep": 8, "tp": 2},
        says=("ep=8", "dp_shard=2 * cp=1 * tp=2 = 4", "nearest valid: ep=4"),
    ),
    "experts beyond one copy": Case(
        layout={"ep": 4, "zero": ShardingConfig(stage=2, dp_replicate=2)},
        says=("ep=4", "dp_shard=2 * cp=1 * tp=1 = 2", "ranks that hold one copy", "ep=2"),
    ),
    "a word for a degree of ep": Case(layout={"ep": "2"}, says=("ep='2'", "nearest valid: ep=2")),
    "no such dispatch": Case(
        layout={"ep": ExpertConfig(degree=2, dispatch="copies")},  # type: ignore[arg-type]
        says=("ep.dispatch='copies'", "'once' or 'gather'", "dispatch='auto'"),
    ),
    "experts that ep does not divide": Case(
        layout={"ep": 4},
        says=("num_experts=6, ep=4", "nearest valid: ep=2"),
        module=Layered,
        sizes={"make": mixture},
    ),
    "ep without experts": Case(
        layout={"ep": 2},
        says=("ep=2: the module holds no MixtureOfExperts", "nearest valid", "or ep=1"),
    ),
    "no such ZeRO stage in a config": Case(
        layout={"zero": ShardingConfig(stage=4)},  # type: ignore[arg-type]
        says=("zero=4", "zero=3"),
    ),
    "no such ZeRO stage": Case(layout={"zero": 4}, says=("zero=4", "0, 1, 2 or 3", "zero=3")),
    "negative ZeRO stage": Case(layout={"zero": -1}, says=("zero=-1", "zero=0")),
    "dp_replicate does not divide dp": Case(
        layout={"zero": ShardingConfig(stage=1, dp_replicate=3)},
        says=("zero.dp_replicate=3", "dp=4", "dp_replicate=2 or 4"),
    ),
    "dp_replicate under ZeRO 0": Case(
        layout={"zero": ShardingConfig(stage=0, dp_replicate=2)},
        says=("zero.dp_replicate=2", "zero=0", "zero=1"),
    ),
    "sequence parallelism without tp": Case(
        layout={"sequence_parallel": True}, says=("sequence_parallel=True, tp=1", "tp=2")
    ),
    "sequence parallelism without parallel layers": Case(
        layout={"tp": 2, "sequence_parallel": True},
        says=("sequence_parallel=True: Small has no parallel layer", "sequence_parallel=False"),
    ),
    "empty microbatches": Case(
        layout={"microbatch_size": 0}, says=("microbatch_size=0", "microbatch_size=1")
    ),
    "negative number of microbatches": Case(
        layout={"num_microbatches": -1}, says=("num_microbatches=-1", "num_microbatches=1")
    ),
    "microbatches by size and number": Case(
        layout={"microbatch_size": 2, "num_microbatches": 4},
        says=("microbatch_size=2, num_microbatches=4", "only one"),
    ),
    "microbatch larger than the batch": Case(
        layout={"microbatch_size": 16}, says=("microbatch_size=16", "batch_size=8")
    ),
    "nowhere to write to": Case(
        layout={},
        trainer={"default_root_dir": f"{__file__}/runs", "enable_checkpointing": True},
        says=("default_root_dir=", "test_config_errors.py is no folder"),
        devices=2,
    ),
    "misspelt schedule": Case(
        layout={"pp": PipelineConfig(degree=2, schedule="1f2b")},
        says=("pp.schedule='1f2b'", "schedule='1f1b'"),
    ),
    "unknown schedule": Case(
        layout={"pp": PipelineConfig(degree=2, schedule="fast")}, says=("fast", "gpipe")
    ),
    "more stages than items": Case(
        layout={"pp": 4}, module=TwoItems, says=("=4", "items=2", "at least one", "=2")
    ),
    "unknown recomputation": Case(
        layout={"activations": ActivationConfig(recompute="ful")},  # type: ignore[arg-type]
        says=("activations.recompute='ful'", "none, full, selective, adaptive", "'full'"),
    ),
    "compile stages and time their items": Case(
        layout={
            "pp": PipelineConfig(degree=2, partition="measured"),
            "compile": CompileConfig(scope="model"),
        },
        says=("compile.scope='model', pp.partition='measured'", "compile.scope='block'"),
    ),
    "recompute inside of a compiled block and offload it": Case(
        layout={
            "activations": ActivationConfig(recompute="selective", offload=True),
            "compile": CompileConfig(scope="block"),
        },
        says=("compile.scope='block', activations.recompute='selective'", "'full'"),
    ),
    "compile the model and offload blocks": Case(
        layout={
            "activations": ActivationConfig(offload=True),
            "compile": CompileConfig(scope="model"),
        },
        says=("compile.scope='model', activations.recompute='none'", "compile.scope='block'"),
    ),
    "compile blocks and measure them": Case(
        layout={
            "activations": ActivationConfig(recompute="adaptive", limit_gib=1.0),
            "compile": CompileConfig(scope="model"),
        },
        says=("activations.recompute='adaptive', compile.scope='model'", "recompute='full'"),
    ),
    "compile blocks and choose what parts of them keep": Case(
        layout={
            "activations": ActivationConfig(recompute="adaptive", limit_gib=1.0, keep=["matmul"]),
            "compile": CompileConfig(scope="block"),
        },
        says=("recompute='adaptive', keep=['matmul'], blocks=None, compile.scope", "keep=None"),
    ),
    "groups of blocks that keep results": Case(
        layout={"activations": ActivationConfig(recompute="selective", group=2)},
        says=("activations.group=2, recompute='selective'", "recompute='full'"),
    ),
    "groups of every second block": Case(
        layout={"activations": ActivationConfig(recompute="full", group=2, every=2)},
        says=("activations.group=2", "every=2", "every=1"),
    ),
    "groups of no blocks": Case(
        layout={"activations": ActivationConfig(recompute="full", group=0)},
        says=("activations.group=0", "group=1"),
    ),
    "groups whose inputs are offloaded": Case(
        layout={"activations": ActivationConfig(recompute="full", group=2, offload=True)},
        says=("activations.group=2, offload=True", "group=1"),
    ),
    "groups of parts of items": Case(
        layout={"activations": ActivationConfig(recompute="full", group=2, blocks=["*.mlp"])},
        module=language_model,
        says=("activations.group=2", "items of a PipelineSequential", "group=1"),
    ),
    "compile by an unknown backend": Case(
        layout={"compile": CompileConfig(scope="block", backend="inducto")},
        says=("compile.backend='inducto'", "'inductor'"),
    ),
    "recomputing each 0th block": Case(
        layout={"activations": ActivationConfig(recompute="full", every=0)},
        says=("every=0", "every=1"),
    ),
    "blocks of a recomputation that is off": Case(
        layout={"activations": ActivationConfig(blocks=["Sequential"])},
        says=("recompute='none'", "nearest valid: recompute='full'"),
    ),
    "recomputing what there is not": Case(
        layout={"activations": ActivationConfig(recompute="full", blocks=["Sequental"])},
        says=("blocks='Sequental'", "'Sequential'"),
    ),
    "a part of the optimizer in host memory that is the whole": Case(
        layout={"zero": ShardingConfig(stage=0, offload_optimizer=True)},
        says=("offload_optimizer=True, zero=0", "zero=1"),
    ),
    "shards of parameters in host memory that are none": Case(
        layout={"zero": ShardingConfig(stage=2, offload_parameters=True)},
        says=("offload_parameters=True, zero=2", "zero=3, or offload_optimizer=True"),
    ),
    "shards in host memory that cannot be sent": Case(
        layout={
            "zero": ShardingConfig(stage=3, offload_parameters=True),
            "connection": ConnectionConfig(backend="nccl"),
        },
        says=("backend='nccl', zero.offload_parameters=True", "'cpu:gloo,cuda:nccl'"),
    ),
    "inputs to distribute over one rank": Case(
        layout={"activations": ActivationConfig(recompute="full", distribute_inputs=True)},
        says=("distribute_inputs=True, tp=1", "distribute_inputs=False"),
    ),
    "inputs to distribute that nobody keeps": Case(
        layout={"tp": 2, "activations": ActivationConfig(distribute_inputs=True)},
        says=("distribute_inputs=True, recompute='none'", "recompute='full'"),
    ),
    "offloading what there is not": Case(
        layout={"activations": ActivationConfig(offload=True, blocks=["Sequental"])},
        says=("blocks='Sequental'", "nothing would be offloaded", "'Sequential'"),
    ),
    "offloading and adaptive recomputation": Case(
        layout={"activations": ActivationConfig(recompute="adaptive", limit_gib=1.0, offload=True)},
        says=("recompute='adaptive', offload=True", "recompute='selective'"),
    ),
    "more of a device than there is": Case(
        layout={"activations": ActivationConfig(recompute="adaptive", limit_fraction=1.5)},
        says=("activations.limit_fraction=1.5", "limit_fraction=1.0"),
    ),
    "keeping what torch does not have": Case(
        layout={"activations": ActivationConfig(recompute="selective", keep=["aten.mmm"])},
        says=("keep=['aten.mmm']", "'aten.mm'", "keep=['attention', 'matmul']"),
    ),
    "adaptive recomputation without a limit": Case(
        layout={"activations": ActivationConfig(recompute="adaptive")},
        says=("limit_gib=None, limit_fraction=None", "valid: limit_gib=1.0"),
    ),
    "adaptive recomputation and schedule": Case(
        layout={
            "pp": PipelineConfig(degree=2, schedule="auto"),
            "activations": ActivationConfig(recompute="adaptive", limit_gib=1.0),
        },
        says=("recompute='adaptive', pp.schedule='auto'", "pp.schedule='1f1b'"),
    ),
    "partition with too few stages": Case(
        layout={"pp": PipelineConfig(degree=4, partition=[2, 2])},
        says=("pp.partition=[2, 2]", "2 stages", "partition=[1, 1, 1, 1]"),
    ),
    "partition of other items": Case(
        layout={"pp": PipelineConfig(degree=2, partition=[3, 3])},
        says=("pp.partition=[3, 3]", "6 items", "has 4", "partition=[2, 2]"),
    ),
    "partition with an empty stage": Case(
        layout={"pp": PipelineConfig(degree=2, partition=[4, 0])},
        says=("pp.partition=[4, 0]", "at least 1", "nearest valid: partition="),
    ),
    "parts by another word": Case(
        layout={"pp": PipelineConfig(degree=4, scatter_gather="never")},  # type: ignore[arg-type]
        says=("pp.scatter_gather='never'", "valid: scatter_gather='auto'"),
    ),
    "partition without a pipeline": Case(
        layout={"pp": PipelineConfig(degree=1, partition=[2, 2])},
        says=("pp.partition=[2, 2]", "pp=1", "pp=2"),
    ),
    "pipeline without a trunk": Case(
        layout={"pp": 2}, module=NoTrunk, says=("pp=2", "PipelineSequential", "pp=1")
    ),
    "hooks on what tp slices": Case(
        layout={"tp": 2}, module=Hooked, devices=2, says=("wide.weight: Tensor.register_hook",)
    ),
    "two trunks": Case(layout={"pp": 2}, module=TwoTrunks, says=("pp=2", "net, other", "one")),
    "parameter shared with the outside": Case(
        layout={"pp": 2}, module=SharedOutside, says=("net.layers.0.0.weight", "pp=1")
    ),
    "manual optimization in a pipeline": Case(
        layout={"pp": 2}, module=Manual, says=("automatic_optimization=False", "pp=1")
    ),
    "manual optimization of microbatches": Case(
        layout={"num_microbatches": 2}, module=Manual, says=("num_microbatches=1",)
    ),
    "averages of weights that are spread": Case(
        layout={"zero": 3},
        devices=2,
        trainer={"callbacks": [StochasticWeightAveraging(1e-2), EMAWeightAveraging()]},
        says=("StochasticWeightAveraging", "EMAWeightAveraging", "zero of at most 2"),
        count=2,
    ),
    "averages of layers that are not there yet": Case(
        layout={"zero": 0},
        devices=1,
        module=BuiltLate,
        trainer={"callbacks": [StochasticWeightAveraging(1e-2)]},
        says=("configure_model", "__init__"),
    ),
    "own backward in a pipeline": Case(
        layout={"pp": 2}, module=OwnBackward, says=("OwnBackward.backward", "pp=1")
    ),
    "columns": Case(layout=TP4, **layered(column), says=("6", "tp=4", "divisible", "tp=3 or 6")),
    "rows": Case(layout=TP4, **layered(row), says=("6", "tp=4", "divisible")),
    "vocabulary": Case(layout=TP4, **layered(vocabulary), says=("50", "tp=4", "divisible")),
    "heads": Case(
        layout=TP4,
        module=language_model,
        sizes={"num_heads": 6, "num_kv_heads": 2, "hidden_size": 24},
        says=("num_heads=6, tp=4", "divisible", "nearest valid"),
    ),
    "key-value heads": Case(
        layout=TP4,
        module=language_model,
        sizes={"num_heads": 12, "num_kv_heads": 3, "hidden_size": 48},
        says=("num_kv_heads=3, tp=4", "multiple", "tp=3"),
    ),
    "vocabulary and MLP by the names of the model": Case(
        layout={"tp": 4},
        module=language_model,
        sizes={"vocab_size": 66, "mlp_size": 50},
        says=("vocab_size=66, tp=4", "mlp_size=50, tp=4", "nearest valid"),
        count=2,
    ),
    "sequence length": Case(
        layout={"tp": 2, "sequence_parallel": True},
        module=language_model,
        data=True,
        says=("seq_len=31", "tp=2", "seq_len=30 or 32"),
    ),
    "precision": Case(
        layout={}, trainer={"precision": "16-true"}, says=("'16-true'", "precision='bf16-true'")
    ),
    "unknown backend": Case(
        layout={"connection": ConnectionConfig(backend="glue")},
        says=("backend='glue'", "nearest valid", "gloo"),
    ),
    "timeout": Case(
        layout={"connection": ConnectionConfig(timeout_s=0)},
        says=("timeout_s=0", "positive", "nearest valid"),
    ),
    "negative unit size": Case(
        layout={"zero": ShardingConfig(stage=1, min_numel=-5)},
        says=("min_numel=-5", "nearest valid: min_numel=0"),
    ),
    "unknown class to wrap": Case(
        layout={"zero": ShardingConfig(stage=3, wrap=["Linaer"])},
        says=("'Linaer'", "nearest valid", "'Linear'"),
    ),
    "layers that no layout can spread": Case(
        layout={"zero": 3},
        devices=2,
        module=Unfit,
        says=("table: max_norm=1.0", "table: sparse=True", "late: parameters of unknown size"),
        count=3,
    ),
    "texts for numbers": Case(
        layout={"tp": "2", "zero": "3"},
        says=("tp='2'", "nearest valid: tp=2", "zero='3'", "nearest valid: zero=3"),
        count=2,
    ),
    "texts for switches": Case(
        layout={
            "sequence_parallel": "no",
            "activations": ActivationConfig(offload="no"),
            "zero": ShardingConfig(stage=1, offload_optimizer="false"),
        },
        says=("sequence_parallel='no'", "activations.offload='no'", "zero.offload_optimizer"),
        count=3,
    ),
    "other types for groups of options": Case(
        layout={"activations": {"recompute": "full"}, "compile": "block", "zero": {"stage": 3}},
        says=(
            "activations=ActivationConfig(recompute='full')",
            "compile=CompileConfig()",
            "a number or a ShardingConfig; nearest valid: zero=ShardingConfig(stage=3)",
        ),
        count=3,
    ),
    "several faults at once": Case(
        layout={
            "tp": 0,
            "pp": PipelineConfig(degree=2, schedule="2f2b"),
            "microbatch_size": 2,
            "num_microbatches": 2,
        },
        says=("tp=0", "2f2b", "only one"),
        count=3,
    ),
    "faults of options and module at once": Case(
        layout={"pp": 2, "microbatch_size": -3},
        module=Manual,
        says=("microbatch_size=-3", "automatic_optimization=False"),
        count=2,
    ),
}


def fit(name: str) -> None:
    case = CASES[name]
    module = case.module(**case.sizes)
    trainer = make_trainer(case.layout, case.devices, **case.trainer)
    data: Any = Data() if case.data else DataLoader(samples(), batch_size=8)
    trainer.fit(module, data)


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_configuration_is_refused_before_any_group_forms(name: str) -> None:
    case = CASES[name]
    error = refusal(lambda: fit(name), case.devices)
    text = str(error)
    assert len(error.problems) == case.count, text
    for fragment in case.says:
        assert fragment in text, text
    assert text.count("nearest valid") >= case.count, text


EVERYWHERE = (
    "tp does not divide the world",
    "columns",
    "key-value heads",
    "sequence length",
    "precision",
    "faults of options and module at once",
)
"""Mistakes of options, of modules built by then or not, of data and of the Trainer."""


def fail_everywhere() -> list[tuple[str, tuple[str, ...], bool]]:
    """Each error's text and faults, and whether a process group had formed."""
    found = []
    for name in EVERYWHERE:
        with pytest.raises(ConfigError) as raised:
            fit(name)
        found.append((str(raised.value), raised.value.problems, dist.is_initialized()))
    return found


def test_every_rank_says_the_same(pool: WorkerPool) -> None:
    assert {CASES[name].devices for name in EVERYWHERE} == {4}
    errors = [refusal(lambda name=name: fit(name), 4) for name in EVERYWHERE]
    assert pool.run(4, fail_everywhere) == [[(str(e), e.problems, False) for e in errors]] * 4


def disagree() -> str:
    rank = int(os.environ["RANK"])
    try:
        make_trainer({"num_microbatches": 1 + rank}, 2).fit(Small(), DataLoader(samples()))
    except ConfigError as error:
        return str(error)
    raise AssertionError("the run was not refused")


def test_ranks_with_different_configurations_are_refused_alike(pool: WorkerPool) -> None:
    """The one mistake that takes a process group to be seen."""
    one, other = pool.run(2, disagree)
    assert one == other
    assert "num_microbatches=1" in one
    assert "num_microbatches=2" in one
    assert "rank 1" in one


def test_there_are_enough_mistakes() -> None:
    assert len(CASES) >= 20


def two_trainers() -> None:
    module = Small()
    for _ in range(2):
        layout = {"zero": ShardingConfig(stage=3, wrap=["Linear"])}
        make_trainer(layout, 2, max_steps=1).fit(module, DataLoader(samples(), batch_size=4))


def test_units_are_known_by_their_class_to_a_second_trainer(pool: WorkerPool) -> None:
    """The first has given them classes of FSDP2."""
    pool.run(2, two_trainers)
