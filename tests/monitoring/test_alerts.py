"""Alerts, the console line and guarded loggers, in runs."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.alert_rules import Alert, Rule
from lightning_megatron.monitoring.alerts import Alerts
from lightning_megatron.monitoring.console import ConsoleLine, console_line, training_loss
from lightning_megatron.monitoring.event_log import EventLogWriter
from lightning_megatron.monitoring.logger_guard import LoggerGuard
from lightning_megatron.run_log.events import read_events
from tests.strategy.small import Small, loader, make_trainer


class Counting(Small):
    """Logs the number of its steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"train_loss": 2.0, "count": float(self.trainer.global_step + 1)})
        return super().training_step(batch, batch_idx)


def test_actions_neither_hold_up_nor_fail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Alert] = []

    def slow(alert: Alert) -> None:
        time.sleep(0.3)
        told.append(alert)

    def broken(alert: Alert) -> None:
        raise RuntimeError("no pager")

    rules: list[Rule | str] = [
        "count > 2 for 2",
        Rule("count", ">=", 2, action=slow),
        Rule("count", ">=", 2, action=broken),
        "count < 3 -> http://127.0.0.1:9/secret",
    ]
    alerts = Alerts(rules, every_n_steps=1)
    trainer = make_trainer(None, callbacks=[alerts, EventLogWriter(tmp_path)])
    trainer.fit(Counting(), loader())
    assert trainer.global_step == 4
    assert [(a.metric, a.value, a.step) for a in told] == [("count", 2.0, 2)]
    events = [e for e in read_events(tmp_path) if e["kind"] == "alert"]
    assert [(e["step"], e["rule"], e["resolved"]) for e in events] == [
        (1, "count < 3", False),
        (2, "count >= 2", False),
        (2, "count >= 2", False),
        (3, "count < 3", True),
        (4, "count > 2 for 2", False),
    ]
    messages = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "alert: count > 2 for 2 (step 4: count = 4)" in messages
    assert sum("the action broken failed: RuntimeError: no pager" in m for m in messages) == 1
    assert sum("posting an alert to http://127.0.0.1/... failed" in m for m in messages) == 1
    assert "secret" not in caplog.text


def test_a_metric_that_nobody_logs_is_doubted(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(None, callbacks=[Alerts(["cuont > 2"], 1)], max_epochs=4)
    trainer.fit(Counting(), loader())
    doubts = [r.message for r in caplog.records if "nobody has logged" in r.message]
    assert doubts == [
        "the rule cuont > 2 waits for a metric that nobody has logged; nearest: count"
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rules_from_a_configuration_and_wrong_ones() -> None:
    parser = LightningArgumentParser()
    parser.add_class_arguments(Alerts, "alerts")
    given = parser.parse_args(["--alerts.rules=['perf/mfu < 0.3 for 20 -> https://host/x']"])
    made = parser.instantiate_classes(given)["alerts"]
    assert made.rules == [Rule("perf/mfu", "<", 0.3, 20, "https://host/x")]
    with pytest.raises(ConfigError, match="2 options are wrong"):
        Alerts(["perf/mfu", Rule("a", "~", 1)])
    with pytest.raises(ConfigError, match="every_n_steps=0"):
        Alerts([], every_n_steps=0)


def test_the_console_line(caplog: pytest.LogCaptureFixture) -> None:
    metrics = {
        **{"val_loss": 1.0, "optim/loss_scale": 2.0, "train_loss": 2.0312, "train_loss_epoch": 3.0},
        **{"perf/tokens_per_s": 6412.0, "perf/mfu": 0.4123, "time/data_wait_fraction": 0.013},
        "ft/goodput": 0.978,
    }
    assert console_line(1200, 5000, metrics) == (
        "step 1,200 of 5,000 | loss 2.031 | 6.41k tokens/s | MFU 41.2 % | data wait 1.3 % | "
        "goodput 97.8 %"
    )
    assert console_line(7, -1, {}) == "step 7"
    assert training_loss({"val_loss": 1.0, "accuracy": 0.5}) is None
    trainer = make_trainer({}, callbacks=[ConsoleLine(2)], max_epochs=2, limit_train_batches=3)
    trainer.fit(Counting(), loader())
    lines = [r.message for r in caplog.records if r.message.startswith("step ")]
    assert lines == [f"step {step} | loss 2" for step in (2, 4, 6)]


class Broken(CSVLogger):
    """Raises in every method that the Trainer calls while it runs."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    def save(self) -> None:
        raise ConnectionError("offline")

    def finalize(self, status: str) -> None:
        raise ValueError(status)


def test_a_logger_that_raises_ends_no_run_that_is_guarded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard, bad, good = LoggerGuard(), Broken(tmp_path / "bad"), CSVLogger(tmp_path / "good")
    trainer = make_trainer(None, callbacks=[guard], logger=[bad, good], log_every_n_steps=1)
    trainer.fit(Counting(), loader())
    assert trainer.global_step == 4
    assert guard.failures["Broken.log_metrics"] == 4
    assert guard.failures["Broken.finalize"] == 1
    warnings = [r.message for r in caplog.records if "failed: " in r.message]
    assert len(warnings) == len(guard.failures)
    assert "Broken.log_metrics failed: OSError: [Errno 28] No space left" in "\n".join(warnings)
    assert "train_loss" in Path(good.log_dir, "metrics.csv").read_text()
    assert isinstance(bad, CSVLogger)
    assert "log_metrics" not in vars(bad)
    assert "log_metrics" not in vars(good)
    with pytest.raises(ConnectionError, match="offline"):
        make_trainer(None, logger=bad, log_every_n_steps=1).fit(Counting(), loader())
