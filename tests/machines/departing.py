"""A training from which ranks depart: ``python -m tests.machines.departing NODES DEVICES``.

Every rank says which step it begins. ``slow=RANK`` in the environment's ``DEPARTING`` has a rank do
something else for ten seconds from step 5 on, in which it notices nothing.
"""

import os
import sys
import time
from typing import Any

import lightning.pytorch as pl

from lightning_megatron import MegatronStrategy
from tests.strategy.small import Small, loader


class Pace(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        print(f"rank {trainer.global_rank} begins step {trainer.global_step}", flush=True)
        slow = os.environ.get("DEPARTING") == f"slow={trainer.global_rank}"
        time.sleep(10 if slow and trainer.global_step == 5 else 0.1)


def main() -> None:
    nodes, devices = map(int, sys.argv[1:])
    trainer = pl.Trainer(
        strategy=MegatronStrategy(zero=1),
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        precision="64-true",
        max_steps=1000,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Pace()],
    )
    trainer.fit(Small(), loader(dp=nodes * devices))


if __name__ == "__main__":
    main()
