"""Parts that follow the speed of the ranks, and runs that go on under other parts."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from lightning_megatron import ConfigError, MeasuredShares
from lightning_megatron.data.reading.shares import Parts, UnevenBatches, sizes_of
from lightning_megatron.fault_tolerance.slow_rank_comparison import OwnWork
from lightning_megatron.strategy.data.batch_shares import BatchShares
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, assert_same, make_trainer, merged, samples, weights

BATCH, SAMPLES = 12, 53
MEASURED = {"batch_shares": MeasuredShares(every=2)}


class Watched(Small):
    """Notes who reads how much, and saves in the midst of the second epoch."""

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path = path
        self.sizes: list[tuple[int, ...]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        portion = self.trainer.strategy.data.shares.portion  # type: ignore[attr-defined]
        if portion is not None:
            assert len(batch[0]) == portion.rows
            self.sizes.append(portion.sizes)
        if self.path is not None and (self.trainer.current_epoch, batch_idx) == (1, 1):
            self.trainer.save_checkpoint(self.path)


def fit(
    layout: Mapping[str, Any],
    devices: int,
    dp: int,
    save: Path | None = None,
    resume: Path | None = None,
    workers: int = 0,
) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
    """Train where each data-parallel rank takes as much longer as its rank is higher."""
    pl.seed_everything(5, verbose=False)
    trainer = make_trainer(layout, devices, max_epochs=3)
    module, measured = Watched(save), OwnWork.take
    loader = DataLoader(
        samples(SAMPLES),
        batch_size=BATCH // dp,
        shuffle=True,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )

    def seconds(work: OwnWork) -> list[float]:
        measured(work)
        strategy: Any = trainer.strategy
        reader = strategy.topology.batch.rank
        own = strategy.data.shares.portion.sizes[reader] * (1.0 + reader)
        return [0.1 * own, 0.4 * own, 0.5 * own, 100.0]

    with mock.patch.object(OwnWork, "take", seconds):
        trainer.fit(module, loader, ckpt_path=resume)
    return weights(module), module.sizes


@pytest.mark.parametrize(
    "layout",
    [{"zero": 2}, pytest.param({"pp": 2, "num_microbatches": 2}, marks=pytest.mark.thorough)],
    ids=str,
)
def test_parts_follow_the_times_of_the_ranks(pool: WorkerPool, layout: dict[str, Any]) -> None:
    """A rank that takes twice as long for a sample comes to read half as many."""
    [(alone, _)] = pool.run(1, fit, {}, 1, 1)
    devices = 2 * layout.get("pp", 1)
    workers = 2 if devices == 2 else 0
    by_rank = pool.run(devices, fit, {**layout, **MEASURED}, devices, 2, workers=workers)
    assert_same(merged([held for held, _ in by_rank]), alone)
    sizes = by_rank[0][1]
    assert [seen for _, seen in by_rank] == [sizes] * devices
    assert sizes[0] == (6, 6)
    assert sizes[-1] == (8, 4)


def test_run_goes_on_under_other_parts(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    first = pool.run(2, fit, MEASURED, 2, 2, save=path)
    alone = merged([held for held, _ in first])
    again = pool.run(2, fit, MEASURED, 2, 2, resume=path)
    assert_same(merged([held for held, _ in again]), alone)
    assert again[0][1][0] == first[0][1][-1] == (8, 4)
    for layout, devices, dp in (
        ({}, 1, 1),
        ({"batch_shares": [1, 3]}, 2, 2),
        ({"batch_shares": "measured"}, 3, 3),
    ):
        others = pool.run(devices, fit, layout, devices, dp, resume=path)
        assert_same(merged([held for held, _ in others]), alone)


class Rows(pl.Callback):
    """Compares the part that is told before the strategy's own hook with the batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *args: Any) -> None:
        assert len(batch[0]) == trainer.strategy.data.shares.portion.rows


def reload(layout: Mapping[str, Any]) -> None:
    trainer = make_trainer(
        layout, 2, max_epochs=2, reload_dataloaders_every_n_epochs=1, callbacks=[Rows()]
    )
    trainer.fit(Small(), DataLoader(samples(8), batch_size=3))


