"""A training that keeps local checkpoints: ``python -m tests.machines.local_job STEPS PACE_S``.

Every rank prints its steps; rank 0 leaves its weights in ``weights.pt``. Shared checkpoints would
be made every 1000 steps, which is never.
"""

import os
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_megatron import CheckpointConfig, LocalCheckpointConfig, MegatronStrategy
from tests.strategy.small import GLOBAL_BATCH, Small, samples, weights


class Shared(Small):
    """Ranks share a batch, however many there are."""

    def train_dataloader(self) -> Any:
        strategy: Any = self.trainer.strategy
        return DataLoader(samples(), strategy.batch_share(GLOBAL_BATCH), shuffle=True)


class Course(pl.Callback):
    """Paces the steps, and says them."""

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        time.sleep(self.pace_s)
        strategy.checkpoints.local.run.drain()  # so that the one of the step before stands

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        kept = len(os.listdir("/dev/shm/lightning_megatron-0"))
        print(f"step {trainer.global_step} of {trainer.world_size} ranks, {kept} runs", flush=True)


def main() -> None:
    steps, pace_s = int(sys.argv[1]), float(sys.argv[2])
    local = LocalCheckpointConfig(every_n_steps=1)
    trainer = pl.Trainer(
        strategy=MegatronStrategy(zero=1, checkpoint=CheckpointConfig(local=local)),
        accelerator="cpu",
        devices=1,
        precision="64-true",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            Course(pace_s),
            pl.callbacks.ModelCheckpoint("checkpoints", every_n_train_steps=1000),
        ],
    )
    pl.seed_everything(7, verbose=False)
    module = Shared()
    trainer.fit(module, ckpt_path="auto")
    if trainer.is_global_zero:
        torch.save(weights(module), "weights.pt")
    print(f"finished, {os.listdir('/dev/shm/lightning_megatron-0')} left", flush=True)


if __name__ == "__main__":
    main()
