"""Without any callback a signal on one rank ends the run on all, at the same batch."""

import os
import signal
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron.testing import WorkerPool
from tests.strategies.small import Small, dp_of, loader, make_trainer


class Kill(pl.Callback):
    """Sends this process a signal, on one rank or all, at one batch."""

    def __init__(self, rank: int | None, hook: str, batch: int, number: int) -> None:
        self.rank, self.batch, self.number = rank, batch, number
        self.last: Any = None
        setattr(self, hook, self._strike)

    def _strike(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        batch = trainer.fit_loop.epoch_loop.batch_idx
        mine = self.rank in (None, trainer.global_rank)
        if batch == self.batch and mine and not trainer.sanity_checking:
            os.kill(os.getpid(), self.number)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self.last = trainer.global_step


def run_and_be_killed(
    layout: Mapping[str, Any], devices: int, rank: int | None, hook: str, batch: int
) -> tuple[Any, ...]:
    kill = Kill(rank, hook, batch, signal.SIGTERM)
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(layout, devices, callbacks=[kill])
    data = loader(dp=dp_of(devices, layout))
    with pytest.raises(SystemExit) as end:
        trainer.fit(Small(), data, data)
    assert signal.getsignal(signal.SIGTERM) == before
    return end.value.code, kill.last, trainer.received_sigterm


@pytest.mark.parametrize(
    ("devices", "layout", "rank"),
    [(1, {}, 0), (2, {"zero": 0}, 1), (2, {"zero": 3}, 0), (4, {"pp": 2}, None)],
    ids=str,
)
def test_all_leave_at_the_same_batch(
    pool: WorkerPool, devices: int, layout: dict[str, Any], rank: int | None
) -> None:
    by_rank = pool.run(devices, run_and_be_killed, layout, devices, rank, "on_after_backward", 1)
    assert by_rank == [(143, 2, True)] * devices
