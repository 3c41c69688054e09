"""The strategy's own comparison of copies: what trains several networks ends the run, by name."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron import ConfigError, PipelineSequential, ShardingConfig
from lightning_megatron.layers import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.gradients import local
from tests.strategy.small import WIDTH, Small, loader, make_trainer, samples


class Writes(Small):
    """Writes to a bias on one rank, in the hook of its name, at a batch."""

    def __init__(self, rank: int, name: str = "net.down.bias", at: int = 0) -> None:
        super().__init__()
        self.net = PipelineSequential(
            up=ColumnParallelLinear(WIDTH, 8), down=RowParallelLinear(8, WIDTH)
        )
        self.outside = nn.Parameter(torch.ones(WIDTH))
        self.where = rank, name, at

    def loss(self, batch: Any) -> Any:
        return super().loss((batch[0] * self.outside, batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rank, name, at = self.where
        if batch_idx == at and self.trainer.global_rank == rank:
            held = dict(self.named_parameters())[name]
            with torch.no_grad():
                held.fill_(0.5)


class Begins(Writes):
    """Sets weights before the first step by the number of its rank."""

    def on_train_start(self) -> None:
        with torch.no_grad():
            self.outside.add_(self.trainer.global_rank)


class Frozen(Writes):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.outside.requires_grad_(False)


class ByHand(Writes):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def found(kind: Any, layout: Mapping[str, Any], ranks: int, *args: Any) -> str:
    """The error of a run of four batches."""
    try:
        trainer = make_trainer(layout, ranks)
        trainer.fit(kind(*args), loader(samples(32), dp=1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


OUTSIDE = "outside"
CASES: list[tuple[Any, dict[str, Any], int, tuple[Any, ...], str]] = [
    (Writes, {"zero": 0}, 3, (2, OUTSIDE), "step 1: rank 2 differs from the majority in outside"),
    (Writes, {"zero": 2}, 2, (0, OUTSIDE, 1), "step 2: no .* rank 0 and rank 1 differ in outside"),
    (Writes, {"tp": 2}, 2, (1,), r"step 1: no .* rank 0 and rank 1 differ in net\.down\.bias"),
    (Writes, {"pp": 2, "num_microbatches": 2}, 2, (0, OUTSIDE), "step 1: .* differ in outside"),
    (
        Writes,
        {"zero": 0},
        3,
        (0, OUTSIDE, 1),
        "step 2: .*, which was equal on all ranks after step 1.*causes: code .* on rank 0 alone",
    ),
    (Begins, {"zero": 1}, 2, (0,), "step 0: .* outside.*causes: a hook before the first step"),
    (Frozen, {"zero": 1}, 2, (1, OUTSIDE), "causes: a step or hook that writes these weights"),
    (ByHand, {"zero": 0}, 3, (1, OUTSIDE), "causes: gradients that no `manual_backward` has made"),
]


@pytest.mark.parametrize(("kind", "layout", "ranks", "where", "words"), CASES)
def test_copies_that_part_end_the_run_on_every_rank(
    pool: WorkerPool,
    kind: Any,
    layout: dict[str, Any],
    ranks: int,
    where: tuple[Any, ...],
    words: str,
) -> None:
    texts = pool.run(ranks, found, kind, layout, ranks, *where)
    assert len(set(texts)) == 1, texts
    assert texts[0].startswith("ReplicaError: ")
    assert re.search(words, texts[0]), texts[0]
    assert "compare_copies=False" in texts[0]


def unwatched(layout: dict[str, Any]) -> tuple[float, int]:
    module = Writes(0, OUTSIDE, 0)
    trainer = make_trainer(layout, 2)
    trainer.fit(module, loader(samples(32)))
    watch = trainer.strategy.replicas  # type: ignore[attr-defined]
    return float(local(module.outside.detach()).sum()), watch.comparisons


def test_whoever_wants_to_train_several_networks_may(pool: WorkerPool) -> None:
    options = {"zero": ShardingConfig(stage=0, compare_copies=False)}
    (first, none), (second, _) = pool.run(2, unwatched, options)
    assert first != second
    assert none == 0
    wrong: Any = ShardingConfig(stage=0, compare_copies="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"zero\.compare_copies='no'"):
        make_trainer({"zero": wrong}).fit(Small(), loader())


def counted(layout: dict[str, Any], ranks: int, batches: int) -> tuple[int, int]:
    trainer = make_trainer(layout, ranks, limit_train_batches=batches, max_epochs=1)
    trainer.fit(Small(), loader(samples(8 * batches * ranks)))
    return trainer.strategy.replicas.comparisons, trainer.global_step  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layout", "ranks", "batches", "expected"),
    [
        ({"zero": 1}, 2, 9, 6),  # 0, 1, 2, 4, 8, and the end
        ({"zero": 1, "num_microbatches": 2}, 2, 4, 4),  # the end is one of them
        ({"zero": 3}, 2, 4, 1),  # nothing is held alike
        ({"zero": 1}, 1, 4, 0),
    ],
)
def test_comparisons_become_rare(
    pool: WorkerPool, layout: dict[str, Any], ranks: int, batches: int, expected: int
) -> None:
    for comparisons, steps in pool.run(ranks, counted, layout, ranks, batches):
        assert (comparisons, steps) == (expected, batches)
