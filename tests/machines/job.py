"""A training on several machines: ``python -m tests.machines.job JSON``.

Keys of the JSON, all with defaults: ``nodes`` and ``devices`` of Lightning's own launch; ``steps``
and ``pace``, seconds that each takes; ``detector``, options of `HangDetector`; ``every``, steps
between checkpoints; ``fault``, a rank, a step and what befalls it there (`FAULTS`); ``slow``, a
rank that takes so many seconds for its validation and its end.

Every rank prints its steps with the time; rank 0 leaves its weights in ``weights.pt``.
"""

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_megatron import HangDetector, MegatronStrategy, RestartPolicy
from tests.strategy.small import Small, samples, weights

BATCH = 12
"""Of all ranks together; one, two, three or four of them share it."""


def hold_lock() -> None:
    """A C call that keeps Python's lock."""
    ctypes.PyDLL(None).sleep(600)


FAULTS = {
    "sleep": lambda: time.sleep(600),
    "lock": hold_lock,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "skip": lambda: dist.barrier(),  # type: ignore[no-untyped-call]
}


class Shared(Small):
    """Ranks share a batch, however many there are."""

    def __init__(self, slow: list[float]) -> None:
        super().__init__()
        self.slow = slow

    def train_dataloader(self) -> Any:
        strategy: Any = self.trainer.strategy
        return DataLoader(samples(3 * BATCH), strategy.batch_share(BATCH), shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(samples(8), 2)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.dawdle()

    def on_train_end(self) -> None:
        self.dawdle()

    def dawdle(self) -> None:
        if self.slow and self.trainer.global_rank == self.slow[0]:
            time.sleep(self.slow[1])


class Course(pl.Callback):
    """Paces the steps, and says them; commits the fault."""

    def __init__(self, pace: float, fault: list[Any] | None) -> None:
        self.pace, self.fault = pace, fault

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(self.pace)
        if self.fault and [trainer.global_rank, trainer.global_step] == self.fault[:2]:
            print(f"fault at {time.time()}", flush=True)
            FAULTS[self.fault[2]]()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        print(
            f"rank {trainer.global_rank} of {trainer.world_size}, step {trainer.global_step} done "
            f"at {time.time()}",
            flush=True,
        )


def main() -> None:
    options = json.loads(sys.argv[1])
    every = options.get("every", 0)
    callbacks: list[pl.Callback] = [Course(options.get("pace", 0.1), options.get("fault"))]
    if options.get("detector") is not None:
        callbacks.append(HangDetector(**options["detector"]))
    if every:
        callbacks += [
            RestartPolicy(),
            pl.callbacks.ModelCheckpoint(
                dirpath="checkpoints", filename="{step}", every_n_train_steps=every, save_top_k=-1
            ),
        ]
    trainer = pl.Trainer(
        strategy=MegatronStrategy(zero=1),
        accelerator="cpu",
        devices=options.get("devices", 1),
        num_nodes=options.get("nodes", 1),
        precision="64-true",
        max_steps=options.get("steps", 1000),
        max_epochs=-1,
        limit_val_batches=1 if options.get("slow") else 0,
        val_check_interval=3,
        logger=False,
        enable_checkpointing=bool(every),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    pl.seed_everything(7, verbose=False)
    module = Shared(options.get("slow", []))
    trainer.fit(module, ckpt_path="auto" if every else None)
    if trainer.is_global_zero:
        torch.save(weights(module), "weights.pt")
    print(f"finished at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
