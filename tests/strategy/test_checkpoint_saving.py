"""Saving during training: what callbacks, loops and endings do with a save in flight."""

import json
import logging
import os
import signal
import time
import uuid
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_megatron import load_from_checkpoint
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.directory.commit import remove
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint, read_manifest
from lightning_megatron.checkpoint.directory.storage import RemotePath
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.strategy.small import Small, assert_same, loader, make_trainer, weights

STEPS = 4
ASYNC = CheckpointConfig(mode="async")


class Adaptive(Small):
    """With state in the optimizer."""

    fails_at: int | None = None
    slow_to_step = 0.0

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.fails_at:
            raise ArithmeticError("boom")
        return super().training_step(batch, batch_idx)


def slow_down(patch: pytest.MonkeyPatch, seconds: float, *, error: OSError | None = None) -> None:
    """Have every file written late, or not at all."""
    write = FileSystemWriter.write_data

    def late(*args: Any) -> Any:
        time.sleep(seconds)
        if error is not None:
            raise error
        return write(*args)

    patch.setattr(FileSystemWriter, "write_data", late)


def saving(directory: Path, **options: Any) -> ModelCheckpoint:
    options = {"every_n_train_steps": 1, "save_top_k": -1, "filename": "{step}", **options}
    return ModelCheckpoint(dirpath=directory, **options)


def fit(
    devices: int,
    config: CheckpointConfig,
    callbacks: list[pl.Callback],
    module: Adaptive | None = None,
    resume: str | None = None,
    **options: Any,
) -> pl.Trainer:
    layout = {"zero": 2, "checkpoint": config} if devices > 1 else {"checkpoint": config}
    trainer = make_trainer(
        layout,
        devices,
        max_steps=STEPS,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        **options,
    )
    trainer.fit(module or Adaptive(), loader(dp=devices), ckpt_path=resume)
    return trainer


MODES = {
    "sync": CheckpointConfig(mode="sync"),
    "async": ASYNC,
}


def all_modes_job(directory: Path) -> None:
    for mode, config in MODES.items():
        with pytest.MonkeyPatch.context() as patch:
            if mode != "sync":
                slow_down(patch, 0.03)  # training goes on meanwhile
            pl.seed_everything(1, verbose=False)
            fit(2, config, [saving(directory / mode, save_last=True)])


def test_async_saves_what_sync_saves(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, all_modes_job, tmp_path)
    names = [*(f"step={step}.ckpt" for step in range(1, STEPS + 1)), "last.ckpt"]
    for mode in MODES:
        assert sorted(os.listdir(tmp_path / mode)) == sorted(names)
    for name in names:
        sync, later = (tmp_path / mode / name for mode in ("sync", "async"))
        shards = [
            {n: e for n, e in read_manifest(path).files.items() if n.endswith(".distcp")}
            for path in (sync, later)
        ]
        assert shards[0] == shards[1]
        assert all(entry.sha256 for entry in shards[0].values())
        states = [(path / "state.json").read_text() for path in (sync, later)]
        assert json.loads(states[0]) == json.loads(states[1].replace("/async", "/sync"))


def resume_job(directory: Path, resume: bool) -> dict[str, torch.Tensor]:
    pl.seed_everything(1, verbose=False)
    callbacks = [] if resume else [saving(directory)]
    path = str(directory / "step=2.ckpt") if resume else None
    trainer = fit(2, ASYNC, callbacks, resume=path)
    assert trainer.global_step == STEPS
    assert trainer.lightning_module is not None
    return weights(trainer.lightning_module)


def test_resume(pool: WorkerPool, tmp_path: Path) -> None:
    whole, resumed = (pool.run(2, resume_job, tmp_path, resume) for resume in (False, True))
    for ours, expected in zip(resumed, whole, strict=True):
        assert_same(ours, expected)


def best_job(directory: Path) -> None:
    callback = saving(directory, save_top_k=1, save_last=True)
    with pytest.MonkeyPatch.context() as patch:
        slow_down(patch, 0.05)
        trainer = fit(1, ASYNC, [callback])
    assert sorted(os.listdir(directory)) == ["last.ckpt", f"step={STEPS}.ckpt"]
    assert callback.best_model_path == f"{directory}/step={STEPS}.ckpt"
    module = trainer.lightning_module
    trained = weights(module)
    assert_same(load_full_state_dict(callback.best_model_path), trained)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    module.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    trainer.test(module, loader(), ckpt_path="best", verbose=False)
    assert_same(weights(module), trained)
    trainer.save_checkpoint(directory / "after.ckpt")
    assert is_checkpoint(directory / "after.ckpt")


def test_best_ones_last_one_test_of_the_best_and_one_afterwards(
    pool: WorkerPool, tmp_path: Path
) -> None:
    pool.run(1, best_job, tmp_path)


