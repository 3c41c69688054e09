"""Initial weights are the same to the bit in every layout."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import PipelineConfig
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.parity.jobs import (
    Outcome,
    merge_stages,
    quiet_trainer,
    transformer_config,
    whole_parameters,
)


class Deferred(L.LightningModule):
    """Builds its network in configure_model; never trains."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.on_meta: bool | None = None

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = build(self.kind)
            self.on_meta = all(p.is_meta for p in self.net.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("no step is run")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Mixed(nn.Module):
    """Parallel layers and plain ones side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = PipelineSequential(
            start=nn.Linear(8, 12),
            layers=[
                nn.TransformerEncoderLayer(12, 2, 20, batch_first=True),
                ColumnParallelLinear(12, 16),
                RowParallelLinear(16, 12),
                nn.Sequential(nn.LayerNorm(12), nn.Conv1d(12, 12, 3, padding=1)),
            ],
            end=nn.Bilinear(12, 12, 4),
        )


def mixture_of(size: int) -> MixtureOfExperts:
    return MixtureOfExperts(
        size, 6, 8, shared_size=4, shared_gate=True, router=RouterConfig(bias_update=0.1)
    )


def build(kind: str) -> nn.Module:
    if kind == "mixture":
        return PipelineSequential(
            embedding=VocabParallelEmbedding(12, 8),
            layers=[mixture_of(8), mixture_of(8)],
            head=ColumnParallelLinear(8, 12),
        )
    if kind in ("llama", "gpt"):
        return Transformer(transformer_config(kind))  # type: ignore[arg-type]
    return Mixed()


KINDS = ("llama", "gpt", "mixed", "mixture")


def weights_job(strategy_options: dict[str, Any], precision: str) -> dict[str, Outcome]:
    """Set the modules up without running a step."""
    found = {}
    for kind in KINDS:
        if kind == "mixed" and strategy_options.get("sequence_parallel"):
            continue  # refused: plain modules see a part of the sequence only
        if kind != "mixture" and "ep" in strategy_options:
            continue  # refused: there are no experts
        L.seed_everything(7, verbose=False)
        strategy = MegatronStrategy(**strategy_options)
        trainer = quiet_trainer(strategy, max_steps=0, precision=precision)
        module = Deferred(kind)
        trainer.fit(module, DataLoader(torch.zeros(4, 1)))
        assert module.on_meta is True
        found[kind] = Outcome(weights=whole_parameters(module.net, strategy.topology))
    return found


LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"tp": 2}),
    (2, {"pp": PipelineConfig(degree=2, schedule="zbv")}),
    (2, {"zero": 3}),
    (2, {"ep": 2, "tp": 2, "zero": 0}),
    (4, {"ep": 2, "zero": 3}),
]
FURTHER: list[tuple[int, dict[str, Any]]] = [
    (4, {"tp": 4}),
    (2, {"pp": 2}),
    (3, {"pp": 3}),
    (4, {"pp": PipelineConfig(degree=2, schedule="zbv"), "zero": 1}),
    (2, {"zero": 0}),
    (4, {"zero": ShardingConfig(stage=3, dp_replicate=2)}),
    (8, {"tp": 2, "pp": 2, "zero": 2, "sequence_parallel": True}),
    (2, {"ep": 2}),
    (4, {"ep": 4, "tp": 2}),
    (4, {"ep": 2, "pp": 2, "zero": 0}),
]
"""Of `make test-all`."""


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, dict[str, Tensor]]:
    """The weights that one process starts from, by kind."""
    found = pool.run(1, weights_job, {}, "32-true")[0]
    return {kind: outcome.weights for kind, outcome in found.items()}


def test_are_random_and_complete(alone: dict[str, dict[str, Tensor]]) -> None:
    for kind, weights in alone.items():
        assert all(w.isfinite().all() for w in weights.values())
        matrices = [w for w in weights.values() if w.ndim > 1]
        assert len(matrices) >= 5, kind
        assert all(w.std() > 0 for w in matrices)
        assert len({w.flatten()[0].item() for w in matrices}) == len(matrices)


@pytest.mark.parametrize(
    ("world", "options"),
    [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.thorough) for one in FURTHER)],
    ids=str,
)
def test_are_the_same_in_every_layout(
    pool: WorkerPool, alone: dict[str, dict[str, Tensor]], world: int, options: dict[str, Any]
) -> None:
    by_rank = pool.run(world, weights_job, options, "32-true")
    for kind in by_rank[0]:
        expected = alone[kind]
        both = {"trunk.head.weight", "trunk.embedding.tokens.weight"}
        assert not any(both <= o[kind].weights.keys() for o in by_rank), "a tie was cut on a rank"
        found = merge_stages([outcomes[kind] for outcomes in by_rank])
        tied = found.pop("trunk.head.weight", None)
        if tied is not None:
            assert torch.equal(tied, expected["trunk.embedding.tokens.weight"])
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{name} of {kind}"


def test_of_parallel_layers_are_the_same_in_every_precision(
    pool: WorkerPool, alone: dict[str, dict[str, Tensor]]
) -> None:
    """They are drawn in float32; plain modules draw in the precision of the run."""
    by_rank = pool.run(2, weights_job, {"tp": 2}, "64-true")
    for kind in ("llama", "gpt"):
        found = merge_stages([outcomes[kind] for outcomes in by_rank])
        for name, value in alone[kind].items():
            assert found[name].dtype == torch.float64
            assert torch.equal(found[name], value.double()), f"{name} of {kind}"
