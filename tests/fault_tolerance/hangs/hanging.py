"""A module whose rank 1 hangs on order, in every way, until that was reported.

How long that takes is the machine's business; a hang that ended after a fixed time would end unseen
on a busy one.
"""

import ctypes
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.strategy.small import Small, samples

LONGEST_S = 60.0


def wait_for_report(run_dir: str, step: int | str) -> None:
    """Return when the hang in this step was reported, or when that has become unlikely."""
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until and not list(Path(run_dir, "hangs").glob(f"*step_{step}.json")):
        time.sleep(0.05)


def _until_report(run_dir: str, step: int) -> str:
    """The same for a shell."""
    there = f"for f in '{run_dir}'/hangs/*step_{step}.json; do [ -e \"$f\" ] && break 2; done"
    count = int(LONGEST_S / 0.1)
    return f"n=0; while [ $n -lt {count} ]; do {there}; n=$((n + 1)); sleep 0.1; done"


def sleep_on(run_dir: str, step: int) -> None:
    time.sleep(600)


def lock_python(run_dir: str, step: int) -> None:
    """A C call that does not release Python's lock."""
    ctypes.PyDLL(None).system(_until_report(run_dir, step).encode())


def stop_process(run_dir: str, step: int) -> None:
    """SIGSTOP, from outside, and after a while SIGCONT."""
    pid = os.getpid()
    subprocess.run(
        ["sh", "-c", f"kill -STOP {pid}; {_until_report(run_dir, step)}; kill -CONT {pid}"],
        start_new_session=True,
        check=True,
    )


def loop(run_dir: str, step: int) -> None:
    """Python that never ends, but can be interrupted."""
    while True:
        time.sleep(0.01)


KINDS = {
    "for ever": sleep_on,
    "loop": loop,
    "sleep": wait_for_report,
    "lock": lock_python,
    "stop": stop_process,
}

Fault = tuple[str, str]
"""Section and kind."""


class Hanging(Small):
    """Hangs at the batches that ``faults`` names.

    Args:
        faults: by batch.
        run_dir: where hangs are reported.
        rank: who hangs.
    """

    def __init__(self, faults: Mapping[int, Fault], run_dir: str, rank: int = 1) -> None:
        super().__init__()
        self.faults, self.run_dir, self.rank = dict(faults), run_dir, rank
        self.batch_idx = -1

    def meet(self, section: str) -> None:
        where, kind = self.faults.get(self.batch_idx, ("", ""))
        if where == section and self.trainer.global_rank == self.rank:
            del self.faults[self.batch_idx]
            KINDS[kind](self.run_dir, self.batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        time.sleep(0.05)  # limits become known to others a few times a second
        self.meet("forward")
        loss: Tensor = self.loss(batch)
        loss.register_hook(lambda _: self.meet("backward"))  # type: ignore[no-untyped-call]
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.meet("optimizer")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.meet("checkpoint")

    def on_train_batch_end(self, *args: Any) -> None:
        self.meet("data")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.meet("validation")


class Skipping(Small):
    """Rank 1 leaves out one collective of a group of its own, and makes up for it when told off.

    Args:
        at: the batch.
        run_dir: where hangs are reported.
    """

    def __init__(self, at: int, run_dir: str) -> None:
        super().__init__()
        self.at, self.run_dir = at, run_dir
        self.group: Any = None

    def on_fit_start(self) -> None:
        self.group = dist.new_group()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at and self.trainer.global_rank == 1:
            threading.Thread(target=self.make_up, daemon=True).start()
        elif batch_idx <= self.at:
            dist.all_reduce(torch.zeros(5, 3, dtype=torch.float32), group=self.group)
        return self.loss(batch)

    def make_up(self) -> None:
        wait_for_report(self.run_dir, self.at)
        dist.all_reduce(torch.zeros(5, 3, dtype=torch.float32), group=self.group)


class Counted(IterableDataset[Any]):
    """A number of samples that may differ between ranks."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        data = samples(self.count)
        return iter([data[i] for i in range(self.count)])


class Slow(Small):
    """Takes its time where nobody should mind."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def on_train_start(self) -> None:
        time.sleep(self.seconds)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            time.sleep(self.seconds)
        return self.loss(batch)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.global_rank == 0:
            time.sleep(self.seconds)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_rank == 0:
            time.sleep(self.seconds / 2)


class SaveAt(pl.Callback):
    """Saves after a batch."""

    def __init__(self, path: str, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == self.batch:
            trainer.save_checkpoint(self.path)
