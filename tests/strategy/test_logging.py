"""What ``self.log`` says is the same under microbatches, pipelines and data parallelism."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_megatron.strategy.collectives import MonitoredValues
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import LAYOUTS, Small, dp_of, loader, make_trainer, run, samples

# What is left out differs from one that is there in the number of microbatches alone, or joins two.
SOME: list[Any] = [
    pytest.param(name, marks=pytest.mark.thorough)
    if name in ("pp=2", "pp=2, 1 microbatch", "dp=2", "pp=2 x dp=2")
    else name
    for name in LAYOUTS
]


class Talkative(Small):
    """Logs in every way that ``self.log`` knows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        first = batch[0][:, 0]
        # The mean over the batch is what dp ranks and microbatches must agree on.
        self.log("default", loss, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True, logger=False)
        self.log("largest", first.max(), reduce_fx="max", on_epoch=True, sync_dist=True)
        self.log("smallest", first.min(), reduce_fx=torch.min, on_epoch=True, sync_dist=True)
        self.log("total", first.sum(), reduce_fx="sum", on_epoch=True, sync_dist=True)
        self.log("number", float(batch_idx), prog_bar=True, on_epoch=True)
        self.log("sized", loss, batch_size=len(first), on_epoch=True, sync_dist=True)
        weights = 1 + (first > 0).int()  # as tokens: the mean over them is what the batch logs
        mean, count = (first * weights).sum() / weights.sum(), int(weights.sum())
        self.log("weighed", mean, batch_size=count, on_step=False, on_epoch=True, sync_dist=True)
        self.log_dict({"one": loss, "two": 2 * loss}, sync_dist=True)
        if batch_idx % 2:
            self.log("sometimes", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val", loss, sync_dist=True, prog_bar=True)
        self.log("val_step", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("after", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("end", self.trainer.callback_metrics["both_step"] + 1)


class History(pl.Callback):
    """All metrics after every batch, evaluation and epoch."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, float]]] = []

    def _note(self, trainer: pl.Trainer, where: str) -> None:
        for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            found = getattr(trainer, kind)
            self.lines.append((f"{where} {kind}", {k: float(v) for k, v in found.items()}))

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self._note(trainer, "batch")

    def on_validation_end(self, trainer: Any, *args: Any) -> None:
        self._note(trainer, "validation")

    def on_fit_end(self, trainer: Any, *args: Any) -> None:
        self._note(trainer, "end")


def history(
    layout: Mapping[str, Any] | None, devices: int, cls: type[pl.LightningModule]
) -> list[tuple[str, dict[str, float]]]:
    dp, callback = dp_of(devices, layout or {}), History()
    trainer = make_trainer(layout, devices, callbacks=[callback], max_epochs=2)
    evaluation = [loader(samples(16, seed), dp=dp) for seed in (1, 2)]
    trainer.fit(cls(), loader(samples(24), dp=dp), evaluation)
    return callback.lines


def assert_history(ours: Any, plain: Any) -> None:
    assert [where for where, _ in ours] == [where for where, _ in plain]
    for (where, found), (_, expected) in zip(ours, plain, strict=True):
        assert found == pytest.approx(dict(expected), rel=1e-9), where


@pytest.fixture(scope="module")
def plain_history(pool: WorkerPool) -> Any:
    return run(pool, None, history, Talkative)[0]


@pytest.mark.parametrize("layout", SOME)
def test_trap_08_log_means_over_microbatches_and_ranks(
    pool: WorkerPool, plain_history: Any, layout: str
) -> None:
    """Every key, on every rank, at every point where someone may look, as in one process."""
    last = plain_history[-3][1].keys()
    assert {"both_step", "both_epoch", "largest_epoch", "sometimes", "end"} <= last
    for ours in run(pool, layout, history, Talkative):
        assert_history(ours, plain_history)


class RecordingLogger(Logger):
    """Keeps what the Trainer hands to a logger on this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.lines.append((step or 0, dict(metrics)))


class Stopping(Small):
    """Stops, slows down and checkpoints by metrics that only the last stage computes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Falls and then rises, so that something has to be decided.
        value = self.loss(batch) + 0.3 * max(self.current_epoch - 1, 0)
        self.log("val", value, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val"},
        }


def decisions(layout: Mapping[str, Any] | None, devices: int, folder: str) -> dict[str, Any]:
    dp, logger = dp_of(devices, layout or {}), RecordingLogger()
    best = ModelCheckpoint(
        folder, monitor="val", save_top_k=2, filename="{epoch}-{val:.4f}", save_weights_only=True
    )
    stop = EarlyStopping("val", patience=1)
    trainer = make_trainer(
        layout,
        devices,
        max_epochs=9,
        log_every_n_steps=1,
        logger=logger,
        enable_checkpointing=True,
        callbacks=[best, stop, LearningRateMonitor("epoch")],
    )
    trainer.fit(Stopping(), loader(dp=dp), loader(samples(16, 1), dp=dp))
    return {
        "epochs": trainer.current_epoch,
        "stopped": stop.stopped_epoch,
        "best": (best.best_model_path.rpartition("/")[2], float(best.best_model_score or 0)),
        "kept": sorted(path.rpartition("/")[2] for path in best.best_k_models),
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "logged": logger.lines,
    }


@pytest.fixture(scope="module")
def plain_decisions(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(pool, None, decisions, str(tmp_path_factory.mktemp("plain")))[0]


@pytest.mark.parametrize(
    "layout",
    [
        "one process, 4 microbatches",
        pytest.param("pp=2 zbv", marks=pytest.mark.thorough),
        pytest.param("pp=2 x dp=2", marks=pytest.mark.thorough),
    ],
)
def test_trap_06_monitors_decide_alike_on_all_ranks(
    pool: WorkerPool, plain_decisions: Any, layout: str, tmp_path: Any
) -> None:
    """ModelCheckpoint, EarlyStopping, ReduceLROnPlateau and LearningRateMonitor, as in one process.

    Also trap 7: the logger of rank 0, which is on the first stage, gets the last stage's metrics.
    """
    plain = plain_decisions
    assert 2 < plain["epochs"] < 9
    assert plain["lr"] < 0.1
    ranks = run(pool, layout, decisions, str(tmp_path / "ours"))
    for rank, ours in enumerate(ranks):
        for key in ("epochs", "stopped", "lr", "kept"):
            assert ours[key] == pytest.approx(plain[key]), (rank, key)
        assert ours["best"][0] == plain["best"][0]
        assert ours["best"][1] == pytest.approx(plain["best"][1])
    logged = ranks[0]["logged"]
    assert [step for step, _ in logged] == [step for step, _ in plain["logged"]]
    for (_, ours), (_, expected) in zip(logged, plain["logged"], strict=True):
        assert ours == pytest.approx(dict(expected))


class Measured(Small):
    """Keeps torchmetrics objects, updated on the last stage only."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.accuracy = nn.ModuleDict(
            {name: MulticlassAccuracy(num_classes=4, average="macro") for name in ("fit", "val")}
        )
        self.group = MetricCollection({"a": MulticlassAccuracy(4, average="micro")})

    def _measure(self, batch: Any, name: str) -> Tensor:
        output = self.net(batch[0])
        labels = batch[1].argmax(1)
        accuracy = self.accuracy[name]
        accuracy(output.detach(), labels)
        self.log(f"{name}_accuracy", accuracy, on_step=False, on_epoch=True)
        self.group(output.detach(), labels)
        self.log_dict(self.group, on_step=False, on_epoch=True)
        return nn.functional.mse_loss(output, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._measure(batch, "fit")
        self.mean.update(loss.detach(), weight=len(batch[0]))
        self.log("fit_mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._measure(batch, "val")


def epoch_metrics(layout: Mapping[str, Any] | None, devices: int) -> dict[str, float]:
    dp = dp_of(devices, layout or {})
    trainer = make_trainer(layout, devices, max_epochs=2)
    trainer.fit(Measured(), loader(samples(24), dp=dp), loader(samples(16, 1), dp=dp))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.fixture(scope="module")
def plain_metrics(pool: WorkerPool) -> dict[str, float]:
    found: dict[str, float] = run(pool, None, epoch_metrics)[0]
    assert {"fit_accuracy", "val_accuracy", "fit_mean", "a"} <= found.keys()
    return found


@pytest.mark.parametrize("layout", SOME)
def test_metric_objects_cover_the_global_batch(
    pool: WorkerPool, plain_metrics: dict[str, float], layout: str
) -> None:
    for ours in run(pool, layout, epoch_metrics):
        assert ours == pytest.approx(plain_metrics, rel=1e-6)


def test_metric_objects_count_a_tensor_parallel_group_once(
    pool: WorkerPool, plain_metrics: dict[str, float]
) -> None:
    for ours in pool.run(4, epoch_metrics, {"tp": 2}, 4):
        assert ours == pytest.approx(plain_metrics, rel=1e-6)


def world_calls(layout: Mapping[str, Any], devices: int) -> tuple[int, int]:
    trainer = make_trainer(layout, devices)
    loop = trainer.fit_loop.epoch_loop
    broadcasts, agreements = [], []
    votes: Any = trainer.strategy.votes  # type: ignore[attr-defined]
    settle = votes.settle
    votes.settle = lambda: agreements.append(settle())
    kept = type(loop)._broadcast_sigterm_tensor
    type(loop)._broadcast_sigterm_tensor = lambda loop: broadcasts.append(1)  # type: ignore[method-assign]
    try:
        trainer.fit(Small(), loader())
    finally:  # of the worker, which runs other tests, too
        type(loop)._broadcast_sigterm_tensor = kept  # type: ignore[method-assign]
    return len(broadcasts), len(agreements)


def test_trap_10_one_agreement_a_batch_takes_the_place_of_the_broadcast(pool: WorkerPool) -> None:
    """However many microbatches it has."""
    assert pool.run(2, world_calls, {"pp": 2, "num_microbatches": 8}, 2) == [(0, 4), (0, 4)]


class Plateau(Small):
    """Its schedule decides by what each rank has logged of its own samples."""

    def __init__(self, *, sync: bool) -> None:
        super().__init__()
        self.sync = sync

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # Falls on the last rank, where it is large, and rises on the others: their mean falls.
        first = self.trainer.global_rank == 0
        value = self.current_epoch * (1.0 if first else -3.0) + (0.0 if first else 10.0)
        self.log("val", value, sync_dist=self.sync)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val"}


def learning_rate(layout: Mapping[str, Any], *, sync: bool) -> tuple[float, list[str]]:
    trainer = make_trainer(layout, 2, max_epochs=3, num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Plateau(sync=sync), loader(dp=2), loader(dp=2))
    said = [str(w.message) for w in caught if "ReduceLROnPlateau" in str(w.message)]
    return trainer.optimizers[0].param_groups[0]["lr"], said


def test_a_plateau_is_the_same_on_all_ranks(pool: WorkerPool) -> None:
    """Without ``sync_dist=True`` rank 0 alone would see a plateau, and learn more slowly."""
    assert pool.run(2, partial(learning_rate, {"zero": 1}, sync=True)) == [(0.1, [])] * 2
    (first, said), (second, _) = pool.run(2, partial(learning_rate, {"zero": 1}, sync=False))
    assert first == second == 0.1
    [warning] = said
    assert "values from 0 to 10" in warning
    assert "sync_dist=True" in warning


@pytest.mark.parametrize(
    ("found", "mean"),
    [((1.0, 2.0), 1.5), ((0.1, 0.1, 0.1), 0.1), ((torch.inf, -torch.inf), torch.nan)],
)
def test_monitored_values(found: tuple[float, ...], mean: float) -> None:
    """Equal ones stay as they are, bit for bit; nothing is rounded to another format."""
    value = torch.tensor(found[0], dtype=torch.float64)
    shared = MonitoredValues(lambda _: [found]).share("val", value)
    torch.testing.assert_close(
        shared, torch.tensor(mean, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
    )
    assert MonitoredValues(lambda _: [found]).share("val", None) is None
