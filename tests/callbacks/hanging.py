"""A module whose rank 1 hangs on order, in every way that ends by itself."""

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.strategies.small import Small, samples

HANG_S = 2.5


def sleep() -> None:
    time.sleep(HANG_S)


def sleep_on() -> None:
    time.sleep(600)


def lock_python() -> None:
    """A C call that does not release Python's lock."""
    ctypes.PyDLL(None).usleep(int(HANG_S * 1e6))


def stop_process() -> None:
    """SIGSTOP, from outside, and after a while SIGCONT."""
    pid = os.getpid()
    subprocess.Popen(
        ["sh", "-c", f"kill -STOP {pid}; sleep {HANG_S}; kill -CONT {pid}"],
        start_new_session=True,
    )
    time.sleep(0.2)


def loop() -> None:
    """Python that never ends, but can be interrupted."""
    while True:
        time.sleep(0.01)


KINDS = {
    "for ever": sleep_on,
    "loop": loop,
    "sleep": sleep,
    "lock": lock_python,
    "stop": stop_process,
}

Fault = tuple[str, str]
"""Section and kind."""


class Hanging(Small):
    """Hangs at the batches that ``faults`` names.

    Args:
        faults: by batch.
        rank: who hangs.
    """

    def __init__(self, faults: Mapping[int, Fault], rank: int = 1) -> None:
        super().__init__()
        self.faults, self.rank = dict(faults), rank
        self.batch_idx = -1

    def meet(self, section: str) -> None:
        where, kind = self.faults.get(self.batch_idx, ("", ""))
        if where == section and self.trainer.global_rank == self.rank:
            del self.faults[self.batch_idx]
            KINDS[kind]()

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
    """Rank 1 leaves out one collective of a group of its own, until the others give up on it.

    Args:
        at: the batch.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.group: Any = None

    def on_fit_start(self) -> None:
        self.group = dist.new_group(timeout=timedelta(seconds=HANG_S))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx < self.at or (batch_idx == self.at and self.trainer.global_rank != 1):
            with suppress(RuntimeError):
                dist.all_reduce(torch.zeros(5, 3), group=self.group)
        return self.loss(batch)


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
