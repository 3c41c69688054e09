"""`ckpt_path="auto"` and "last" through the Trainer."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.testing import WorkerPool
from tests.checkpoint.damage import flip
from tests.strategy.small import Small, loader, make_trainer


def fit(
    directory: Path | None,
    steps: int,
    ckpt_path: str | None = "auto",
    devices: int = 1,
    **options: Any,
) -> Any:
    """Train to a number of steps with a checkpoint for each; return the Trainer."""
    save = ModelCheckpoint(
        dirpath=directory, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True
    )
    trainer = make_trainer(
        {"zero": 1},
        devices,
        max_steps=steps,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=[save],
        **options,
    )
    trainer.fit(Small(), loader(dp=devices), ckpt_path=ckpt_path)
    return trainer


def test_auto_starts_fresh_then_goes_on_from_the_newest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        first = fit(tmp_path / "runs", 2, default_root_dir=tmp_path)
    assert f"no checkpoint in {tmp_path}/runs, {tmp_path}; starting from scratch" in caplog.text
    assert "Restored all states" not in caplog.text
    assert first.global_step == 2
    caplog.clear()
    with caplog.at_level(logging.INFO):
        second = fit(tmp_path / "runs", 3, default_root_dir=tmp_path)
    assert f"Restored all states from the checkpoint at {tmp_path}/runs/last.ckpt" in caplog.text
    assert second.global_step == 3
    assert sorted(os.listdir(tmp_path / "runs")) == [
        *("last.ckpt", "step=1.ckpt", "step=2.ckpt", "step=3.ckpt")
    ]


def test_what_is_no_directory_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    """A run would begin anew, though it has checkpoints somewhere."""
    (tmp_path / "runs").touch()
    with pytest.raises((CheckpointError, ConfigError), match="runs is no (folder|directory)"):
        fit(tmp_path / "runs", 1, default_root_dir=tmp_path)


@pytest.mark.parametrize("ckpt_path", ["auto", "last"])
def test_damaged_ones_are_passed_over(
    tmp_path: Path, ckpt_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, 3)
    for name in ("last.ckpt", "step=3.ckpt"):
        flip(tmp_path / name / "__0_0.distcp", 5000)
    resumed = fit(tmp_path, 4, ckpt_path)
    assert resumed.ckpt_path == str(tmp_path / "step=2.ckpt")
    assert resumed.global_step == 4
    assert caplog.text.count("the content has SHA-256") == 2
    assert (tmp_path / "last.ckpt.corrupt").is_dir()
    assert (tmp_path / "step=3.ckpt.corrupt").is_dir()
    assert fit(tmp_path, 5, "last").global_step == 5


@pytest.mark.parametrize("ckpt_path", ["auto", "last"])
def test_all_damaged_stops_with_the_list(tmp_path: Path, ckpt_path: str) -> None:
    fit(tmp_path, 1)
    for path in tmp_path.iterdir():
        flip(path / "state.json", 50)
    with pytest.raises(CheckpointError, match=r"every checkpoint is damaged(.|\n)*step=1.ckpt.co"):
        fit(tmp_path, 2, ckpt_path)


def test_path_that_names_one_gets_no_other(tmp_path: Path) -> None:
    fit(tmp_path, 2)
    flip(tmp_path / "step=2.ckpt" / "state.json", 50)
    with pytest.raises(CheckpointError, match=r"step=2.ckpt: damaged: state.json"):
        fit(tmp_path, 3, str(tmp_path / "step=2.ckpt"))
    assert (tmp_path / "step=2.ckpt").is_dir()


def test_auto_looks_into_all_versions_of_the_logger(tmp_path: Path) -> None:
    def run(steps: int) -> Any:
        return fit(None, steps, logger=CSVLogger(tmp_path, name="mine"), default_root_dir=tmp_path)

    run(2)
    resumed = run(3)
    assert resumed.ckpt_path == f"{tmp_path}/mine/version_0/checkpoints/last.ckpt"
    assert resumed.global_step == 3
    assert (tmp_path / "mine" / "version_1" / "checkpoints" / "last.ckpt").is_dir()
    resumed.save_checkpoint(tmp_path / "by_hand.ckpt")
    assert run(4).ckpt_path == str(tmp_path / "by_hand.ckpt")


def test_auto_spares_the_one_it_started_from(tmp_path: Path) -> None:
    def run(steps: int) -> Any:
        save = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1)
        options: dict[str, Any] = {"max_steps": steps, "max_epochs": -1, "callbacks": [save]}
        trainer = make_trainer({"zero": 1}, enable_checkpointing=True, **options)
        trainer.fit(Small(), loader(), ckpt_path="auto")

    run(1)
    run(3)
    assert sorted(os.listdir(tmp_path)) == ["step=1.ckpt", "step=3.ckpt"]


def test_auto_evaluates_the_newest_and_never_random_weights(tmp_path: Path) -> None:
    class Validated(Small):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("step_loss", self.loss(batch))

    def validate() -> Any:
        options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
        trainer = make_trainer({"zero": 1}, **options)
        return trainer.validate(Validated(), loader(), ckpt_path="auto", verbose=False)

    with pytest.raises(ConfigError, match="ckpt_path='auto': there is no checkpoint in"):
        validate()
    before = make_trainer({"zero": 1}, enable_checkpointing=True).validate(
        Validated(), loader(), verbose=False
    )
    fit(tmp_path / "checkpoints", 3)
    assert validate()[0]["step_loss"] < before[0]["step_loss"]


def two_ranks(directory: Path) -> tuple[int, str]:
    trainer = fit(directory, 3, devices=2)
    return trainer.global_step, str(trainer.ckpt_path)


def test_ranks_start_from_the_same_one(pool: WorkerPool, tmp_path: Path) -> None:
    fit(tmp_path, 2)
    flip(tmp_path / "last.ckpt" / "manifest.json", 999)
    assert pool.run(2, two_ranks, tmp_path) == [(3, str(tmp_path / "step=2.ckpt"))] * 2
