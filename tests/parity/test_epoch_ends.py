"""What a module computes at the end of an epoch is true on every stage of a pipeline."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

import lightning_megatron
from lightning_megatron import MegatronStrategy, PipelineConfig
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.parity.epoch_ends import WIDTH, ByHand
from tests.parity.jobs import quiet_trainer

Found = tuple[dict[str, Tensor], dict[str, float], dict[str, Any]]


def job(options: dict[str, Any] | str, directory: str) -> Found:
    """Weights, logged values and decisions of a run with callbacks that monitor a value."""
    L.seed_everything(3, verbose=False)
    module = ByHand()
    best = ModelCheckpoint(directory, "{epoch}-{val:.6f}-{acc:.4f}", "val", save_top_k=1)
    stop = EarlyStopping("val", min_delta=0.02, patience=0)
    strategy = options if isinstance(options, str) else MegatronStrategy(**options)
    trainer = quiet_trainer(
        strategy, max_epochs=6, enable_checkpointing=True, callbacks=[best, stop]
    )
    callbacks = len(trainer.callbacks)
    trainer.fit(module)
    assert len(trainer.callbacks) == callbacks
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    decisions = {
        "epochs": trainer.current_epoch,
        "best": Path(best.best_model_path).name,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "temperature": module.temperature,
    }
    return lightning_megatron.gather(module), logged, decisions


@pytest.fixture(scope="module")
def alone(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What plain Lightning gives."""
    found: Found = pool.run(1, job, "auto", str(tmp_path_factory.mktemp("plain")))[0]
    assert 1 < found[2]["epochs"] < 6, "early stopping has to decide something"
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp": (2, {"pp": 2}),
    "V": (2, {"pp": 2, "schedule": "zbv", "pipeline": PipelineConfig(partition=[1, 1, 1, 1])}),
    "pp and tp": (4, {"pp": 2, "tp": 2, "num_microbatches": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_epoch_ends_are_those_of_plain_lightning(
    pool: WorkerPool, alone: Found, tmp_path: Path, layout: str
) -> None:
    weights, logged, decisions = alone
    without_logits = {name: value for name, value in logged.items() if name != "logits"}
    ranks, options = LAYOUTS[layout]
    found = pool.run(ranks, job, options, str(tmp_path))
    for ours, ours_logged, ours_decisions in found:
        assert ours_decisions == decisions
        # A MeanMetric adds in float32.
        assert ours_logged.pop("logits") == pytest.approx(logged["logits"], abs=1e-7)
        assert ours_logged == pytest.approx(without_logits, abs=1e-10)
        for name, value in weights.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)


class CallsTrunk(ByHand):
    def on_train_epoch_end(self) -> None:
        self.trunk(torch.zeros(1, WIDTH, dtype=torch.float64))


def trunk_job() -> None:
    """Call the trunk where it cannot be."""
    quiet_trainer(MegatronStrategy(pp=2)).fit(CallsTrunk())


def test_a_trunk_in_parts_is_not_called_outside_of_a_step(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"called outside of a step.*train with pp=1"):
        pool.run(2, trunk_job)
