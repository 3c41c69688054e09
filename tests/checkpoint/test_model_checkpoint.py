"""Lightning's ModelCheckpoint as it is, with every kind of layout."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_megatron import PipelineSequential
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.directory.commit import hidden_target
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import WIDTH, Small, dp_of, loader, make_trainer, weights

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"zero": 0},
    "zero 3": {"zero": 3},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
}


class Net(Small):
    """Logs its loss, which goes up and down, and notes the weights of each rank."""

    def __init__(self, breaks_at: int = -1) -> None:
        super().__init__(lr=1.0)
        self.net = PipelineSequential(
            layers=[
                nn.Sequential(
                    ColumnParallelLinear(WIDTH, 8), nn.Tanh(), RowParallelLinear(8, WIDTH)
                )
                for _ in range(2)
            ]
        )
        self.breaks_at = breaks_at
        self.seen: dict[int, tuple[float, dict[str, Tensor]]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("step_loss", loss, sync_dist=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.breaks_at:
            raise ArithmeticError("boom")

    def on_train_batch_end(self, *args: Any) -> None:
        loss = float(self.trainer.callback_metrics["step_loss"])
        self.seen[self.global_step] = loss, weights(self)


def trainer_of(directory: Path, layout: dict[str, Any], steps: int, mode: Any) -> pl.Trainer:
    best = ModelCheckpoint(
        dirpath=directory / "best",
        filename="{step}-{step_loss:.3f}",
        monitor="step_loss",
        save_top_k=2,
        every_n_train_steps=1,
        save_last="link",
    )
    every = ModelCheckpoint(
        dirpath=directory / "every",
        filename="{step}",
        every_n_train_steps=2,
        save_top_k=-1,
        save_last=True,
    )
    crash = ModelCheckpoint(
        dirpath=directory / "crash", filename="{step}", save_on_exception=True, every_n_epochs=99
    )
    return make_trainer(
        {**layout, "checkpoint": CheckpointConfig(mode=mode)},
        2,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[best, every, crash],
        enable_checkpointing=True,
    )


def job(directory: Path, layout: dict[str, Any], mode: str) -> None:
    data = loader(dp=dp_of(2, layout))
    module = Net()
    layout = {**layout, "gather_at_end": False}  # what hooks keep of other stages stays theirs
    trainer = trainer_of(directory, layout, 4, mode)
    trainer.fit(module, data)
    by_loss = sorted(module.seen, key=lambda step: module.seen[step][0])
    best = directory / "best"
    kept = {read_manifest(path).step for path in best.iterdir() if not path.is_symlink()}
    assert {*by_loss[:2]} <= kept <= {*by_loss[:2], 4}
    assert read_manifest((best / "last.ckpt").resolve()).step in kept
    assert sorted(os.listdir(directory / "every")) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt"]
    assert read_manifest(directory / "every" / "last.ckpt").step == 4

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    trainer.test(module, data, ckpt_path="best", verbose=False)
    for name, value in weights(module).items():
        assert torch.equal(value, module.seen[by_loss[0]][1][name]), name

    resumed = trainer_of(directory, layout, 5, mode)
    resumed.fit(Net(), data, ckpt_path="last")
    assert resumed.global_step == 5
    assert str(resumed.ckpt_path).startswith(str(directory))

    broken = trainer_of(directory, layout, 9, mode)
    with pytest.raises(ArithmeticError, match="boom"):
        broken.fit(Net(breaks_at=5), data, ckpt_path="auto")
    assert not [path for path in directory.rglob(".*") if hidden_target(path)]
    last = trainer_of(directory, layout, 6, mode)
    last.fit(Net(), data, ckpt_path="auto")
    assert last.global_step == 6


PAIRS = [("zero 3", "async"), ("pp", "sync")]
OTHERS = [(layout, mode) for layout in LAYOUTS for mode in ("sync", "async")]


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        *PAIRS,
        *(pytest.param(*o, marks=pytest.mark.thorough) for o in OTHERS if o not in PAIRS),
    ],
)
def test_best_last_links_and_exceptions(
    pool: WorkerPool, tmp_path: Path, layout: str, mode: str
) -> None:
    pool.run(2, job, tmp_path, LAYOUTS[layout], mode)
