"""The mean of a key that only some microbatches log, and the loss that is reported."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import PipelineConfig
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import WIDTH, Small, make_trainer

GROUPS = (4, 4, 2)
"""Samples of the microbatches."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "pp=2": (2, {"pp": 2}),
    "pp=2, two stages a rank": (2, {"pp": PipelineConfig(degree=2, schedule="zbv")}),
}


class Marked(Small):
    """Each sample says which microbatch it belongs to."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch[:2])
        mark = float(batch[2][0])
        if mark != 2:
            self.log("some", 10 * mark, on_step=True, on_epoch=True)
            self.log("weighed", 10 * mark, batch_size=int(mark), on_step=True, on_epoch=True)
            self.log("summed", mark, reduce_fx="sum", on_step=False, on_epoch=True)
        if mark == 3:
            self.log("last", mark)
        return loss


class Losses(pl.Callback):
    """What hooks are told of the loss."""

    def __init__(self) -> None:
        self.before: list[float] = []
        self.after: list[float] = []

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        self.before.append(float(loss))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.after.append(float(outputs["loss"]))


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(20, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    marks = torch.cat([torch.full((n,), float(i + 1)) for i, n in enumerate(GROUPS)] * 2)
    return DataLoader(TensorDataset(x, y, marks), batch_size=10)


def fit(
    layout: Mapping[str, Any] | None, devices: int, accumulate: int = 1
) -> tuple[dict[str, float], list[float], list[float]]:
    losses = Losses()
    options: dict[str, Any] = {"callbacks": [losses], "accumulate_grad_batches": accumulate}
    trainer = make_trainer(layout and {**layout, "microbatch_size": 4}, devices, **options)
    trainer.fit(Marked(), data())
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return values, losses.before, losses.after


@pytest.mark.parametrize("layout", LAYOUTS)
def test_key_of_some_microbatches_has_their_mean(pool: WorkerPool, layout: str) -> None:
    devices, options = LAYOUTS[layout]
    for values, _, _ in pool.run(devices, fit, {"num_microbatches": None, **options}, devices):
        some = (4 * 10 + 2 * 30) / 6
        weighed = (1 * 10 + 3 * 30) / 4
        expected = {"some": some, "some_step": some, "some_epoch": some, "last": 3.0}
        expected |= {"weighed": weighed, "weighed_step": weighed, "weighed_epoch": weighed}
        assert values == pytest.approx(expected | {"summed": 2 * (1 + 3)}, rel=1e-6)


@pytest.mark.parametrize("layout", ["one process", "pp=2"])
def test_reported_loss_under_accumulation_is_that_of_plain_lightning(
    pool: WorkerPool, layout: str
) -> None:
    devices, options = LAYOUTS[layout]
    _, before, after = fit(None, 1, accumulate=2)
    assert len(before) == len(after) == 2
    for _, ours_before, ours_after in pool.run(devices, fit, options, devices, 2):
        assert ours_before == pytest.approx(before, rel=1e-10)
        assert ours_after == pytest.approx(after, rel=1e-10)
