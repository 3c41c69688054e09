"""validate, test and predict run on any layout, alone, before and after fit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn

from lightning_megatron import PipelineSequential
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import (
    WIDTH,
    Small,
    assert_same,
    dp_of,
    loader,
    make_trainer,
    merged,
    run,
    samples,
    weights,
)


class Evaluated(Small):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self.loss(batch)
        self.log("val", loss, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(batch)
        self.log("test", loss, sync_dist=True)
        return {"loss": loss}

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        output = self.net(batch[0])
        names = [f"{x:.3f}" for x in batch[0][:, 0].tolist()]
        return {"output": output, "names": names, "pair": (output[:, 0], output.argmax(1))}


def evaluate(layout: Mapping[str, Any] | None, devices: int) -> dict[str, Any]:
    """All results in the order of a user's script."""
    dp, module = dp_of(devices, layout or {}), Evaluated()
    # Not a multiple of anything: a last batch of 5, cut into unequal microbatches.
    one, two = (loader(samples(21, seed), dp=dp) for seed in (1, 2))
    trainer = make_trainer(layout, devices)
    results: dict[str, Any] = {
        "predict first": trainer.predict(module, one),
        "validate": trainer.validate(module, [one, two], verbose=False),
    }
    trainer.fit(module, loader(dp=dp), one)
    results["weights"] = weights(module)
    results["test"] = trainer.test(module, two, verbose=False)
    results["predict"] = trainer.predict(module, [one, two])
    trainer.fit_loop.epoch_progress.reset()
    results["validate again"] = trainer.validate(module, one, verbose=False)
    return results


def _rows(predictions: Any) -> list[tuple[str, list[float]]]:
    """Every sample's name and output, of a list over loaders of lists over batches."""
    batches = predictions if isinstance(predictions[0], dict) else sum(predictions, [])
    rows = []
    for batch in batches:
        assert len(batch["names"]) == len(batch["output"]) == len(batch["pair"][1])
        torch.testing.assert_close(batch["pair"][0], batch["output"][:, 0])
        rows += list(zip(batch["names"], batch["output"].tolist(), strict=True))
    return rows


@pytest.fixture(scope="module")
def plain(pool: WorkerPool) -> Any:
    return run(pool, None, evaluate)[0]


@pytest.mark.parametrize(
    "layout",
    ["one process, 4 microbatches", pytest.param("pp=2", marks=pytest.mark.thorough), "pp=2 zbv"],
)
def test_evaluation_equals_one_process(pool: WorkerPool, plain: Any, layout: str) -> None:
    ranks = run(pool, layout, evaluate)
    assert_same(merged([rank["weights"] for rank in ranks]), plain["weights"])
    for ours in ranks:  # on every rank, also those without the last stage
        for name in ("validate", "test", "validate again"):
            assert len(ours[name]) == len(plain[name])
            for found, expected in zip(ours[name], plain[name], strict=True):
                assert found == pytest.approx(expected, rel=1e-10)
        for name in ("predict first", "predict"):
            found, expected = _rows(ours[name]), _rows(plain[name])
            assert [row[0] for row in found] == [row[0] for row in expected]
            for (_, row), (_, wanted) in zip(found, expected, strict=True):
                assert row == pytest.approx(wanted, rel=1e-10)


def predict(layout: Mapping[str, Any], devices: int) -> Any:
    dp = dp_of(devices, layout)
    data = [loader(samples(21, seed), dp=dp) for seed in (1, 2)]
    return make_trainer(layout, devices).predict(Evaluated(), data)


def test_predictions_of_all_batch_ranks_are_complete(pool: WorkerPool, plain: Any) -> None:
    ranks = run(pool, "pp=2 x dp=2", predict)
    for stage in (0, 1):
        rows = _rows(ranks[2 * stage]) + _rows(ranks[2 * stage + 1])
        assert sorted(name for name, _ in rows) == sorted(
            name for name, _ in _rows(plain["predict"])
        )


