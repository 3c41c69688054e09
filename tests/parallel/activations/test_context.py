"""Recomputation of blocks that hold parts of sequences."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import (
    ActivationConfig,
    ContextConfig,
    MegatronStrategy,
    PipelineConfig,
    PipelineSequential,
)
from lightning_megatron.layers.attention import SelfAttention
from lightning_megatron.layers.context_split import SplitContext
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.models.transformer import TransformerBlock
from lightning_megatron.testing import WorkerPool
from tests.parity.context_jobs import CutEmbedding, PositionwiseModule, WholeLoss
from tests.parity.jobs import quiet_trainer, transformer_config, whole_parameters
from tests.parity.reference import Data
from tests.strategy.small import assert_same, merged


class Dropping(PositionwiseModule):
    """Drops elements in every block, and notes which."""

    def __init__(self, data: Data) -> None:
        super().__init__(data)
        for block in self.trunk.blocks:
            block.insert(1, Drop())


class Drop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        kept = nn.functional.dropout(torch.ones_like(x), 0.4, self.training)
        self.masks.append(kept)
        return x * kept


def dropping_job(options: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Masks of this rank's blocks in two steps, and the weights afterwards."""
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(**options)
    module = Dropping(Data(steps=2, lengths=(8, 7)))
    quiet_trainer(strategy).fit(module)
    masks = [m for child in module.modules() if isinstance(child, Drop) for m in child.masks]
    return masks, whole_parameters(module, strategy.topology)