class HalfFrozen(Adaptive):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.net.layers[:2].parameters():
            parameter.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def incremental_job(directory: Path, mode: str) -> dict[str, torch.Tensor]:
    config = CheckpointConfig(mode=mode, incremental=True, keep=2)  # type: ignore[arg-type]
    fit(2, config, [saving(directory, save_last=True)], HalfFrozen())
    remove(directory / f"step={STEPS}.ckpt") if int(os.environ["RANK"]) == 0 else None
    callbacks: list[pl.Callback] = [saving(directory, every_n_train_steps=2, save_top_k=1)]
    trainer = fit(2, config, callbacks, HalfFrozen(), str(directory / f"step={STEPS - 1}.ckpt"))
    assert trainer.lightning_module is not None
    return weights(trainer.lightning_module)


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.thorough), "async"])
def test_frozen_layers_are_written_once_and_outlive_the_first(
    pool: WorkerPool, tmp_path: Path, mode: str
) -> None:
    trained = pool.run(2, incremental_job, tmp_path, mode)[0]
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=3.ckpt", "step=4.ckpt"]
    frozen = {}
    for name in os.listdir(tmp_path):
        manifest = read_manifest(tmp_path / name)
        parts = [manifest.part(tmp_path / name, number) for number in manifest.writers]
        places = {n: c.file for part in parts for n, chunks in part.items() for c in chunks}
        frozen[name] = {file for n, file in places.items() if n.startswith("model.net.layers.0")}
        assert frozen[name] <= set(manifest.linked)
        assert places["model.net.layers.3.0.weight"] not in manifest.linked or name == "last.ckpt"
    assert len({frozenset(files) for files in frozen.values()}) == 1  # after the resume too
    assert_same(load_full_state_dict(tmp_path / f"step={STEPS}.ckpt"), trained)


class Worsening(Adaptive):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("score", -float(batch_idx))
        return super().training_step(batch, batch_idx)


def keep_job(directory: Path) -> None:
    for mode in ("sync", "async"):
        best = saving(directory / mode, monitor="score", mode="max", save_top_k=1)
        turns = saving(directory / mode, filename="turn-{step}", save_last=True)
        config = CheckpointConfig(mode=mode, keep=2)  # type: ignore[arg-type]
        trainer = fit(2, config, [best, turns], Worsening())
        trainer.save_checkpoint(directory / mode / "turn-mine.ckpt")
        assert best.best_model_path == str(directory / mode / "step=1.ckpt")


def test_keep_leaves_the_newest_and_what_callbacks_hold(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, keep_job, tmp_path)
    turns = [f"turn-step={step}.ckpt" for step in (STEPS - 1, STEPS)]
    for mode in ("sync", "async"):
        left = ["last.ckpt", "step=1.ckpt", "turn-mine.ckpt", *turns]
        assert sorted(os.listdir(tmp_path / mode)) == sorted(left)


def store_job() -> None:
    whole = fit(1, CheckpointConfig(), [], Stored()).lightning_module
    for mode in ("sync", "async"):
        place = f"memory://{uuid.uuid4().hex}/checkpoints"
        config = CheckpointConfig(mode=mode, keep=2)  # type: ignore[arg-type]
        callback = ModelCheckpoint(
            dirpath=place, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=True
        )
        fit(1, config, [callback], Stored())
        found = sorted(entry.name for entry in RemotePath(place).iterdir())
        assert found == ["last.ckpt", f"step={STEPS - 1}.ckpt", f"step={STEPS}.ckpt"]
        for name in found[::2]:  # back to the one before
            remove(RemotePath(place) / name)
        again = ModelCheckpoint(dirpath=place, save_top_k=1, every_n_train_steps=1)
        trainer = fit(1, config, [again], Stored(), resume="auto")
        assert again.best_model_path == f"{place}/epoch=0-step={STEPS}.ckpt"
        assert_same(weights(trainer.lightning_module), weights(whole))
        trainer.save_checkpoint(f"{place}/mine.ckpt")
        assert_same(weights(load_from_checkpoint(Stored, f"{place}/mine.ckpt")), weights(whole))
        rooted = fit(1, config, [], Stored(), resume="auto", default_root_dir=place)
        assert rooted.ckpt_path == f"{place}/mine.ckpt"


class Stored(Adaptive):
    def __init__(self) -> None:
        super().__init__()
        self.double()


def test_checkpoints_in_a_store(pool: WorkerPool) -> None:
    pool.run(1, store_job)


class LooksAtLast(pl.Callback):
    def __init__(self, directory: Path) -> None:
        self.path, self.seen = directory / "last.ckpt", 0

    def on_train_batch_start(self, *args: Any) -> None:
        if os.path.lexists(self.path):
            self.seen += 1
            assert is_checkpoint(self.path)


