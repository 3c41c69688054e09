"""What came of saves is logged, and what would be lost by a crash is known."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import (
    CheckpointConfig,
    CheckpointMonitor,
    EventLogWriter,
    ParameterNorm,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.run_log.events import read_events
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer, samples


def saved(folder: Path, mode: Any) -> tuple[CheckpointMonitor, dict[str, float]]:
    monitor = CheckpointMonitor(every_n_steps=1)
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(
        {"checkpoint": CheckpointConfig(mode=mode)},
        callbacks=[monitor, saving],
        enable_checkpointing=True,
        log_every_n_steps=1,
    )
    trainer.fit(Small(), loader(samples(5 * 8)))
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("ckpt/")}
    return monitor, metrics


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_saves_are_counted_and_measured(tmp_path: Path) -> None:
    monitor, metrics = saved(tmp_path, "sync")
    assert monitor.latest is not None
    assert (metrics["ckpt/saves_total"], metrics["ckpt/failures_total"]) == (2, 0)
    assert metrics["ckpt/last_good_step"] == 4
    assert 0 < metrics["ckpt/stall_s"] <= metrics["ckpt/duration_s"] * 1.01 < 100
    assert 0 < metrics["ckpt/age_s"] < 100
    newest = max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)
    assert 0.5 * size_of(newest) < metrics["ckpt/bytes"] <= size_of(newest)


def test_a_run_that_goes_on_tells_how_long_it_verified(tmp_path: Path) -> None:
    saved(tmp_path, "sync")
    trainer = make_trainer(
        {},
        callbacks=[CheckpointMonitor(every_n_steps=1), EventLogWriter(tmp_path / "run")],
        log_every_n_steps=1,
        max_epochs=2,
    )
    path = tmp_path / "epoch=0-step=4.ckpt"
    began = time.perf_counter()
    trainer.fit(Small(), loader(samples(5 * 8)), ckpt_path=path)
    found = float(trainer.callback_metrics["ckpt/verify_s"])
    [event] = [e for e in read_events(tmp_path / "run") if e["kind"] == "verified"]
    assert 0 < found < time.perf_counter() - began
    assert event["seconds"] == pytest.approx(found)
    assert (event["path"], event["bytes"] > 0) == (str(path), True)


def test_a_failed_save_is_counted_and_the_last_good_step_stays(tmp_path: Path) -> None:
    monitor: Any = CheckpointMonitor(every_n_steps=1)
    now = time.time()
    good = {"kind": "save", "ok": True, "stall": 0.1, "seconds": 0.5, "bytes": 10**9, "step": 3}
    monitor._take({**good, "t": now})
    monitor._take({**good, "t": now, "ok": False, "error": "full", "step": 4, "bytes": 0})
    monitor._take({"kind": "step"})
    found: dict[str, float] = {}

    class Module:
        def log_dict(self, values: Any, **_: Any) -> None:
            found.update(values)

    monitor.on_window(None, Module(), {})
    assert (found["ckpt/failures_total"], found["ckpt/last_good_step"]) == (1, 3)
    assert found["ckpt/gb_per_s"] == pytest.approx(2)


def normed(layout: Mapping[str, Any], devices: int) -> float:
    module = Small()
    trainer = make_trainer(layout, devices, callbacks=[ParameterNorm(every=1)])
    trainer.fit(module, loader(dp=dp_of(devices, layout)))
    if devices == 1:
        whole = torch.cat([p.detach().flatten() for p in module.parameters()]).norm()
        assert float(trainer.callback_metrics["optim/param_norm"]) == pytest.approx(float(whole))
    return float(trainer.callback_metrics["optim/param_norm"])


@pytest.mark.parametrize("layout", [{"tp": 2}, {"zero": 3}, {"pp": 2}], ids=str)
def test_the_norm_of_the_parameters_is_that_of_one_process(
    pool: WorkerPool, layout: dict[str, Any]
) -> None:
    (alone,) = pool.run(1, normed, {}, 1)
    assert pool.run(2, normed, layout, 2) == pytest.approx([alone, alone], rel=1e-10)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        ParameterNorm(every=0)
    with pytest.raises(ConfigError, match="under SingleDeviceStrategy"):
        make_trainer(None, callbacks=[ParameterNorm()]).fit(Small(), loader())
