"""Ranks that read unequal parts of each global batch train what one process trains."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

from lightning_megatron import PipelineConfig
from lightning_megatron.layers import MixtureOfExperts, RouterConfig
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import WIDTH, Small, assert_same, make_trainer, merged, samples, weights

SAMPLES, BATCH = 29, 12
"""Batches of 12, 12 and 5 samples."""


class Logged(Small):
    """Logs its loss in every way that has a mean, and counts what it reads.

    Args:
        by_token: whether the step returns a sum and a number of tokens.
    """

    def __init__(self, *, by_token: bool) -> None:
        super().__init__()
        self.by_token = by_token
        self.read = SumMetric()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, n = self.loss(batch), len(batch[0])
        self.read.update(float(n))
        self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("sized", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=3 * n)
        self.log("sum", float(n), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        return {"loss": loss * n, "num_tokens": n} if self.by_token else loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("before", batch[0].mean(), on_step=False, on_epoch=True, sync_dist=True)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        metrics = self.trainer.callback_metrics
        self.seen += [float(outputs["loss"])]
        if "mean_step" in metrics:
            self.seen += [float(metrics["mean_step"]), float(metrics["sized_step"])]

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.read.compute()))
        self.log("equal", 3.0, sync_dist=True)


class Routed(Logged):
    """Its auxiliary losses are means over sequences, or weighed with their tokens."""

    def __init__(self, *, by_token: bool) -> None:
        super().__init__(by_token=by_token)
        router = RouterConfig(balance_weight=0.3, z_loss=0.2)
        self.experts = MixtureOfExperts(WIDTH, 8, 4, 2, router=router).double()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(self.experts(batch[0][:, None])[:, 0]), batch[1])


class Manual(Small):
    """Runs backward itself."""

    def __init__(self, *, by_token: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        for key in ("mean_epoch", "sized_epoch", "sum", "before", "equal"):
            self.log(key, loss, on_step=False, on_epoch=True, sync_dist=True)


KINDS = {kind.__name__: kind for kind in (Logged, Manual, Routed)}


def fit(
    layout: Mapping[str, Any],
    devices: int,
    dp: int,
    by_token: bool = False,
    count: int = SAMPLES,
    kind: str = "Logged",
    **options: Any,
) -> tuple[dict[str, Tensor], list[float]]:
    pl.seed_everything(5, verbose=False)
    trainer = make_trainer(layout, devices, max_epochs=2, **options)
    torch.manual_seed(5)
    module: Any = KINDS[kind](by_token=by_token)
    trainer.fit(module, DataLoader(samples(count), batch_size=BATCH // dp, shuffle=True))
    keys = ("mean_epoch", "sized_epoch", "sum", "before", "equal")
    logged = [float(trainer.callback_metrics[key]) for key in keys]
    return weights(module), module.seen + logged


Job = tuple[dict[str, Any], int, int, dict[str, Any]]
JOBS: list[Job] = [
    ({"zero": 0, "batch_shares": [2, 1]}, 2, 2, {}),
    ({"zero": 1, "batch_shares": [2, 1]}, 2, 2, {"by_token": True}),
    ({"zero": 1, "batch_shares": [5, 1]}, 2, 2, {"accumulate_grad_batches": 2}),
    ({"zero": 2, "batch_shares": [1, 2], "microbatch_size": 2}, 2, 2, {}),
    ({"zero": 3, "batch_shares": [5, 1], "num_microbatches": 3}, 2, 2, {"by_token": True}),
    ({"zero": 3, "batch_shares": [2, 1]}, 2, 2, {"count": 13}),
    ({"batch_shares": [2, 1]}, 2, 2, {"count": 13, "by_token": True}),
    ({"batch_shares": [2, 1, 1]}, 3, 3, {}),
    ({"batch_shares": [2, 1]}, 2, 2, {"kind": "Manual"}),
    ({"batch_shares": [2, 1]}, 2, 2, {"kind": "Routed", "count": 13}),
    ({"batch_shares": [2, 1], "num_microbatches": 2}, 2, 2, {"kind": "Routed"}),
    ({"batch_shares": [2, 1]}, 2, 2, {"kind": "Routed", "by_token": True, "count": 13}),
    ({"pp": PipelineConfig(degree=2, schedule="zbv"), "batch_shares": [3, 1]}, 4, 2, {}),
]
"""Layouts, and what is trained on them. Of 13 samples the last batch has one, for several ranks."""
THOROUGH: list[Job] = [
    ({"tp": 2, "batch_shares": [2, 1]}, 4, 2, {}),
    ({"zero": 2, "batch_shares": [2, 1], "microbatch_size": 2}, 2, 2, {"count": 13}),
    (
        {"zero": 2, "pp": 2, "batch_shares": [1, 3], "num_microbatches": 2},
        4,
        2,
        {"count": 13, "by_token": True},
    ),
]


@pytest.fixture(scope="module")
def one_process(pool: WorkerPool) -> Any:
    """Result of a run of one process with these options, which runs once."""

    @cache
    def result(**options: Any) -> Any:
        return pool.run(1, fit, {}, 1, 1, **options)[0]

    return result


@pytest.mark.parametrize(
    ("layout", "devices", "dp", "options"),
    [*JOBS, *(pytest.param(*job, marks=pytest.mark.thorough) for job in THOROUGH)],
    ids=str,
)
def test_parts_train_and_log_what_one_process_does(
    pool: WorkerPool,
    one_process: Any,
    layout: dict[str, Any],
    devices: int,
    dp: int,
    options: dict[str, Any],
) -> None:
    alone, seen = one_process(**options)
    by_rank = pool.run(devices, fit, layout, devices, dp, **options)
    assert_same(merged([held for held, _ in by_rank]), alone)
    for _, ours in by_rank:
        assert ours == pytest.approx(seen, rel=1e-10)
