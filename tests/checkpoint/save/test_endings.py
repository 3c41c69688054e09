"""A run that ends, however it ends, with a save in flight: whole and right, or not there."""

import contextlib
import os
import random
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.directory.commit import hidden_target
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.checkpoint.offline.export import load_full_state_dict
from lightning_megatron.strategy import checkpointing
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.strategy.small import Small, loader, make_trainer, weights

STEPS = 3
BREAKS_AT = 2
ENDINGS = ("at its end", "by an error", "by an interrupt", "on request", "by an error, saving")
_BREAKS = (ArithmeticError, KeyboardInterrupt, SystemExit)


class Ending(pl.Callback):
    """Ends the run after some steps, and notes what the weights were after each."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seen: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == BREAKS_AT and "error" in self.kind:
            raise ArithmeticError("boom")
        if trainer.global_step == BREAKS_AT and "interrupt" in self.kind:
            raise KeyboardInterrupt

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        self.seen[trainer.global_step] = weights(module)
        if trainer.global_step == BREAKS_AT and "request" in self.kind:
            trainer.should_stop = True


def run(
    directory: Path, ending: Ending, supersede: bool = False, mode: Any = "async", every: int = 1
) -> None:
    save = ModelCheckpoint(
        dirpath=directory,
        filename="{step}",
        every_n_train_steps=every,
        save_top_k=-1,
        save_on_exception="saving" in ending.kind,
    )
    config = CheckpointConfig(mode=mode, when_busy="supersede" if supersede else "wait")
    trainer = make_trainer(
        {"zero": 2, "checkpoint": config},
        2,
        max_steps=STEPS,
        min_epochs=0,
        callbacks=[ending, save],
        enable_checkpointing=True,
    )
    trainer.fit(Small(), loader(dp=2))


def endings_job(base: Path, runs: int) -> None:
    chosen = random.Random(int(os.environ["RANK"]))  # every rank writes at a pace of its own
    write = FileSystemWriter.write_data

    def late(*args: Any) -> Any:
        time.sleep(chosen.random() * 0.04)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", late)
        for number in range(runs):
            kind, directory = ENDINGS[number % len(ENDINGS)], base / str(number)
            supersede = number % 2 == 1
            ending = Ending(kind)
            expected = () if kind in ("at its end", "on request") else _BREAKS
            with pytest.raises(expected) if expected else contextlib.nullcontext():
                run(directory, ending, supersede)
            torch.distributed.barrier()
            assert not [path for path in directory.iterdir() if hidden_target(path)]
            found = {read_manifest(path).step: path for path in directory.iterdir()}
            last = STEPS if kind == "at its end" else BREAKS_AT
            assert max(step or 0 for step in found) == last
            assert supersede or len(found) == last
            for step, path in found.items():
                stored, expected = load_full_state_dict(path), ending.seen[step or 0]
                assert stored.keys() == expected.keys()
                for name, value in expected.items():
                    assert torch.equal(stored[name], value), (kind, step, name)


@pytest.mark.parametrize("runs", [5, pytest.param(10, marks=pytest.mark.thorough)])
def test_endings_with_a_save_in_flight(pool: WorkerPool, tmp_path: Path, runs: int) -> None:
    """Each kind; twice with every way to deal with a save in flight."""
    pool.run(2, endings_job, tmp_path, runs)


def alone_job(base: Path, mode: str) -> None:
    """One rank fails, its peers wait for it in a collective of training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointing, "PATIENCE_S", 0.3)
        kind = "by an error, saving" if os.environ["RANK"] == "1" else "at its end"
        run(base, Ending(kind), mode=mode, every=STEPS + 1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rank_that_fails_alone_does_not_wait_to_save(
    pool: WorkerPool, tmp_path: Path, mode: str
) -> None:
    with pytest.raises(WorkerError, match="boom") as info:
        pool.run(2, alone_job, tmp_path, mode)
    assert info.value.rank == 1
    assert info.value.failures[0].summary == "ArithmeticError: boom"  # and no error of the save
    assert not os.listdir(tmp_path)