def test_parts_are_those_of_the_present_loader(pool: WorkerPool) -> None:
    pool.run(2, reload, {"batch_shares": [2, 1]})


class Stream(IterableDataset[Any]):
    """Divides itself."""

    def __iter__(self) -> Any:
        return iter(samples())


def refusal(layout: Mapping[str, Any], make: Any = None, module: Any = None) -> str:
    """What the first of two ranks says."""
    trainer = make_trainer(layout, 2, use_distributed_sampler=make != "undivided")
    loader = make() if callable(make) else DataLoader(samples(), batch_size=4)
    with pytest.raises(ConfigError) as raised:
        trainer.fit((module or Small)(), loader)
    return str(raised.value)


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ([2, 1, 1], r"3 shares and 2 data-parallel ranks; nearest valid: batch_shares=\[2, 1\]"),
        ([2], r"1 shares and 2 data-parallel ranks; nearest valid: batch_shares=\[2, 2\]"),
        ([2, 0], r"batch_shares=\[2, 0\]: each is a positive number"),
        ("fast", r"batch_shares='fast': must be a list .* batch_shares=\[1, 1\]"),
        (MeasuredShares(every=1), r"every=1.*nearest valid: every=2"),
    ],
    ids=str,
)
def test_values_are_refused_before_training(shares: Any, words: str) -> None:
    """In one process: no group has formed."""
    [problem] = BatchShares(shares).problems(2, nn.Linear(1, 1), divides=True, on_host=True)
    assert re.search(words, problem)


class Gathers(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return self.all_gather(loss, sync_grads=True).mean()


class Shrinks(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part[:1] for part in batch]


class Means(Small):
    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.metric.update(loss.detach())
        self.log("mean", self.metric)
        return loss


REFUSED: list[tuple[Any, Any, str]] = [
    ("undivided", None, "use_distributed_sampler=False"),
    (lambda: DataLoader(Stream(), batch_size=4), None, "has an iterable dataset"),
    (lambda: {"a": DataLoader(samples()), "b": DataLoader(samples())}, None, "2 training loaders"),
    (lambda: DataLoader(samples(), batch_size=None), None, "has no batches"),
    (None, Gathers, "self.all_gather in training_step"),
    (None, Shrinks, "the first dimension of its batch is 1"),
    (None, Means, "MeanMetric"),
]


def refusals() -> list[str]:
    """What this rank says to each of them."""
    return [refusal({"batch_shares": [3, 1]}, make, module) for make, module, _ in REFUSED]


def test_what_cannot_be_weighed_is_refused(pool: WorkerPool) -> None:
    said = pool.run(2, refusals)[0]
    for text, (_, _, words) in zip(said, REFUSED, strict=True):
        assert words in text


def test_parts_of_a_batch_are_disjoint_and_in_proportion() -> None:
    parts = Parts(sizes_of([3, 2, 1], 12))
    assert parts.sizes == (6, 4, 2)
    for total in range(1, 13):
        batch = list(range(total))
        portions = [parts.portion(rank, total) for rank in range(3)]
        read = [parts.take(batch, rank) for rank in range(3)]
        assert sum(portion.samples for portion in portions) == total
        assert [len(part) for part in read] == [portion.rows for portion in portions]
        counted = [part for part, p in zip(read, portions, strict=True) if p.counts]
        assert sorted(sum(counted, [])) == batch
    equal = Parts((2, 2, 2))
    assert [equal.take(range(6), rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_new_parts_hold_from_the_batch_they_are_planned_for() -> None:
    plans = {0: Parts((2, 2)), 1: Parts((2, 2)), 2: Parts((3, 1))}
    for rank in (0, 1):
        batches = UnevenBatches(range(11), 4, False, rank=rank, parts_of=plans.__getitem__)
        lengths = [len(batch) for batch in batches]
        assert lengths == [[2, 2, 2], [2, 2, 1]][rank]
        assert [p.samples for p in batches.portions] == lengths
        assert len(batches) == 3