class Writer(BasePredictionWriter):
    """Writes as the documentation of Lightning shows, one file per batch."""

    def __init__(self, folder: Path) -> None:
        super().__init__("batch_and_epoch")
        self.folder = folder

    def write_on_batch_end(
        self,
        trainer: Any,
        pl_module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        path = self.folder / f"{trainer.global_rank}-{batch_idx}.pt"
        torch.save((prediction["output"], batch_indices), path)

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        torch.save((len(predictions), batch_indices), self.folder / f"{trainer.global_rank}.pt")


def write(layout: Mapping[str, Any], devices: int, folder: Path) -> None:
    trainer = make_trainer(layout, devices, callbacks=[Writer(folder)])
    data = loader(samples(16), dp=dp_of(devices, layout))
    trainer.predict(Evaluated(), data, return_predictions=False)


def test_prediction_writers_get_outputs_and_indices_on_every_rank(
    pool: WorkerPool, tmp_path: Path
) -> None:
    run(pool, "pp=2 x dp=2", write, tmp_path)
    for rank in range(4):
        wanted = [[i for i in range(start, start + 8) if i % 2 == rank % 2] for start in (0, 8)]
        assert torch.load(tmp_path / f"{rank}.pt") == (2, [wanted])
        for batch, indices in enumerate(wanted):
            output, found = torch.load(tmp_path / f"{rank}-{batch}.pt")
            assert found == indices
            assert output.shape == (4, WIDTH)


class Normalised(Small):
    """Statistics of the batch, kept over steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = PipelineSequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
        )


def normalise(
    layout: Mapping[str, Any] | None, devices: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = Normalised()
    trainer = make_trainer(layout, devices, sync_batchnorm=layout is not None)
    trainer.fit(module, loader(dp=dp_of(devices, layout or {})))
    return weights(module), {name: b.clone() for name, b in module.named_buffers()}


@pytest.fixture(scope="module")
def normalised(pool: WorkerPool) -> Any:
    return pool.run(1, normalise, None, 1)[0]


@pytest.mark.parametrize(
    ("devices", "layout"), [(2, {}), (2, {"tp": 2}), (4, {"pp": 2, "num_microbatches": 1})]
)
def test_sync_batchnorm_takes_the_statistics_of_the_global_batch(
    pool: WorkerPool, normalised: Any, devices: int, layout: dict[str, Any]
) -> None:
    plain, plain_buffers = normalised
    ranks = pool.run(devices, normalise, layout, devices)
    assert_same(merged([rank[0] for rank in ranks]), plain)
    assert_same(merged([rank[1] for rank in ranks]), plain_buffers)


def test_one_process_keeps_the_inference_mode_that_it_was_given() -> None:
    trainer = make_trainer({})
    trainer.validate_loop.inference_mode = False
    for evaluation in (trainer.validate, trainer.test):
        evaluation(Evaluated(), loader(), verbose=False)
    assert not trainer.validate_loop.inference_mode
    assert trainer.test_loop.inference_mode


class Averaged(Small):
    """Logs a mean and a sum over validation samples."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.loss(batch), sync_dist=True)
        count = torch.tensor(float(len(batch[0])))
        self.log("count", count, sync_dist=True, reduce_fx="sum")

    test_step = validation_step


def averages(layout: Mapping[str, Any] | None, devices: int, count: int) -> list[dict[str, float]]:
    """In fit, in validate and in test, of the same weights."""
    dp = dp_of(devices, layout or {})
    data = loader(samples(count, seed=1), dp=dp)
    module = Averaged(lr=0.0)
    trainer = make_trainer(layout, devices)
    trainer.fit(module, loader(dp=dp), data)
    found = [dict(trainer.callback_metrics)]
    found += trainer.validate(module, data, verbose=False)
    found += trainer.test(module, data, verbose=False)
    return [{key: float(value) for key, value in each.items()} for each in found]


@pytest.fixture(scope="module")
def averaged(pool: WorkerPool) -> Any:
    return pool.run(1, averages, None, 1, 17)[0]


@pytest.mark.parametrize(
    ("devices", "layout"),
    [(2, {"zero": 3}), (4, {"pp": 2}), pytest.param(4, {}, marks=pytest.mark.thorough)],
    ids=str,
)
def test_uneven_samples_are_evaluated_once_each(
    pool: WorkerPool, averaged: Any, devices: int, layout: dict[str, Any]
) -> None:
    for found in pool.run(devices, averages, layout, devices, 17):
        for ours in found:
            assert ours == pytest.approx(averaged[0], rel=1e-10)
