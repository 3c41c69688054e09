"""ZeRO 3 where ranks do different things, and where users look at parts."""

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_megatron
from lightning_megatron import PipelineConfig
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import WorkerError, WorkerPool
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.parity.habits import Branches, BranchesInside, Habit
from tests.parity.jobs import quiet_trainer
from tests.parity.plain_modules import FromMemory


def train(module: L.LightningModule, strategy: Any, **options: Any) -> dict[str, Tensor]:
    quiet_trainer(strategy, **options).fit(module)
    return lightning_megatron.gather(module)


class Gate(nn.Module):
    """An item of which a part runs for samples with a positive first value, which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.every, self.some, self.never = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, chosen = torch.tanh(self.every(x)), x[:, 0] > 0
        if chosen.any():
            out = out.index_add(0, chosen.nonzero().flatten(), self.some(x[chosen]))
        return torch.cat([x[:, :1], out], dim=1)


class Trunk(Branches):
    """Such items in a pipeline."""

    def __init__(self) -> None:
        FromMemory.__init__(self)
        self.trunk = PipelineSequential(*(Gate() for _ in range(4)))
        self.seen = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self.trunk(x)[:, 1:4], y)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5, weight_decay=0.3)


class Kept(L.Callback):
    """Which parameters have a gradient when the optimizer steps."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_before_optimizer_step(self, trainer: Any, module: Any, *_: Any) -> None:
        self.seen |= {name for name, p in module.named_parameters() if p.grad is not None}


MODULES = {"inside": BranchesInside, "outside": Branches, "trunk": Trunk}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "microbatches": (2, "inside", {"num_microbatches": 2}, {}),
    "accumulation": (2, "inside", {}, {"accumulate_grad_batches": 2}),
    "both": (2, "outside", {"num_microbatches": 2}, {"accumulate_grad_batches": 2}),
    "copies": (4, "inside", {"zero": ShardingConfig(stage=3, dp_replicate=2)}, {}),
    "pipeline": (4, "trunk", {"pp": 2, "num_microbatches": 2}, {}),
    "split backward": (
        4,
        "trunk",
        {"pp": PipelineConfig(degree=2, schedule="zb-h1"), "num_microbatches": 2},
        {},
    ),
}


def branch_job(
    name: str, options: dict[str, Any] | None, trainer: dict[str, Any]
) -> tuple[dict[str, Tensor], set[str]]:
    L.seed_everything(5, verbose=False)
    kept = Kept()
    strategy = "auto" if options is None else MegatronStrategy(**{"zero": 3, **options})
    return train(MODULES[name](), strategy, callbacks=[kept], **trainer), kept.seen


THOROUGH = ("accumulation", "pipeline")
"""Layouts that others contain."""


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.thorough] * (n in THOROUGH)) for n in LAYOUTS]
)
def test_layers_that_some_ranks_use(pool: WorkerPool, layout: str) -> None:
    """They are trained alike on all ranks; what nobody uses has no gradient, and is not decayed."""
    ranks, name, options, trainer = LAYOUTS[layout]
    weights, used = pool.run(1, branch_job, name, None, trainer)[0]
    found = pool.run(ranks, branch_job, name, options, trainer)
    assert not any("never" in key for key in used)
    assert set().union(*(kept for _, kept in found)) == used
    for ours, _ in found:
        for key, value in weights.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-10)


class Narrow(BranchesInside):
    """Reads float32."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([tensor.float() for tensor in batch], batch_idx)


def mixed_job() -> bool:
    L.seed_everything(5, verbose=False)
    found = train(Narrow(), MegatronStrategy(zero=3), precision="bf16-mixed")
    return all(bool(value.isfinite().all()) for value in found.values())


def test_zeros_are_in_the_format_of_gradients(pool: WorkerPool) -> None:
    assert pool.run(2, mixed_job) == [True, True]


class Either(Habit):
    """Ranks run layers of one size, each another."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self(x) + self.ways[dist.get_rank() % 2](x), y)


def either_job(options: dict[str, Any], trainer: dict[str, Any]) -> None:
    train(Either(), MegatronStrategy(zero=3, **options), **trainer)


@pytest.mark.parametrize("layout", ["whole", "microbatches", "accumulation"])
def test_ranks_that_run_other_layers_say_so(pool: WorkerPool, layout: str) -> None:
    """Shards of one size would be taken for each other."""
    options, trainer = ({}, {}) if layout == "whole" else LAYOUTS[layout][2:]
    with pytest.raises(WorkerError) as failure:
        pool.run(2, either_job, options, trainer)
    assert isinstance(failure.value.__cause__, ConfigError)
    text = str(failure.value.__cause__)
    assert "rank 1 ran other layers than rank 0" in text
    assert "nearest valid: zero=2" in text
    assert len(failure.value.failures) == 2


class Unhooked(Habit):
    """Registers hooks that it removes, and one that works."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: gradient).remove()

    def on_train_start(self) -> None:
        self.net[2].weight.register_post_accumulate_grad_hook(lambda p: self.note(1.0))
        self.net[0].weight.register_hook(lambda gradient: gradient).remove()


def unhooked_job() -> int:
    module = Unhooked()
    train(module, MegatronStrategy(zero=3))
    return len(module.notes)


def test_hooks_that_were_removed_do_no_harm(pool: WorkerPool) -> None:
    assert min(pool.run(2, unhooked_job)) > 0
