"""`ChaosMonkey` strikes where it is told to, once, under any strategy, and says so."""

import contextlib
import math
import os
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import ChaosMonkey, NumberGuard
from lightning_megatron.cli import main
from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.events import read_events
from lightning_megatron.monitoring.sections import SectionClock
from lightning_megatron.testing import WorkerError, WorkerPool
from lightning_megatron.testing.chaos import monkey as chaos_monkey
from lightning_megatron.testing.chaos.faults import InjectedFaultError, read_injected
from lightning_megatron.testing.chaos.monkey import chaos_from_environment
from lightning_megatron.testing.chaos.runner import read_result
from tests.monitoring.test_sections import Time
from tests.strategy.small import LAYOUTS, Small, dp_of, loader, make_trainer, weights


class Watched(Small):
    """Notes what it has come to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append("forward")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing to note."""

    def on_before_backward(self, loss: Tensor) -> None:
        self.losses.append(float(loss.detach()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append("optimizer")

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append("end")


def fit(
    faults: str,
    folder: Path,
    layout: Mapping[str, Any] | None = None,
    devices: int = 1,
    **options: Any,
) -> tuple[pl.Trainer, Watched]:
    module = Watched()
    data = options.pop("data", None) or loader(dp=dp_of(devices, layout or {}))
    trainer = make_trainer(
        layout,
        devices,
        callbacks=[ChaosMonkey(faults)],
        default_root_dir=str(folder),
        **options,
    )
    with contextlib.suppress(InjectedFaultError):
        trainer.fit(module, data, loader() if "val_check_interval" in options else None)
    return trainer, module


STEP = ["forward", "optimizer", "end"]


@pytest.mark.parametrize("layout", [None, {"num_microbatches": 2}], ids=["plain", "2"])
@pytest.mark.parametrize(
    ("section", "seen", "function"),
    [
        ("start", [], "setup"),
        ("data", STEP * 2, "_both"),
        ("forward", STEP * 2, "_step"),
        ("backward", [*STEP * 2, "forward"], "_in_backward"),
        ("optimizer", [*STEP * 2, "forward"], "on_before_optimizer_step"),
        ("validation", STEP * 2, "on_validation_batch_start"),
    ],
)
def test_section(
    layout: dict[str, Any] | None, section: str, seen: list[str], function: str, tmp_path: Path
) -> None:
    module, options = Watched(), {"num_sanity_val_steps": 1, "val_check_interval": 2}
    step = 0 if section == "start" else 2
    monkey = ChaosMonkey(f"exception:rank=0,step={step},section={section}", tmp_path)
    trainer = make_trainer(layout, callbacks=[monkey], **options)
    with pytest.raises(InjectedFaultError) as raised:
        trainer.fit(module, loader(), loader())
    assert function in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    microbatches = (layout or {}).get("num_microbatches", 1)
    wanted = [name for name in seen for _ in range(microbatches if name == "forward" else 1)]
    if section == "backward":
        wanted = wanted[: len(wanted) + 1 - microbatches]  # before the second forward
    assert module.seen == wanted
    [fault] = read_injected(tmp_path)
    assert (fault["section"], fault["step"]) == (section, step)
    assert "training_step" not in module.__dict__


def test_checkpoint_section(tmp_path: Path) -> None:
    monkey = ChaosMonkey("exception:section=checkpoint", tmp_path)
    trainer = make_trainer({}, callbacks=[monkey])
    trainer.fit(Small(), loader())
    with pytest.raises(InjectedFaultError):
        trainer.save_checkpoint(tmp_path / "x.ckpt")


def test_once_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = "exception:step=2; slow:times=0,amount=0"
    _, first = fit(faults, tmp_path)
    assert first.seen == STEP * 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    _, second = fit(faults, tmp_path)
    assert second.seen == STEP * 4
    injected = read_injected(tmp_path / "chaos")
    assert [fault["what"] for fault in injected].count("exception") == 1
    assert [fault["attempt"] for fault in injected if fault["what"] == "slow"] == [0] * 2 + [1] * 4
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    _, another = fit(faults, tmp_path)  # a new run in the same folder
    assert another.seen == STEP * 2


def test_lasting(tmp_path: Path) -> None:
    _, module = fit("spike:step=1,steps=2,amount=1000", tmp_path)
    _, clean = fit("", tmp_path)
    assert module.losses[0] == clean.losses[0]
    assert module.losses[1] == pytest.approx(1000 * clean.losses[1])
    assert module.losses[2] > 100 * clean.losses[2]
    assert module.losses[3] < 1e30
    assert len(read_injected(tmp_path / "chaos")) == 1


def poisoned(layout: Mapping[str, Any], devices: int, folder: Path) -> dict[str, Any]:
    """By fault: the losses that this rank saw, and whether its weights are finite after it."""
    found = {}
    for number, fault in enumerate(("nan_loss", "spike", "nan_gradient", "bitflip")):
        options = {"limit_train_batches": 2}
        trainer, module = fit(
            f"{fault}:rank=-1,step=1", folder / str(number), layout, devices, **options
        )
        values = weights(module).values()
        finite = all(bool(torch.isfinite(value).all()) for value in values)
        found[fault] = module.losses, finite, sum(float(v.sum()) for v in values)
    return found


@pytest.mark.parametrize("layout", ["pp=2", "dp=2, 2 microbatches", "pp=2 x dp=2"])
def test_poison(pool: WorkerPool, layout: str, tmp_path: Path) -> None:
    devices, options = LAYOUTS[layout]
    by_rank = pool.run(devices, poisoned, options, devices, tmp_path)
    bad = [not math.isfinite(rank["nan_loss"][0][1]) for rank in by_rank]
    # A loss is that of a data-parallel rank, the last one's here, and all its stages hear of it.
    dp = dp_of(devices, options)
    assert bad == [rank % dp == dp - 1 for rank in range(devices)]
    for rank in by_rank:
        assert not rank["nan_loss"][1]
        assert math.isfinite(rank["nan_gradient"][0][1])
    assert not all(rank["nan_gradient"][1] for rank in by_rank)
    spiked = [rank["spike"][0][1] / rank["nan_gradient"][0][1] for rank in by_rank]
    assert max(spiked) == pytest.approx(100)
    for number in range(4):
        assert read_injected(tmp_path / str(number) / "chaos")


def killed(layout: Mapping[str, Any], devices: int, folder: Path) -> None:
    fit("kill:rank=1,step=2,section=backward", folder, layout, devices)


def test_kill(pool: WorkerPool, tmp_path: Path) -> None:
    devices, options = LAYOUTS["dp=2"]
    with pytest.raises(WorkerError) as raised:
        pool.run(devices, killed, options, devices, tmp_path)
    ends = {failure.rank: failure.summary for failure in raised.value.failures}
    assert ends[1] == f"the process ended with exit code {-signal.SIGKILL}"
    [fault] = read_injected(tmp_path / "chaos")
    assert (fault["rank"], fault["step"], fault["section"]) == (1, 2, "backward")


def test_worker_kill(tmp_path: Path) -> None:
    data = loader(num_workers=1)
    # What comes of it without a guard is torch's own business: it names no worker, or a pipe.
    with pytest.raises((RuntimeError, OSError, EOFError)):
        fit("worker_kill:step=1", tmp_path, {}, data=data)


def test_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chaos_from_environment() == []
    assert ChaosMonkey().faults == ()
    monkeypatch.setenv("LIGHTNING_MEGATRON_CHAOS", "kill:step=3")
    monkeypatch.setenv("LIGHTNING_MEGATRON_CHAOS_DIR", str(tmp_path))
    [monkey] = chaos_from_environment()
    assert isinstance(monkey, ChaosMonkey)
    assert [str(fault) for fault in monkey.faults] == ["kill:step=3"]


def test_no_such_rank(tmp_path: Path) -> None:
    trainer = make_trainer({}, callbacks=[ChaosMonkey("kill:rank=3", tmp_path)])
    with pytest.raises(ConfigError, match="rank=3"):
        trainer.fit(Small(), loader())


def test_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="CHAOS: faults are injected"):
        fit("slow:step=1,amount=1", tmp_path)
    said = capfd.readouterr().err
    assert "[rank 0] === CHAOS: injecting 'slow:step=1,amount=1.0' ===" in said
    assert "[rank 0]   rank 0, step 1, forward, attempt 0" in said


@pytest.mark.parametrize("layout", [{}, {"num_microbatches": 2}], ids=["1", "2"])
def test_sections_are_those_of_the_strategy(layout: dict[str, Any], tmp_path: Path) -> None:
    sections = ["start", "forward", "backward", "data", "validation"]
    # The first batch of all is fetched in the section "start".
    faults = "; ".join(f"slow:amount=0,section={s},step={int(s == 'data')}" for s in sections)
    trainer, _ = fit(faults, tmp_path, layout, val_check_interval=2)
    events = [event for event in trainer.strategy.events._early if event["kind"] == "injected"]
    assert [event["section"] for event in events] == sections
    assert [event["doing"] for event in events] == sections


def test_corrupt_and_full_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of the checkpoints of steps 1 to 4, that of step 2 is not written, and 3 does not verify."""
    faults = ["disk_full:step=2", "corrupt:step=3,section=optimizer"]
    checkpoints = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        {},
        callbacks=[ChaosMonkey(faults, tmp_path), checkpoints],
        enable_checkpointing=True,
    )
    trainer.fit(Small(), loader(num_workers=1))  # workers write files in shared memory, unharmed
    names = sorted(path.name for path in (tmp_path / "c").glob("*.ckpt"))
    assert names == [f"epoch=0-step={step}.ckpt" for step in (1, 3, 4)]
    assert [main(["ckpt", "verify", str(tmp_path / "c" / name)]) for name in names] == [0, 1, 0]
    assert "no space left for checkpoints" in capfd.readouterr().err


class Patience(pl.Callback):
    """Waits in the last step until a directory is one again that can be written to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.met = folder, False

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        until = time.monotonic() + 120
        while trainer.global_step == 3 and time.monotonic() < until:
            if self.folder.is_dir() and os.access(self.folder, os.W_OK):
                return
            self.met = True
            time.sleep(0.05)


def test_readonly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Saves fail meanwhile, nothing else does, and what was saved before is there again."""
    folder = tmp_path / "c"
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    patience = Patience(folder)
    monkey = ChaosMonkey("readonly:step=1,section=optimizer,amount=12", tmp_path / "chaos")
    trainer = make_trainer({}, callbacks=[monkey, patience, saver], enable_checkpointing=True)
    trainer.fit(Small(), loader())
    assert trainer.global_step == 4
    assert patience.met
    names = {path.name for path in folder.glob("*.ckpt")}
    assert {"epoch=0-step=1.ckpt", "epoch=0-step=4.ckpt"} <= names
    assert "epoch=0-step=2.ckpt" not in names
    assert [main(["ckpt", "verify", str(folder / name)]) for name in sorted(names)][-1] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "chaos"]
    assert "for 12 s" in capfd.readouterr().err


def test_diary_of_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_MEGATRON_CHAOS", "slow:step=1,amount=1")
    monkeypatch.setenv("LIGHTNING_MEGATRON_CHAOS_DIR", str(tmp_path))
    trainer = make_trainer({}, callbacks=chaos_from_environment())
    trainer.fit(Small(), loader())
    result = read_result(tmp_path)
    assert result.ledger.attempts[-1].to_step == 4
    assert result.recovered
    assert [outcome.fault["what"] for outcome in result.outcomes] == ["slow"]


def test_saving_is_no_part_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the goodput of the run itself, beside which the table of a rehearsal stands."""
    monkeypatch.setenv("LIGHTNING_MEGATRON_CHAOS", "slow:step=1,amount=1")
    monkeypatch.setenv("LIGHTNING_MEGATRON_CHAOS_DIR", str(tmp_path))

    now = Time()
    monkeypatch.setattr(chaos_monkey, "time", SimpleNamespace(monotonic=now, time=time.time))

    class SlowToSave(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now.now += 0.5
            return super().training_step(batch, batch_idx)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            now.now += 4.0

    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1)
    callbacks = [*chaos_from_environment(), saving]
    trainer = make_trainer({}, callbacks=callbacks, enable_checkpointing=True)
    trainer.strategy.clock = SectionClock(now)
    trainer.fit(SlowToSave(), loader())
    steps = [e["seconds"] for e in read_events(tmp_path) if e["kind"] == "step"]
    assert steps == [0.5] * 4


def test_validation_is_no_step_of_a_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Watched):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            time.sleep(0.3)

    monkeypatch.setenv("LIGHTNING_MEGATRON_CHAOS", "slow:step=1,amount=1")
    monkeypatch.setenv("LIGHTNING_MEGATRON_CHAOS_DIR", str(tmp_path))
    trainer = make_trainer(
        {}, callbacks=chaos_from_environment(), val_check_interval=1, limit_val_batches=1
    )
    trainer.fit(Slow(), loader(), loader())
    ledger = read_result(tmp_path).ledger
    assert ledger.wall_s() > 0.9  # three validations before the last step
    assert ledger.productive_s < ledger.wall_s() - 0.9


def test_a_batch_that_is_run_again_is_sound(tmp_path: Path) -> None:
    """What `NumberGuard` takes for a transient fault; weights are those of a clean run."""
    clean: list[Any] = []
    for faults in ("", "nan_loss:step=1; nan_gradient:step=2"):
        guard = NumberGuard(nonfinite="rerun", after_rerun="raise")
        module = Small()
        callbacks = [ChaosMonkey(faults, tmp_path), guard]
        layout = {"num_microbatches": 2}
        make_trainer(layout, callbacks=callbacks).fit(module, loader())
        clean.append(weights(module))
    assert len(read_injected(tmp_path)) == 2
    for name, value in clean[0].items():
        torch.testing.assert_close(clean[1][name], value, rtol=0, atol=0)
