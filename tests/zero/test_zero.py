"""What ZeRO communicates, keeps and frees."""

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.parity.jobs import quiet_trainer

UNITS, MICROBATCHES, WIDTH = 4, 4, 8
KINDS = ("allreduce", "reducescatter", "allgather")


class Layers(L.LightningModule):
    """Layers in a row, each a unit of ZeRO."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = PipelineSequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out: Tensor = self.trunk(batch)
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Collectives(TorchDispatchMode):
    """Counts the collectives that are issued, in backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.counts = dict.fromkeys(KINDS, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not self.paused:
            name = func.name().replace("_", "")
            for kind in KINDS:
                self.counts[kind] += kind in name
        return func(*args, **(kwargs or {}))


class Counter(L.Callback):
    """Collectives of every batch, and what a rank holds between batches."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, ...]] = []
        self.held: list[int] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self._mode = mode = Collectives()
        votes = trainer.strategy.votes

        def settle() -> None:  # not part of data parallelism
            mode.paused = True
            type(votes).settle(votes)
            mode.paused = False

        votes.settle = settle
        self._mode.__enter__()

    def on_train_batch_end(self, trainer: Any, module: nn.Module, *args: Any) -> None:
        self._mode.__exit__(None, None, None)
        self.batches.append(tuple(self._mode.counts.values()))
        self.held.append(sum(local_numel(p) for p in module.parameters()))


def local_numel(parameter: Any) -> int:
    return int(
        parameter.to_local().numel() if hasattr(parameter, "to_local") else parameter.numel()
    )


def count_job(
    options: dict[str, Any], accumulate: int = 1
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Collectives of each batch as (all-reduces, reduce-scatters, all-gathers)."""
    zero = options["zero"]
    zero = zero if isinstance(zero, ShardingConfig) else ShardingConfig(stage=zero)
    strategy = MegatronStrategy(
        num_microbatches=MICROBATCHES,
        # Comparisons are not part of data parallelism.
        **{**options, "zero": replace(zero, compare_copies=False)},
    )
    counter = Counter()
    trainer = quiet_trainer(
        strategy,
        callbacks=[counter],
        precision="32-true",
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(Layers(), DataLoader(torch.ones(16 * accumulate, WIDTH), batch_size=8))
    return counter.batches, counter.held


# (all-reduces, reduce-scatters, all-gathers) of a batch of four microbatches and four units.
EXPECTED: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "zero 0: gradients once, in one bucket": ({"zero": 0}, (1, 0, 0)),
    "zero 1: gradients once, parameters once": ({"zero": 1}, (0, 1, 1)),
    "zero 2: gradients every microbatch": ({"zero": 2}, (0, MICROBATCHES, 1)),
    # Before the forward and again before the backward of every microbatch. The all-reduce tells
    # which parameters no rank has used.
    "zero 3: parameters every time": (
        {"zero": 3},
        (1, UNITS * MICROBATCHES, 2 * UNITS * MICROBATCHES),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_collectives_of_a_batch(pool: WorkerPool, name: str) -> None:
    options, expected = EXPECTED[name]
    for batches, held in pool.run(2, count_job, options):
        assert set(batches) == {expected}
        whole = UNITS * (WIDTH + 1) * WIDTH
        assert set(held) == {whole if options["zero"] < 3 else whole // 2}


@pytest.mark.parametrize("zero", [0, 1])
def test_accumulated_batches_communicate_once(pool: WorkerPool, zero: int) -> None:
    """The second of two accumulated batches reduces the gradients of both.

    The very first batch has to reduce its own: until the step has returned once, the strategy does
    not know whether it counts tokens, by whose global number gradients are divided batch by batch.
    """
    for batches, _ in pool.run(2, count_job, {"zero": zero}, accumulate=2):
        reductions = [batch[0] + batch[1] for batch in batches]
        assert reductions == [1, 1, 0, 1]


@pytest.mark.parametrize(
    "zero",
    [pytest.param(stage, marks=[pytest.mark.thorough] * (stage in (0, 2))) for stage in range(4)],
)
def test_stages_of_a_pipeline_communicate_alike(pool: WorkerPool, zero: int) -> None:
    expected = EXPECTED[list(EXPECTED)[zero]][1]
    per_stage = (1, *(n // 2 for n in expected[1:])) if zero == 3 else expected
    for batches, _ in pool.run(4, count_job, {"pp": 2, "zero": zero}):
        assert set(batches[1:]) == {per_stage}, "the first has a vote on hooks of layers"


def test_hybrid_sharding_reduces_twice(pool: WorkerPool) -> None:
    """Over the shards, then over the copies."""
    for batches, held in pool.run(4, count_job, {"zero": ShardingConfig(stage=1, dp_replicate=2)}):
        assert set(batches) == {(1, 1, 1)}
        assert set(held) == {UNITS * (WIDTH + 1) * WIDTH}


class Unfreezing(Layers):
    """Trains its first layer from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk.get_submodule("0").requires_grad_(False)
        self.seen: list[float] = []

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trunk.get_submodule("0").requires_grad_(True)

    def on_train_epoch_end(self) -> None:
        weight = self.trunk.get_submodule("0").weight.detach()
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        self.seen.append(float(weight.sum()))


def unfreeze_job(options: dict[str, Any]) -> list[float]:
    L.seed_everything(1, verbose=False)
    module = Unfreezing()
    trainer = quiet_trainer(MegatronStrategy(**options), precision="32-true", max_epochs=3)
    trainer.fit(module, DataLoader(torch.ones(8, WIDTH), batch_size=2))
    return module.seen


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_layers_can_be_unfrozen_later(pool: WorkerPool, zero: int) -> None:
    first, second, third = pool.run(2, unfreeze_job, {"zero": zero})[0]
    start = pool.run(1, unfreeze_job, {})[0]
    assert first == pytest.approx(start[0])
    assert len({round(v, 4) for v in (first, second, third)}) == 3
    assert [first, second, third] == pytest.approx(start, rel=1e-5)