@pytest.mark.parametrize(
    ("layout", "processes"),
    [
        ({"cp": 2, "num_microbatches": 2}, 2),
        pytest.param(
            {"cp": 2, "pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 2},
            4,
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_masks_differ_over_cp_and_come_again_when_blocks_are_recomputed(
    pool: WorkerPool, layout: dict[str, Any], processes: int
) -> None:
    plain = pool.run(processes, dropping_job, layout)
    again = {**layout, "activations": ActivationConfig(recompute="full")}
    for rank, (masks, weights) in enumerate(pool.run(processes, dropping_job, again)):
        once, expected = plain[rank]
        assert len(masks) == 2 * len(once)
        found = sorted(mask.flatten().tolist() for mask in masks)
        assert found == sorted(mask.flatten().tolist() for mask in once * 2)
        for name, weight in weights.items():
            assert torch.equal(weight, expected[name]), name
    for one, other in zip(plain[0][0], plain[1][0], strict=True):
        assert not torch.equal(one, other)


class Attentive(PositionwiseModule):
    """Two blocks of a transformer over parts of sequences."""

    def __init__(self, data: Data, dropout: float = 0.0) -> None:
        super().__init__(data)
        config = replace(transformer_config("llama"), dropout=dropout, attention_dropout=dropout)
        rotary = Rotary(config.head_size)
        self.trunk = PipelineSequential(
            embedding=CutEmbedding(),
            blocks=[TransformerBlock(config, rotary) for _ in range(2)],
            loss=WholeLoss(),
        ).double()


MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "context": {"recompute": "selective", "keep": ["context"]},
    "matmul": {"recompute": "selective", "keep": ["matmul"]},
    "full": {"recompute": "full"},
    "offload": {"recompute": "selective", "offload": True, "offload_min_bytes": 0},
    "group": {"recompute": "full", "group": 2},
}


def modes_job(
    options: Mapping[str, Any], dropout: float, modes: Sequence[str], steps: int = 2
) -> dict[str, tuple[int, int]]:
    """Messages and bytes that this rank sends over cp, by what is recomputed.

    The weights afterwards must be the same, to the bit.
    """
    found, weights = {}, {}
    for name in modes:
        L.seed_everything(1, verbose=False)
        strategy = MegatronStrategy(**options, activations=ActivationConfig(**MODES[name]))
        module = Attentive(Data(steps=steps, lengths=(13, 8)), dropout)
        quiet_trainer(strategy).fit(module)
        meter = strategy.topology.meters["cp"]
        found[name] = meter.calls, meter.bytes
        weights[name] = whole_parameters(module, strategy.topology)
        for key, weight in weights["none"].items():
            assert torch.equal(weights[name][key], weight), (name, key)
    return found


MOST = ("none", "selective", "full")
MORE = (*MOST, "context", "offload")
KINDS = {
    "ring": (2, {"cp": ContextConfig(degree=2, kind="ring")}, 0.0, MORE),
    "ring, all": (2, {"cp": ContextConfig(degree=2, kind="ring")}, 0.0, tuple(MODES)),
    "gather": (2, {"cp": ContextConfig(degree=2, kind="gather")}, 0.2, MOST),
    "ulysses": (2, {"cp": ContextConfig(degree=2, kind="ulysses")}, 0.2, MOST),
    "both": (4, {"cp": ContextConfig(degree=4, kind="ring", ulysses=2)}, 0.0, MOST),
}


@pytest.mark.parametrize(
    "kind",
    [
        *("ring", "gather"),
        *(
            pytest.param(kind, marks=pytest.mark.thorough)
            for kind in [*KINDS][1:]
            if kind != "gather"
        ),
    ],
)
def test_what_attention_has_exchanged_is_kept(pool: WorkerPool, kind: str) -> None:
    """Also the masks of its weights are the same again."""
    processes, options, dropout, modes = KINDS[kind]
    for sent in pool.run(processes, modes_job, options, dropout, modes):
        calls, size = sent["none"]
        assert calls > 0
        for mode in {"selective", "context", "offload"} & sent.keys():
            assert sent[mode] == (calls, size), mode
        for mode in {"matmul", "group"} & sent.keys():
            assert sent[mode] == sent["full"], mode
        again = sent["full"][0] - calls, sent["full"][1] - size
        assert min(again) > 0
        assert again[1] <= size / 2, "no more than what the forward has sent"


@pytest.mark.parametrize(
    ("schedule", "modes", "steps"),
    [
        ("zbv", ("none", "full"), 1),
        *(
            pytest.param(schedule, MOST, 2, marks=pytest.mark.thorough)
            for schedule in ("zbv", "1f1b")
        ),
    ],
)
def test_stages_that_recompute_rings_keep_step(
    pool: WorkerPool, schedule: str, modes: Sequence[str], steps: int
) -> None:
    """Under ZeRO 3, whose collectives lie between those of the rings."""
    pp = PipelineConfig(degree=2, schedule=schedule)
    options = {"cp": 2, "pp": pp, "zero": 3, "num_microbatches": 3}
    by_rank = pool.run(4, modes_job, options, 0.0, modes, steps)
    for sent in by_rank:
        assert sent.get("selective", sent["none"]) == sent["none"]
    assert any(sent["full"] > sent["none"] for sent in by_rank), "where the blocks are"


class Ragged(L.LightningModule):
    """Attends in both directions, to other numbers of positions in each microbatch."""

    lengths = (13, 16, 14, 15)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        blocks = [nn.Sequential(nn.LayerNorm(8), SelfAttention(8, 2)) for _ in range(3)]
        self.trunk = PipelineSequential(SplitContext(), *blocks, nn.Linear(8, 8)).double()

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(1)
        texts = torch.randn(2, 4, 16, 8, generator=draw, dtype=torch.float64)
        return DataLoader(list(texts), batch_size=None, shuffle=False)  # type: ignore[arg-type]

    def split_batch(self, batch: Tensor, count: int) -> list[Tensor]:
        return [row[None, :length] for row, length in zip(batch, self.lengths, strict=True)]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.trunk(batch).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def ragged_job(options: Mapping[str, Any]) -> dict[str, Tensor]:
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(**options, num_microbatches=4)
    module = Ragged()
    quiet_trainer(strategy, accumulate_grad_batches=2).fit(module)
    return whole_parameters(module, strategy.topology)


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_blocks_know_again_how_long_each_microbatch_was(pool: WorkerPool, pp: int) -> None:
    """Positions of padding that were seen would change the numbers."""
    [plain] = pool.run(1, ragged_job, {})
    again = ActivationConfig(recompute="full", blocks=["Sequential"])
    weights = merged(pool.run(2 * pp, ragged_job, {"cp": 2, "pp": pp, "activations": again}))
    assert_same(weights, plain)