def link_job(directory: Path) -> None:
    look = LooksAtLast(directory)
    with pytest.MonkeyPatch.context() as patch:
        slow_down(patch, 0.02)
        with pytest.warns(UserWarning, match="save_last='link'"):
            fit(1, ASYNC, [saving(directory, save_top_k=1, save_last="link"), look])
    assert look.seen == STEPS - 1


def test_a_link_never_points_to_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, link_job, tmp_path)
    assert os.readlink(tmp_path / "last.ckpt") == f"step={STEPS}.ckpt"
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", f"step={STEPS}.ckpt"]


def exception_job(directory: Path, rank: int) -> None:
    module = Adaptive()
    with pytest.MonkeyPatch.context() as patch:
        slow_down(patch, 0.1)
        if int(os.environ["RANK"]) == rank:
            module.fails_at = 2
        fit(2, ASYNC, [saving(directory)], module)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_drains_what_is_in_flight(pool: WorkerPool, tmp_path: Path, rank: int) -> None:
    with pytest.raises(WorkerError, match="boom"):
        pool.run(2, exception_job, tmp_path, rank)
    assert sorted(os.listdir(tmp_path)) == ["step=1.ckpt", "step=2.ckpt"]
    for name in os.listdir(tmp_path):
        assert load_full_state_dict(tmp_path / name)


class EndsItself(Adaptive):
    """Is told to end while the checkpoint of its second step is being written."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def sigterm_job(directory: Path) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        slow_down(patch, 0.2)
        with pytest.raises(SIGTERMException):
            fit(1, ASYNC, [saving(directory)], EndsItself())
    return True


def test_sigterm_drains_what_is_in_flight(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(1, sigterm_job, tmp_path) == [True]
    names = os.listdir(tmp_path)
    assert {"step=1.ckpt", "step=2.ckpt"} <= set(names)
    for name in names:
        assert load_full_state_dict(tmp_path / name)


def slow_disk_job(directory: Path) -> list[str]:
    """Every save takes longer than the step between two."""
    with pytest.MonkeyPatch.context() as patch:
        in_flight, most = [0], [0]
        write = FileSystemWriter.write_data

        def late(*args: Any) -> Any:
            in_flight[0] += 1
            most[0] = max(most[0], in_flight[0])
            time.sleep(0.1)
            in_flight[0] -= 1
            return write(*args)

        patch.setattr(FileSystemWriter, "write_data", late)
        for policy in ("wait", "supersede"):
            config = CheckpointConfig(mode="async", when_busy=policy)  # type: ignore[arg-type]
            fit(1, config, [saving(directory / policy)])
        assert most == [1]
    return sorted(os.listdir(directory / "wait"))


def test_saves_that_take_longer_than_steps(pool: WorkerPool, tmp_path: Path) -> None:
    (names,) = pool.run(1, slow_disk_job, tmp_path)
    assert names == [f"step={step}.ckpt" for step in range(1, STEPS + 1)]
    # The last one is never given up, and of two neighbours at most one.
    superseded = os.listdir(tmp_path / "supersede")
    assert f"step={STEPS}.ckpt" in superseded
    assert len(superseded) >= STEPS // 2


def failure_job(directory: Path, on_error: str) -> tuple[int, list[str], str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lightning_megatron.checkpoint.save.saver")
    log.addHandler(handler)
    config = CheckpointConfig(mode="async", on_error=on_error)  # type: ignore[arg-type]
    module, message = Adaptive(), ""
    callback = saving(directory, every_n_train_steps=2)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if int(os.environ["RANK"]) == 1:
                slow_down(patch, 0, error=OSError(30, "Read-only file system"))
            fit(2, config, [callback], module)
    except CheckpointError as error:
        message = str(error)
    finally:
        log.removeHandler(handler)
    return module.global_step, records, message


def test_training_goes_on_after_failures(pool: WorkerPool, tmp_path: Path) -> None:
    (steps, records, message), other = pool.run(2, failure_job, tmp_path, "continue")
    assert other == (STEPS, [], "")
    assert (steps, message) == (STEPS, "")
    assert len(records) == 3
    assert records[2] == "nothing was saved in this run: every save has failed"
    assert "step=2.ckpt" in records[0]
    assert "rank 1: " in records[0]
    assert "[Errno 30] Read-only file system" in records[0]
    assert os.listdir(tmp_path) == []


def test_training_ends_after_a_failure_on_all_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    (steps, records, message), other = pool.run(2, failure_job, tmp_path, "raise")
    assert other == (steps, [], message)
    assert 2 <= steps <= STEPS
    assert "[Errno 30]" in message
    assert os.listdir(tmp_path) == []


def test_wrong_options_are_reported_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="mode='later'"):
        fit(1, CheckpointConfig(mode="later"), [])  # type: ignore[arg-type]
