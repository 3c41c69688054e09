"""A training whose ranks come to harm: ``python -m tests.launched.training JSON``.

Keys of the JSON: ``layout`` and ``world``; ``steps``; ``seed``; ``noisy`` for a module and samples
that all random generators touch, with ``workers``; ``policy``, options of `RestartPolicy`;
``preemption``; ``faults``, options of `Fault` for a `FaultInjector`.

``kills``: a rank and a step for each start by torchrun in turn (step -1: while it loads), where the
rank kills itself. ``falls``: such starts in which rank 1 dies before it has met the others.
``strike``: a rank, a step, whom it signals (``self``, ``launcher``, ``group``), and the signal.

Rank 0 appends attempt, step, loss and time to ``losses.jsonl``; every rank, to files with its
number, its steps (``curve``), the addresses that it listens at, and how it ended (``codes``).
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

from lightning_megatron import (
    ConnectionConfig,
    MegatronStrategy,
    Preemption,
    RestartPolicy,
)
from tests.fault_tolerance.hangs.sockets import listening_addresses
from tests.faults.acts import Fault
from tests.faults.injector import FaultInjector
from tests.strategy.resuming import Augmented, Noisy
from tests.strategy.small import GLOBAL_BATCH, Small, dp_of, samples


def append(file: str, values: list[Any]) -> None:
    with open(file, "a") as lines:
        lines.write(json.dumps(values) + "\n")


class Numbered(Augmented):
    """Samples that know their number; four batches an epoch."""

    def __len__(self) -> int:
        return 4 * GLOBAL_BATCH


class NoisySmall(Noisy):
    """Sizes its batches by the ranks that there are."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self) -> Any:
        return DataLoader(
            Numbered(),
            self.trainer.strategy.batch_share(GLOBAL_BATCH),  # type: ignore[attr-defined]
            shuffle=True,
            num_workers=self.workers,
            multiprocessing_context="fork" if self.workers else None,
        )


class Kills(pl.Callback):
    """Kills this process where the plan says so."""

    def __init__(self, plan: list[list[int]]) -> None:
        self.plan = plan

    def _maybe(self, trainer: pl.Trainer, step: int) -> None:
        number = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        if number < len(self.plan) and self.plan[number] == [trainer.global_rank, step]:
            append("kills.jsonl", [number, trainer.global_rank, time.time()])
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._maybe(trainer, -1)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._maybe(trainer, trainer.global_step)


class Strike(pl.Callback):
    """Sends a signal, and waits in this step until it has come around."""

    def __init__(self, rank: int | None, step: int, whom: str, number: int) -> None:
        self.rank, self.step, self.whom, self.number = rank, step, whom, number

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step or self.rank not in (None, trainer.global_rank):
            return
        if self.whom == "group":
            os.killpg(0, self.number)
        else:
            os.kill(os.getpid() if self.whom == "self" else os.getppid(), self.number)
        until = time.monotonic() + 300
        while not trainer.strategy.stop.flag.number and time.monotonic() < until:  # type: ignore[attr-defined]
            time.sleep(0.01)


class Notes(pl.Callback):
    """What the test looks at."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            append("runs.jsonl", [trainer.strategy.attempt.run_id, trainer.strategy.events.run])  # type: ignore[attr-defined]

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: Any,
        outputs: dict[str, Tensor],
        batch: Any,
        index: int,
    ) -> None:
        number, step = trainer.strategy.attempt.number, trainer.global_step  # type: ignore[attr-defined]
        loss = float(outputs["loss"])
        if trainer.is_global_zero:
            append("losses.jsonl", [number, step, loss, time.time()])
        if isinstance(pl_module, NoisySmall):
            line = [number, step, loss.hex(), batch[1].tolist()]
            append(f"curve{trainer.global_rank}.jsonl", line)
        if step == 1:
            path = Path(f"listening{trainer.global_rank}.json")
            path.write_text(json.dumps(listening_addresses()))


def callbacks_for(options: dict[str, Any]) -> list[pl.Callback]:
    callbacks: list[pl.Callback] = [
        RestartPolicy(**options.get("policy", {})),
        Kills(options.get("kills", [])),
        Notes(),
        pl.callbacks.ModelCheckpoint(
            dirpath="checkpoints", filename="{step}", every_n_train_steps=2, save_top_k=-1
        ),
    ]
    if "faults" in options:
        faults = [Fault(**fault) for fault in options["faults"]]
        callbacks.append(FaultInjector(faults, "struck"))
    if options.get("preemption"):
        callbacks.append(Preemption())
    if "strike" in options:
        callbacks.append(Strike(*options["strike"]))
    return callbacks


def main() -> None:
    options = json.loads(sys.argv[1])
    layout, world = options["layout"], options["world"]
    # torchrun's own handler, in workers that are forked from it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    restarts, rank = os.environ.get("TORCHELASTIC_RESTART_COUNT"), os.environ.get("RANK")
    if rank == "1" and restarts in map(str, options.get("falls", [])):
        os.kill(os.getpid(), signal.SIGKILL)
    noisy = options.get("noisy", False)
    trainer = pl.Trainer(
        strategy=MegatronStrategy(**layout, connection=ConnectionConfig(init_timeout_s=300)),
        accelerator="cpu",
        devices=world,
        precision="64-true",
        max_steps=options.get("steps", 8),
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks_for(options),
    )
    if noisy:
        pl.seed_everything(options.get("seed", 7), verbose=False)
        module: pl.LightningModule = NoisySmall(options.get("workers", 0))
        data = None
    else:
        module = Small()
        data = DataLoader(samples(), batch_size=8 // dp_of(world, layout), shuffle=True)
    try:
        trainer.fit(module, data, ckpt_path="auto")
    except SystemExit as end:
        append(f"codes{trainer.global_rank}.jsonl", [end.code])
        raise
    print(f"finished at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
