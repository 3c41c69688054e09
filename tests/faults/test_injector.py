"""`FaultInjector` strikes where it is told to, once, under any strategy; and runs survive it."""

import contextlib
import json
import math
import signal
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_megatron import NumberGuard
from lightning_megatron.cli import main
from lightning_megatron.services import events_of
from lightning_megatron.testing import WorkerError, WorkerPool
from tests.faults.acts import Fault, InjectedFaultError
from tests.faults.injector import FaultInjector
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
    faults: list[Fault],
    folder: Path,
    layout: Mapping[str, Any] | None = None,
    devices: int = 1,
    **options: Any,
) -> tuple[pl.Trainer, Watched]:
    module = Watched()
    data = options.pop("data", None) or loader(dp=dp_of(devices, layout or {}))
    trainer = make_trainer(
        layout, devices, callbacks=[FaultInjector(faults, folder / "struck")], **options
    )
    events_of(trainer).open(folder)
    with contextlib.suppress(InjectedFaultError):
        trainer.fit(module, data, loader() if "val_check_interval" in options else None)
    return trainer, module


def injected(folder: Path) -> list[dict[str, Any]]:
    lines = [
        line
        for file in sorted((folder / "events").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    return [event for event in map(json.loads, lines) if event["kind"] == "injected"]


STEP = ["forward", "optimizer", "end"]


@pytest.mark.parametrize("layout", [None, {"num_microbatches": 2}], ids=["plain", "2"])
@pytest.mark.parametrize(
    ("section", "seen", "function"),
    [
        ("data", STEP * 2, "before_fetch"),
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
    fault = Fault(kind="exception", rank=0, step=2, section=section)
    trainer = make_trainer(layout, callbacks=[FaultInjector([fault], tmp_path)], **options)
    with pytest.raises(InjectedFaultError) as raised:
        trainer.fit(module, loader(), loader())
    assert function in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    microbatches = (layout or {}).get("num_microbatches", 1)
    wanted = [name for name in seen for _ in range(microbatches if name == "forward" else 1)]
    if section == "backward":
        wanted = wanted[: len(wanted) + 1 - microbatches]  # before the second forward
    assert module.seen == wanted
    assert "training_step" not in module.__dict__


def test_checkpoint_section(tmp_path: Path) -> None:
    fault = Fault(kind="exception", rank=0, section="checkpoint")
    trainer = make_trainer({}, callbacks=[FaultInjector([fault], tmp_path)])
    trainer.fit(Small(), loader())
    with pytest.raises(InjectedFaultError):
        trainer.save_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("layout", [{}, {"num_microbatches": 2}], ids=["1", "2"])
def test_sections_are_those_of_the_strategy(layout: dict[str, Any], tmp_path: Path) -> None:
    sections = ["forward", "backward", "data", "validation"]
    # The first batch of all is fetched in the section "start".
    faults = [
        Fault(kind="slow", rank=0, amount=0, section=s, step=int(s == "data")) for s in sections
    ]
    fit(faults, tmp_path, layout, val_check_interval=2)
    assert [event["section"] for event in injected(tmp_path)] == sections
    assert [event["doing"] for event in injected(tmp_path)] == sections


def test_once_a_run(tmp_path: Path) -> None:
    faults = [Fault(kind="exception", rank=0, step=2)]
    assert fit(faults, tmp_path)[1].seen == STEP * 2
    assert fit(faults, tmp_path)[1].seen == STEP * 4
    assert [event["step"] for event in injected(tmp_path)] == [2]


def test_lasting(tmp_path: Path) -> None:
    fault = Fault(kind="spike", rank=0, step=1, steps=2, amount=1000)
    _, module = fit([fault], tmp_path)
    _, clean = fit([], tmp_path)
    assert module.losses[0] == clean.losses[0]
    assert module.losses[1] == pytest.approx(1000 * clean.losses[1])
    assert module.losses[2] > 100 * clean.losses[2]
    assert module.losses[3] < 1e30
    assert len(injected(tmp_path)) == 1


def poisoned(layout: Mapping[str, Any], devices: int, folder: Path) -> dict[str, Any]:
    """By fault: the losses that this rank saw, and whether its weights are finite after it."""
    found = {}
    sections = {"nan_loss": "forward", "spike": "forward", "nan_gradient": "backward"}
    for kind, section in sections.items():
        fault = Fault(kind=kind, rank=devices - 1, step=1, section=section, amount=100)
        _, module = fit([fault], folder / kind, layout, devices, limit_train_batches=2)
        finite = all(bool(torch.isfinite(value).all()) for value in weights(module).values())
        found[kind] = module.losses, finite
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
    for kind in by_rank[0]:
        assert injected(tmp_path / kind)


def killed(layout: Mapping[str, Any], devices: int, folder: Path) -> None:
    fault = Fault(kind="kill", rank=1, step=2, section="backward")
    fit([fault], folder, layout, devices)


def test_kill(pool: WorkerPool, tmp_path: Path) -> None:
    devices, options = LAYOUTS["dp=2"]
    with pytest.raises(WorkerError) as raised:
        pool.run(devices, killed, options, devices, tmp_path)
    ends = {failure.rank: failure.summary for failure in raised.value.failures}
    assert ends[1] == f"the process ended with exit code {-signal.SIGKILL}"
    [fault] = injected(tmp_path)
    assert (fault["rank"], fault["step"], fault["section"]) == (1, 2, "backward")


def test_worker_kill(tmp_path: Path) -> None:
    fault = Fault(kind="worker_kill", rank=0, step=1, section="data")
    # What comes of it without a guard is torch's own business: it names no worker, or a pipe.
    with pytest.raises((RuntimeError, OSError, EOFError)):
        fit([fault], tmp_path, {}, data=loader(num_workers=1))


def test_corrupt_and_full_disk(tmp_path: Path) -> None:
    """Of the checkpoints of steps 1 to 4, that of step 2 is not written, and 3 does not verify."""
    faults = [
        Fault(kind="disk_full", rank=0, step=2, section="checkpoint"),
        Fault(kind="corrupt", rank=0, step=3, section="optimizer", draw=12345),
    ]
    checkpoints = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_top_k=-1)
    callbacks = [FaultInjector(faults, tmp_path / "struck"), checkpoints]
    trainer = make_trainer({}, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Small(), loader(num_workers=1))  # workers write files in shared memory, unharmed
    names = sorted(path.name for path in (tmp_path / "c").glob("*.ckpt"))
    assert names == [f"epoch=0-step={step}.ckpt" for step in (1, 3, 4)]
    assert [main(["ckpt", "verify", str(tmp_path / "c" / name)]) for name in names] == [0, 1, 0]


def test_a_batch_that_is_run_again_is_sound(tmp_path: Path) -> None:
    """What `NumberGuard` takes for a transient fault; weights are those of a clean run."""
    faults = [
        Fault(kind="nan_loss", rank=0, step=1),
        Fault(kind="nan_gradient", rank=0, step=2, section="backward"),
    ]
    found: list[Any] = []
    for given in ([], faults):
        guard = NumberGuard(nonfinite="rerun", after_rerun="raise")
        module = Small()
        callbacks = [FaultInjector(given, tmp_path), guard]
        make_trainer({"num_microbatches": 2}, callbacks=callbacks).fit(module, loader())
        found.append(weights(module))
    assert len(list(tmp_path.iterdir())) == 2
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=0)
