"""Without any callback a signal on one rank ends the run on all, at the same batch."""

import contextlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron.testing import WorkerError, WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer


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


class NoLoss(Small):
    """Has nothing to learn from any batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


def signalled_without_a_loss(number: int) -> tuple[Any, ...]:
    kill = Kill(0, "on_train_batch_start", 1, number)
    trainer = make_trainer({}, 1, callbacks=[kill])
    with pytest.raises(SystemExit) as end:
        trainer.fit(NoLoss(), loader())
    named = [thread.name for thread in threading.enumerate()]
    return end.value.code, trainer.fit_loop.epoch_loop.batch_idx, "signals" in named


def test_steps_without_a_loss_are_ended_as_well(pool: WorkerPool) -> None:
    """In the batch of the signal, and without a thread that outlives the run."""
    assert pool.run(1, signalled_without_a_loss, signal.SIGTERM) == [(143, 1, False)]


def ended_unsaved(interrupted: bool) -> str:
    """What is said."""
    # Lightning ignores interrupts for good after one has ended a run of this process.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    said = io.StringIO()
    kill = Kill(0, "on_after_backward", 1, signal.SIGINT if interrupted else signal.SIGTERM)
    trainer = make_trainer({}, 1, callbacks=[kill])
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
        trainer.fit(Small(), loader())
    return said.getvalue()


@pytest.mark.parametrize(
    ("interrupted", "title"),
    [(False, "SIGTERM on rank 0: the run ends at step 2"), (True, "interrupted at step 1")],
)
def test_whoever_saves_nothing_says_so(pool: WorkerPool, interrupted: bool, title: str) -> None:
    [said] = pool.run(1, ended_unsaved, interrupted)
    assert said.count("===") == 2
    assert f"=== {title} ===" in said
    assert "nothing was saved for it; with callbacks=[Preemption()] a signal or Ctrl-C" in said


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


class StopsItself(Small):
    """One rank finds that it is enough."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1 and batch_idx == 1:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def stop_on_one_rank() -> tuple[int, bool]:
    trainer = make_trainer({"zero": 1}, 2)
    trainer.fit(StopsItself(), loader(dp=2))
    return trainer.global_step, trainer.should_stop


def test_should_stop_in_a_step_of_one_rank_stops_all(pool: WorkerPool) -> None:
    assert pool.run(2, stop_on_one_rank) == [(2, True)] * 2


class Interrupted(Small):
    """One rank is interrupted, and no other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1 and batch_idx == 1:
            raise KeyboardInterrupt
        return super().training_step(batch, batch_idx)


def interrupt_one_rank() -> None:
    """To the end of its process, as a script."""
    try:
        make_trainer({"zero": 1}, 2).fit(Interrupted(), loader(dp=2))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def test_an_interrupt_of_one_rank_ends_all_and_is_named(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError) as failure:
        pool.run(2, interrupt_one_rank, grace=60.0)
    by_rank = {found.rank: found for found in failure.value.failures}
    assert sorted(by_rank) == [0, 1]
    assert all("exit code 1" in found.summary for found in by_rank.values())
    assert "was interrupted (KeyboardInterrupt) ===" in by_rank[0].output
    assert "=== root cause: rank 1 (" in by_rank[0].output
