"""`EventLogWriter` writes what happens under any strategy, and adds up goodput over attempts."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring import event_log
from lightning_megatron.monitoring.event_log import EventLogWriter
from lightning_megatron.run_log.events import event_file, read_events
from lightning_megatron.run_log.sections import SectionClock
from lightning_megatron.testing import WorkerPool
from tests.monitoring.test_sections import Time
from tests.strategy.small import Small, dp_of, loader, make_trainer


class Slow(Small):
    """Steps of 20 ms, a validation of 150 ms; fails in the step that it is told."""

    def __init__(self, fails_at: int = -1, error: BaseException | None = None) -> None:
        super().__init__()
        self.fails_at, self.error = fails_at, error or RuntimeError("token=hunter2")
        self.hparams["api_key"] = "hunter2"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.fails_at:
            raise self.error
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.15)
        self.log("val_loss", 1.5)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [e["kind"] for e in events]


def fit(
    directory: Path,
    module: pl.LightningModule,
    layout: Any = None,
    devices: int = 1,
    **options: Any,
) -> tuple[EventLogWriter, pl.Trainer]:
    ckpt_path = options.pop("ckpt_path", None)
    writer = EventLogWriter(**options.pop("writer", {}))
    saving = ModelCheckpoint(
        directory / "saved", filename="{step}", save_top_k=-1, every_n_train_steps=2
    )
    trainer = make_trainer(
        layout,
        devices,
        enable_checkpointing=True,
        default_root_dir=str(directory),
        callbacks=[writer, saving],
        **{"log_every_n_steps": 2, **options},
    )
    data = loader(dp=dp_of(devices, layout or {}))
    trainer.fit(module, data, loader(), ckpt_path=ckpt_path)
    return writer, trainer


def test_events_of_an_ordinary_run(tmp_path: Path) -> None:
    writer, trainer = fit(tmp_path, Slow(), {}, limit_val_batches=1, num_sanity_val_steps=1)
    events = read_events(tmp_path)
    assert kinds(events)[:3] == ["start", "validation", "step"]
    assert events[1]["sanity"]
    last = [e for e in events if e["kind"] == "validation"][-1]
    assert last["metrics"] == {"val_loss": 1.5}
    assert kinds(events)[-1] == "end"
    assert sorted(kinds(events)[3:-1]) == sorted(
        ["step"] * 3 + ["save"] * 2 + ["window"] * 2 + ["validation"]
    )
    start, end = events[0], events[-1]
    assert (start["world"], start["strategy"]) == (1, "MegatronStrategy")
    assert start["layout"]["tp"] == 1
    assert (end["status"], end["exit_code"], end["step"]) == ("completed", 0, 4)
    assert len({e["run"] for e in events}) == 1
    assert len(start["run"]) == 16
    steps = [e for e in events if e["kind"] == "step"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4]
    assert all(e["tokens"] == 8 and e["loss"] > 0 for e in steps)
    assert all(e["seconds"] >= 0.02 for e in steps)
    assert all(e["sections"]["forward"] >= 0.02 for e in steps)
    saves = [e for e in events if e["kind"] == "save"]
    assert [(e["step"], e["ok"], Path(e["path"]).name) for e in saves] == [
        (2, True, "step=2.ckpt"),
        (4, True, "step=4.ckpt"),
    ]
    # Beside the steps, there were two validations and two saves.
    beside = sum(e["seconds"] for e in events if e["kind"] in ("validation", "save"))
    assert beside > 0.3
    assert 0.08 <= writer.ledger.productive_s < writer.ledger.wall_s() - beside
    assert 0 < float(trainer.callback_metrics["ft/goodput"]) < 1
    assert float(trainer.callback_metrics["ft/restarts_total"]) == 0
    window = [e for e in events if e["kind"] == "window"][-1]
    assert window["metrics"]["ft/steps_lost_total"] == 0
    assert 0.05 < window["memory"]["peak_rss_gib"] < 16


def test_a_failed_run_that_is_resumed_twice_is_one_run(tmp_path: Path) -> None:
    for fails_at, at in ((3, None), (3, "step=2.ckpt"), (-1, "step=2.ckpt")):
        path = None if at is None else str(tmp_path / "saved" / at)
        if fails_at < 0:
            writer, trainer = fit(tmp_path, Slow(), {}, ckpt_path=path, limit_val_batches=0)
        else:
            with pytest.raises(RuntimeError, match="hunter2"):
                fit(tmp_path, Slow(fails_at), {}, ckpt_path=path, limit_val_batches=0)
    metrics = trainer.callback_metrics
    assert float(metrics["ft/restarts_total"]) == 2
    assert float(metrics["ft/steps_lost_total"]) == 1 + 1
    assert float(metrics["ft/recover_s"]) > 0
    assert 0 < float(metrics["ft/goodput"]) < 1
    assert [(a.from_step, a.to_step, a.status) for a in writer.ledger.attempts] == [
        (0, 3, "failed"),
        (2, 3, "failed"),
        (2, 4, "completed"),
    ]
    events = read_events(tmp_path)
    ends = [e for e in events if e["kind"] == "end"]
    assert ends[0]["error"] == "RuntimeError: token=[redacted]"
    assert [e["from_step"] for e in events if e["kind"] == "resumed"] == [2, 2]
    assert len({e["run"] for e in ends}) == 1
    assert "hunter2" not in event_file(tmp_path, 0).read_text()


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(KeyboardInterrupt(), "interrupted", 130), (SystemExit(143), "stopped", 143)],
)
def test_how_a_run_was_stopped(
    tmp_path: Path, error: BaseException, status: str, code: int
) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, Slow(1, error), limit_val_batches=0)
    end = read_events(tmp_path)[-1]
    assert (end["kind"], end["status"], end["exit_code"]) == ("end", status, code)


def on_each_rank(layout: Mapping[str, Any], devices: int, directory: str) -> dict[str, float]:
    trainer = fit(Path(directory), Small(), layout, devices, limit_val_batches=0)[1]
    return {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("ft/")}


def test_every_rank_writes_its_own_file(pool: WorkerPool, tmp_path: Path) -> None:
    metrics = pool.run(2, on_each_rank, {"pp": 2}, 2, str(tmp_path))
    assert all(m["ft/restarts_total"] == 0 and 0 < m["ft/goodput"] < 1 for m in metrics)
    files = sorted((tmp_path / "events").iterdir())
    assert [f.name for f in files] == ["rank_00000.jsonl", "rank_00001.jsonl"]
    events = read_events(tmp_path)
    assert len({e["run"] for e in events}) == 1
    assert [e["layout"]["pp"] for e in events if e["kind"] == "start"] == [2, 2]
    losses = {
        rank: [e["loss"] for e in events if e["kind"] == "step" and e["rank"] == rank]
        for rank in (0, 1)
    }
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


def test_steps_may_share_a_line_and_batches_a_step(tmp_path: Path) -> None:
    writer, _ = fit(
        tmp_path,
        Slow(),
        accumulate_grad_batches=2,
        max_epochs=5,
        limit_val_batches=0,
        log_every_n_steps=4,
        writer={"every_n_steps": 3},
    )
    steps = [e for e in read_events(tmp_path) if e["kind"] == "step"]
    assert [(e["step"], e.get("steps", 1), e["tokens"]) for e in steps] == [
        (3, 3, 48),
        (4, 1, 16),
        (7, 3, 48),
        (8, 1, 16),
    ]
    assert writer.ledger.attempts[0].to_step == 8


def test_under_plain_lightning_with_a_logger_and_other_options(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "csv")
    options = {"logger": logger, "limit_val_batches": 0, "writer": {"run_dir": tmp_path / "else"}}
    trainer = fit(tmp_path, Slow(), **options)[1]
    logger.save()
    assert "ft/goodput" in Path(logger.log_dir, "metrics.csv").read_text()
    events = read_events(tmp_path / "else")
    assert events[0]["layout"] is None
    assert set(events[1]["sections"]) == {"data"}
    trainer.validate(Slow(), loader())
    assert len(read_events(tmp_path / "else")) == len(events)
    with pytest.raises(ConfigError, match="every_n_steps=0"):
        EventLogWriter(every_n_steps=0)


class LogsItsStep(pl.Callback):
    """Stands behind the writer in the list of callbacks."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.log("seen/step", float(trainer.global_step))


