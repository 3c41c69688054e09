"""Runs whose ranks are on nodes of their own: each has a directory that only its ranks see."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_megatron import CheckpointConfig, LocalCheckpointConfig
from tests.strategy.resuming import GLOBAL_BATCH, Augmented, Curve, Noisy
from tests.strategy.small import dp_of, make_trainer

DISK = "NODE_DISK"


class Crash(Exception):
    """What ends a run without a word."""


class Patience(pl.Callback):
    """Lets every local checkpoint be finished before the next batch; ends a run after a step."""

    def __init__(self, crash: int | None) -> None:
        self.crash = crash

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.checkpoints.local.run.drain()
        if trainer.global_step == self.crash:
            raise Crash


def disk(root: Path, node: int) -> Path:
    return root / f"node{node}"


def checkpoints(root: Path, node: int) -> list[Path]:
    """What a node has, the newest last."""
    return sorted(disk(root, node).glob("*/step=*.ckpt"), key=lambda path: path.name)


def lose(root: Path, node: int) -> None:
    shutil.rmtree(disk(root, node))


def train(
    root: Path,
    nodes: Sequence[int],
    layout: dict[str, Any],
    *,
    crash: int | None = None,
    shared_every: int | None = None,
    every: int | None = 1,
    module: type[pl.LightningModule] = Noisy,
    seed: int = 7,
    ckpt_path: str | None = "auto",
    more: Sequence[pl.Callback] = (),
    mode: Any = "sync",
    **local: Any,
) -> tuple[dict[tuple[int, int], Any], str | None]:
    """Train for six steps on ranks that are on these nodes; the curve, and where it began.

    Args:
        root: of all directories.
        nodes: that of each rank.
        layout: of the ranks.
        crash: step after which the run ends.
        shared_every: steps between two shared checkpoints.
        every: steps between two local ones.
        module: what is trained.
        seed: which another process has another of.
        ckpt_path: of the Trainer.
        more: further callbacks.
        mode: of saving.
        local: further options.
    """
    os.environ[DISK] = str(disk(root, nodes[int(os.environ["RANK"])]))
    pl.seed_everything(seed, verbose=False)
    curve = Curve()
    callbacks: list[pl.Callback] = [curve, Patience(crash), *more]
    if shared_every is not None:
        callbacks.append(
            ModelCheckpoint(root / "shared", "{step}", every_n_train_steps=shared_every)
        )
    options = LocalCheckpointConfig(every_n_steps=every, directory=f"${DISK}", **local)
    save = CheckpointConfig(mode=mode, local=options)
    world = len(nodes)
    trainer = make_trainer(
        {**layout, "checkpoint": save},
        world,
        callbacks=callbacks,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        enable_checkpointing=shared_every is not None,
        default_root_dir=root / "shared",
    )
    size = GLOBAL_BATCH // dp_of(world, layout)
    loader = DataLoader(Augmented(), batch_size=size, shuffle=True)
    try:
        trainer.fit(module(), loader, ckpt_path=ckpt_path)
    except Crash:
        trainer.strategy.checkpoints.close()  # type: ignore[attr-defined]
    return curve.points, trainer.ckpt_path  # type: ignore[return-value]
