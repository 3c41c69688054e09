"""A DataLoader worker that dies is named, and its batches come all the same."""

import contextlib
import functools
import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from lightning_megatron import ConfigError, Preemption, WorkerGuard
from lightning_megatron.fault_tolerance import loader_workers
from lightning_megatron.fault_tolerance.loader_workers import WorkerLostError
from lightning_megatron.run_log.events import read_events
from tests.callbacks.test_preemption import Strike
from tests.strategy.resuming import Augmented, augmented_loader, differences, train
from tests.strategy.small import WIDTH, Small, make_trainer

LENGTH = 40


class Deadly(Dataset[Any]):
    """Random samples, one of which, the first time, is the end of who reads it."""

    def __init__(self, folder: Path, index: int | None = None, how: str = "") -> None:
        self.folder, self.index, self.how = folder, index, how

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        once = self.folder / "once"
        if index == self.index and not once.exists():
            if self.how != "raise":
                once.touch()
            end(self.how)
        return torch.full((WIDTH,), float(index)) + torch.randn(()), torch.randn(WIDTH)


def end(how: str) -> None:
    if how == "raise":
        raise KeyError("no such sample")
    if how == "hang":
        time.sleep(1000)
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), getattr(signal, how))


class Noting(Small):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batches.append(batch[0].clone())
        return super().training_step(batch, batch_idx)


def fit(data: Dataset[Any], layout: Any, guard: WorkerGuard | None, **options: Any) -> Noting:
    pl.seed_everything(7)
    module = Noting()
    folder = options.pop("folder", None)
    shuffle = not isinstance(data, IterableDataset)
    loader = DataLoader(
        data, batch_size=4, shuffle=shuffle, **{"num_workers": 2, "prefetch_factor": 1, **options}
    )
    trainer = make_trainer(
        layout, callbacks=[guard] if guard else [], max_epochs=2, precision="32-true"
    )
    if folder is not None:
        trainer.strategy.events.open(folder)
    trainer.fit(module, loader)
    return module


@functools.cache
def undisturbed() -> Noting:
    return fit(Deadly(Path()), {}, None)


