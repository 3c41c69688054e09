"""Ranks that are forked from the process that has the Trainer."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, ConnectionConfig, Preemption, gather
from tests.strategy.small import Small, loader, make_trainer, samples

FORK = ConnectionConfig(start="fork")


def in_child(body: Callable[..., None], *args: Any) -> None:
    """Call ``body`` where neither threads of the session nor an earlier Trainer are about."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=_call, args=(theirs, body, args))
    process.start()
    theirs.close()
    problem = ours.recv()
    process.join(60)
    assert problem is None, problem


def _call(answer: Any, body: Callable[..., None], args: Any) -> None:
    import traceback

    torch.set_num_threads(1)
    try:
        body(*args)
        answer.send(None)
    except BaseException:
        answer.send(traceback.format_exc())


def total(state: dict[str, Tensor]) -> Tensor:
    return sum((value.sum() for value in state.values()), torch.zeros(()))


class Late(Small):
    """Built in `configure_model`, which only the ranks call; logs what its weights add up to."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))  # type: ignore[assignment]

    def on_train_epoch_end(self) -> None:
        self.log("sum", total(gather(self)))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.net(batch[0])
        return out


def all_functions() -> None:
    late = Late()
    trainer = make_trainer({"zero": 3, "connection": FORK}, 2)
    trainer.fit(late, loader(dp=2))
    assert late.net[0].weight.dtype == torch.float64
    assert float(total(late.state_dict())) == pytest.approx(float(trainer.callback_metrics["sum"]))
    [mine] = trainer.validate(late, loader(dp=2), verbose=False)
    [theirs] = make_trainer(None).validate(late, loader(), verbose=False)
    assert mine["val"] == pytest.approx(theirs["val"], rel=1e-12)
    assert float(trainer.callback_metrics["val"]) == mine["val"]
    alone = make_trainer({"connection": FORK}, 1)  # asked for: forked all the same
    here: Any = alone.predict(late, loader())
    there: Any = make_trainer(None).predict(late, loader())
    torch.testing.assert_close(torch.cat(here), torch.cat(there), rtol=1e-10, atol=1e-13)
    assert "LOCAL_RANK" not in os.environ


def test_every_function_of_a_trainer_returns_what_it_does_in_one_process() -> None:
    in_child(all_functions)


class Harm(pl.Callback):
    """Signals a process in the second step of rank 1."""

    def __init__(self, number: int, pid: int | None) -> None:
        self.number, self.pid = number, pid

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 1:
            os.kill(self.pid or os.getpid(), self.number)
        time.sleep(0.05)


def killed() -> None:
    harm = Harm(signal.SIGKILL, None)
    trainer = make_trainer({"connection": FORK}, 2, callbacks=[harm])
    with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        trainer.fit(Small(), loader(dp=2))
    assert multiprocessing.active_children() == []


def test_a_rank_that_is_killed_is_named() -> None:
    in_child(killed)


def terminated(folder: str) -> None:
    callbacks = [Harm(signal.SIGTERM, os.getpid()), Preemption(dirpath=folder)]
    trainer = make_trainer({"connection": FORK}, 2, callbacks=callbacks, max_epochs=500)
    with pytest.raises(SystemExit) as end:
        trainer.fit(Small(), DataLoader(samples(), batch_size=4, num_workers=1))
    assert end.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert len(list(Path(folder).iterdir())) == 1


def test_a_signal_to_the_process_that_waits_is_for_the_run(tmp_path: Path) -> None:
    in_child(terminated, str(tmp_path))


def in_a_thread() -> None:
    """Where signals cannot be handled, a run is a run as well."""
    trainer = make_trainer({"connection": FORK}, 2)
    thread = threading.Thread(target=trainer.fit, args=(Small(), loader(dp=2)))
    thread.start()
    thread.join()
    assert trainer.global_step == 4


def test_a_thread_may_fork_the_ranks() -> None:
    in_child(in_a_thread)


@pytest.mark.parametrize(
    ("start", "nodes", "text"),
    [
        ("forks", 1, "must be 'auto', 'script' or 'fork'; nearest valid: start='fork'"),
        ("fork", 2, "num_nodes=2: fork starts processes on this machine only"),
    ],
)
def test_how_processes_cannot_be_started(start: Any, nodes: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_trainer({"connection": ConnectionConfig(start=start)}, 2, num_nodes=nodes)
