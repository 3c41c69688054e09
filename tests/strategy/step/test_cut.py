"""Ranks whose batches hold different numbers of samples."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_megatron import PipelineConfig
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, assert_same, make_trainer, merged, samples, weights

SHARES = {1: ((8,), (6,), (3,)), 2: ((5, 3), (2, 4), (1, 2))}
"""Samples of every rank in every batch."""


class Shares(IterableDataset[Any]):
    """The batches of one data-parallel rank."""

    def __init__(self, dp: int, rank: int) -> None:
        self.dp, self.rank = dp, rank

    def __iter__(self) -> Iterator[Any]:
        x, y = samples().tensors
        start = 0
        for sizes in SHARES[self.dp]:
            mine = start + sum(sizes[: self.rank])
            end = mine + sizes[self.rank]
            yield x[mine:end], y[mine:end]
            start += sum(sizes)


class PerSample(Small):
    """Counts samples as tokens, in several ways, and measures what it validates."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.counted = SumMetric()
        self.losses: list[int] = []
        self.count = 0
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)  # what stands behind the trunk runs once, on the last stage
        self.counted.update(len(batch[0]))
        self.losses += [1] * len(batch[0])
        self.count += len(batch[0])
        self.log("samples", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        return {"loss": loss * len(batch[0]), "num_tokens": len(batch[0])}

    def on_train_epoch_end(self) -> None:
        self.of_epoch = (float(self.counted.compute()), len(self.losses), self.count)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss: Tensor = self.loss(batch)
        self.metric.update(loss, len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        if self.metric.update_called:
            self.seen.append(float(self.metric.compute()))


def fit(
    layout: Mapping[str, Any], devices: int, dp: int
) -> tuple[dict[str, Tensor], list[float], tuple[float, ...]]:
    trainer = make_trainer(layout, devices, limit_val_batches=3, num_sanity_val_steps=0)
    module = PerSample()

    def loader() -> DataLoader[Any]:
        return DataLoader(Shares(dp, trainer.strategy.topology.batch.rank), batch_size=None)

    module.train_dataloader = module.val_dataloader = loader  # type: ignore[method-assign]
    trainer.fit(module)
    logged = float(trainer.callback_metrics["samples"])
    return weights(module), module.seen, (logged, *module.of_epoch)


@pytest.fixture(scope="module")
def one_process(pool: WorkerPool) -> Any:
    return pool.run(1, fit, {}, 1, 1)[0]


@pytest.mark.parametrize(
    ("layout", "devices"),
    [
        ({"zero": 0, "microbatch_size": 1}, 2),
        ({"zero": 2, "microbatch_size": 2}, 2),
        ({"zero": 3, "microbatch_size": 1}, 2),
        ({"zero": 3, "num_microbatches": 4}, 2),
        pytest.param({"zero": 3, "pp": 2, "microbatch_size": 1}, 4, marks=pytest.mark.thorough),
        pytest.param(
            {"zero": 3, "pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 4},
            4,
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_uneven_batches_train_what_one_process_trains(
    pool: WorkerPool, one_process: Any, layout: dict[str, Any], devices: int
) -> None:
    """ZeRO 2 and 3 communicate in every microbatch, of which the ranks would have different
    numbers.
    """
    alone, means, counted = one_process
    by_rank = pool.run(devices, fit, layout, devices, 2)
    assert_same(merged([held for held, _, _ in by_rank]), alone)
    for _, seen, _ in by_rank:
        assert not seen or seen == pytest.approx(means, rel=1e-6)  # float32
    assert any(seen for _, seen, _ in by_rank)
    # The last rank has fewer microbatches than the others: what fills them up counts nowhere.
    assert counted == (17.0,) * 4
    shares = [sum(sizes) for sizes in zip(*SHARES[2], strict=True)]
    for rank, (_, _, ours) in enumerate(by_rank):
        mine = shares[rank % 2]
        assert ours == (mine, sum(shares), mine, mine)