class Leaping:
    """A clock by which every wait is too long while the only worker hangs."""

    sleep = staticmethod(time.sleep)

    def __init__(self, guard: WorkerGuard, hangs: Path) -> None:
        self.guard, self.hangs, self.ahead = guard, hangs, 0.0

    def monotonic(self) -> float:
        if self.hangs.exists() and not self.guard.respawned:
            self.ahead += 1000.0
        return time.monotonic() + self.ahead


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "hang"])
def test_same_batches(
    how: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clean = undisturbed()
    guard, workers = WorkerGuard(), 2
    if how == "hang":
        monkeypatch.setattr(loader_workers, "time", Leaping(guard, tmp_path / "once"))
        workers = 1
    survived = fit(Deadly(tmp_path, 17, how), {}, guard, folder=tmp_path, num_workers=workers)
    assert guard.respawned == 1
    assert len(clean.batches) == len(survived.batches) == 2 * LENGTH // 4
    for ours, theirs in zip(survived.batches, clean.batches, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    words = {"hang": "has not delivered a batch for"}
    [event] = [event for event in read_events(tmp_path) if event["kind"] == "fault"]
    assert words.get(how, f"was ended by {how}") in event["detail"]
    assert event["worker"] in (0, 1)
    assert 17 in event["samples"] or how != "hang"
    assert f"worker {event['worker']} (pid {event['pid']})" in capfd.readouterr().err


def test_persistent_workers_without_our_strategy(tmp_path: Path) -> None:
    """The order is that of the user's sampler; a worker dies in the second epoch."""
    clean = fit(Ordered(tmp_path), None, None, persistent_workers=True)
    after = torch.randn(())
    survived = fit(Ordered(tmp_path, how="SIGKILL"), None, WorkerGuard(), persistent_workers=True)
    assert torch.randn(()) == after  # nothing was drawn from the main process' own generator
    assert (tmp_path / "once").exists()
    assert [b[:, 0].tolist() for b in survived.batches] == [b[:, 0].tolist() for b in clean.batches]


class Ordered(Deadly):
    """Samples that are numbers, and an end in the third reading of the sample 5."""

    def __getitem__(self, index: int) -> Any:
        if index == 5 and self.how:
            seen = self.folder / f"seen{len(list(self.folder.glob('seen*')))}"
            seen.touch()
            if seen.name == "seen1":
                (self.folder / "once").touch()
                end(self.how)
        return torch.full((WIDTH,), float(index)), torch.zeros(WIDTH)


def test_no_replacement_left(tmp_path: Path) -> None:
    with pytest.raises(WorkerLostError, match=r"worker [01] \(pid \d+\) exited with code 3"):
        fit(Deadly(tmp_path, 17, "exit"), {}, WorkerGuard(respawn=0))


def test_error_of_the_dataset(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    guard = WorkerGuard()
    with pytest.raises(KeyError, match="no such sample"):
        fit(Deadly(tmp_path, 17, "raise"), {}, guard)
    said = capfd.readouterr().err
    assert "raised KeyError" in said
    assert "17" in said
    assert guard.respawned == 0


class Mortal(Augmented):
    """Of its workers, the first that reads anything dies of it, once for each file removed."""

    def __init__(self, once: Path, how: str) -> None:
        self.once, self.how = once, how

    def __getitem__(self, index: int) -> Any:
        if get_worker_info() is not None:
            with contextlib.suppress(FileExistsError):
                self.once.touch(exist_ok=False)
                end(self.how)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("how", "workers"),
    [("SIGKILL", 0), ("hang", 1), pytest.param("SIGSEGV", 2, marks=pytest.mark.thorough)],
)
def test_a_run_goes_on_from_after_a_replacement(
    tmp_path: Path, how: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped in the epoch in which a worker was lost, and loses one more when it goes on."""
    once = tmp_path / "once"

    def mortal(size: int, count: int) -> Any:
        options: dict[str, Any] = {"multiprocessing_context": "fork"} if count else {}
        return DataLoader(Mortal(once, how), size, shuffle=True, num_workers=count, **options)

    def guarded(count: int, path: str | None, *more: pl.Callback) -> Any:
        guard = WorkerGuard()
        if how == "hang":
            monkeypatch.setattr(loader_workers, "time", Leaping(guard, once))
        callbacks = [guard, Preemption(), *more]
        root = str(tmp_path / "run")
        curve = train({}, 1, count, mortal, path=path, callbacks=callbacks, default_root_dir=root)
        assert guard.respawned == (1 if count else 0)
        return curve

    strike = Strike("on_after_backward", 0, 3)
    with pytest.raises(SystemExit):
        guarded(workers or 2, None, strike)
    assert once.exists()
    once.unlink()
    rest = guarded(workers, "auto")
    assert once.exists() == bool(workers)
    assert differences(clean_curve(), rest, (0, 4)) == []


@functools.cache
def clean_curve() -> Any:
    return train({}, 1, 2, augmented_loader)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        for number in range(LENGTH):
            if number == 9:
                end("SIGKILL")
            yield torch.full((WIDTH,), float(number)), torch.zeros(WIDTH)


def test_stream_cannot_be_replaced() -> None:
    with pytest.raises(WorkerLostError, match="cannot be replaced"):
        fit(Stream(), {}, WorkerGuard(), num_workers=1)


def test_a_death_is_told_while_nobody_asks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the step goes on, which torch does not interrupt."""
    told: list[str] = []

    class Slow(Noting):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if (tmp_path / "once").exists() and not told:
                until = time.monotonic() + 60
                while "SIGKILL" not in "".join(told) and time.monotonic() < until:
                    time.sleep(0.05)
                    told.append(capfd.readouterr().err)
            return super().training_step(batch, batch_idx)

    module = Slow()
    loader = DataLoader(Deadly(tmp_path, 9, "SIGKILL"), batch_size=4, num_workers=1)
    make_trainer({}, callbacks=[WorkerGuard()], precision="32-true").fit(module, loader)
    assert "was ended by SIGKILL" in "".join(told)
    assert len(module.batches) == LENGTH // 4


def test_no_file_or_thread_is_left(tmp_path: Path) -> None:
    def held() -> int:
        return len(os.listdir("/proc/self/fd"))

    fit(Deadly(tmp_path), {}, WorkerGuard())
    gc.collect()
    before = held()
    fit(Deadly(tmp_path, 17, "SIGKILL"), {}, WorkerGuard())
    until = time.monotonic() + 60  # threads of queues close their ends when they get to it
    while held() > before and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    assert held() <= before


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="respawn=-1"):
        WorkerGuard(respawn=-1)
    with pytest.raises(ConfigError, match="hang_s=0"):
        WorkerGuard(hang_s=0)