def test_a_window_holds_what_callbacks_log_after_the_writer(tmp_path: Path) -> None:
    writer = EventLogWriter(tmp_path)
    trainer = make_trainer({}, callbacks=[writer, LogsItsStep()], log_every_n_steps=2)
    trainer.fit(Small(), loader(), loader())
    windows = [e for e in read_events(tmp_path) if e["kind"] == "window"]
    assert [(e["step"], e["metrics"]["seen/step"]) for e in windows] == [(2, 2.0), (4, 4.0)]


def test_sections_of_a_step_add_up_to_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Time()
    monkeypatch.setattr(event_log, "time", SimpleNamespace(perf_counter=now))

    class Logs(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            now.now += 0.25  # belongs to the next step

    class Paced(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            now.now += 0.5
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            now.now += 4.0

    trainer = make_trainer({}, callbacks=[EventLogWriter(tmp_path), Logs()])
    trainer.strategy.clock = SectionClock(now)
    trainer.fit(Paced(), loader(), loader())
    steps = [e for e in read_events(tmp_path) if e["kind"] == "step"]
    assert [step["seconds"] for step in steps] == [0.5, 0.75, 0.75, 0.75]
    for step in steps:
        inside = {n: s for n, s in step["sections"].items() if n not in ("validation", "save")}
        assert sum(inside.values()) == pytest.approx(step["seconds"]), step


def test_a_second_run_of_one_process_is_another(tmp_path: Path) -> None:
    for _ in range(2):
        writer, trainer = fit(tmp_path, Slow(), {}, limit_val_batches=0)
        assert float(trainer.callback_metrics["ft/steps_lost_total"]) == 0
        assert len(writer.ledger.attempts) == 1


def test_a_directory_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events").write_text("in the way")
    writer, trainer = fit(tmp_path, Slow(), limit_val_batches=0)
    assert trainer.global_step == 4
    assert caplog.text.count("could not be written") == 1
    assert writer.ledger.productive_s >= 0.08


def test_a_loss_that_is_no_number_is_written(tmp_path: Path) -> None:
    class Bad(Small):
        def loss(self, batch: Any) -> Any:
            return super().loss(batch) * torch.nan

    fit(tmp_path, Bad(), limit_val_batches=0)
    assert [e["loss"] for e in read_events(tmp_path) if e["kind"] == "step"] == ["NaN"] * 4
