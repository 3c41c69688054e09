"""A training whose ranks kill themselves: ``python -m tests.launched.training JSON``.

Keys of the JSON: ``layout`` and ``world``; ``kills``, a rank and a step for each attempt in turn
(step -1: while it loads); ``steps``; ``policy``, options of `RestartPolicy`. Rank 0 appends
attempt, step, loss and time to ``losses.jsonl``; every rank the addresses that it listens at to
``listening<rank>.json``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import ConnectionConfig, MegatronStrategy, RestartPolicy
from tests.resilience.sockets import listening_addresses
from tests.strategies.small import Small, dp_of, samples


def append(file: str, values: list[Any]) -> None:
    with open(file, "a") as lines:
        lines.write(json.dumps(values) + "\n")


class Kills(pl.Callback):
    """Kills this process where the plan says so."""

    def __init__(self, plan: list[list[int]]) -> None:
        self.plan = plan

    def _maybe(self, trainer: pl.Trainer, step: int) -> None:
        number = trainer.strategy.attempt.number  # type: ignore[attr-defined]
        if number < len(self.plan) and self.plan[number] == [trainer.global_rank, step]:
            append("kills.jsonl", [number, trainer.global_rank, time.time()])
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._maybe(trainer, -1)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._maybe(trainer, trainer.global_step)


class Notes(pl.Callback):
    """What the test looks at."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: dict[str, Tensor], *_: Any
    ) -> None:
        number = trainer.strategy.attempt.number  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            loss = float(outputs["loss"])
            append("losses.jsonl", [number, trainer.global_step, loss, time.time()])
        if trainer.global_step == 1:
            path = Path(f"listening{trainer.global_rank}.json")
            path.write_text(json.dumps(listening_addresses()))


def main() -> None:
    options = json.loads(sys.argv[1])
    layout, world = options["layout"], options["world"]
    saver = pl.callbacks.ModelCheckpoint(
        dirpath="checkpoints", filename="{step}", every_n_train_steps=2, save_top_k=-1
    )
    policy = RestartPolicy(**options.get("policy", {}))
    trainer = pl.Trainer(
        strategy=MegatronStrategy(**layout, connection=ConnectionConfig(init_timeout_s=120)),
        accelerator="cpu",
        devices=world,
        precision="64-true",
        max_steps=options.get("steps", 8),
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[policy, Kills(options.get("kills", [])), saver, Notes()],
    )
    batch = 8 // dp_of(world, layout)
    data = DataLoader(samples(), batch_size=batch, shuffle=True)
    trainer.fit(Small(), data, ckpt_path="auto")
    print(f"finished at step {trainer.global_step}")


if __name__ == "__main__":
    main()
