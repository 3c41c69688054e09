"""`PrometheusEndpoint` serves what was logged and whether the run is alive, whatever happens."""

import contextlib
import http.client
import json
import logging
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.event_log import EventLogWriter
from lightning_megatron.monitoring.prometheus import PrometheusEndpoint
from tests.strategy.small import Small, loader, make_trainer


class Watched(Small):
    """Logs under names of all kinds; fetches the pages after the step that it is told."""

    def __init__(self, endpoint: PrometheusEndpoint, at: int = 3, **headers: str) -> None:
        super().__init__()
        self.endpoint, self.at, self.headers = endpoint, at, headers
        self.pages: dict[str, tuple[int, str]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == self.at and self.endpoint.url:
            self.pages = {page: self.fetch(page) for page in ("/metrics", "/healthz")}
        values = {"perf/tokens_per_s": 1200.5, "mem/rss_gib": 2.0, "other": 1.0}
        self.log_dict({**values, "straggler/found_total": 3.0, "train_loss": float("nan")})
        return super().training_step(batch, batch_idx)

    def fetch(self, page: str) -> tuple[int, str]:
        request = urllib.request.Request(str(self.endpoint.url) + page, headers=self.headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


def samples(text: str) -> dict[str, float]:
    """The numbers of the text format, read by a parser of its own."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP|TYPE) [a-z_0-9:]+ .*", line), line
            continue
        match = re.fullmatch(
            r"([a-z_0-9]+(?:\{[a-z]+=\"[^\"]*\"(?:,[a-z]+=\"[^\"]*\")*\})?) (\S+)", line
        )
        assert match, line
        assert match[1] not in found
        found[match[1]] = float(match[2])
    return found


def test_metrics_of_a_run(tmp_path: Path) -> None:
    endpoint = PrometheusEndpoint(port=0)
    module = Watched(endpoint)
    callbacks = [endpoint, EventLogWriter(tmp_path)]
    trainer = make_trainer({}, callbacks=callbacks, log_every_n_steps=1)
    trainer.fit(module, loader())
    status, text = module.pages["/metrics"]
    assert status == 200
    found = samples(text)
    prefix = "lightning_megatron_"
    assert found[prefix + "perf_tokens_per_second"] == 1200.5
    assert found[prefix + "mem_rss_bytes"] == 2 * 2**30
    assert found[prefix + "ft_restarts_total"] == 0
    assert found[prefix + "straggler_found_total"] == 3
    assert "# TYPE lightning_megatron_straggler_found_total counter" in text
    assert "# TYPE lightning_megatron_perf_tokens_per_second gauge" in text
    assert str(found[prefix + "train_loss"]) == "nan"
    assert found[prefix + "step"] == 3
    assert 0 <= found[prefix + "seconds_since_progress"] < 60
    assert found[prefix + 'events_total{kind="step"}'] == 3
    assert not any("other" in name for name in found)
    assert any(name.startswith(prefix + "run_info{") for name in found)
    status, text = module.pages["/healthz"]
    health = json.loads(text)
    assert (status, health["status"], health["section"]) == (200, "ok", "forward")
    assert endpoint.url is None  # it is gone with the run


def test_health_of_a_run_that_stands_still() -> None:
    class Still(Watched):
        def fetch(self, page: str) -> tuple[int, str]:
            time.sleep(0.2)
            return super().fetch(page)

    endpoint = PrometheusEndpoint(port=0, stale_s=0.15)
    module = Still(endpoint)
    make_trainer(None, callbacks=[endpoint]).fit(module, loader())
    status, text = module.pages["/healthz"]
    assert status == 503
    assert json.loads(text)["seconds_since_progress"] > 0.15


def test_a_port_in_use_costs_one_warning_and_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_megatron.monitoring.prometheus._RETRY_S", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        endpoint = PrometheusEndpoint(port=port)
        trainer = make_trainer(None, callbacks=[endpoint])
        trainer.fit(Small(), loader())
        assert trainer.global_step == 4
        (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert f"PrometheusEndpoint(port={port}): 127.0.0.1 is not served" in record.message
        assert "the port is in use; training goes on" in record.message
        assert "port=0, which takes any" in record.message

        class Waiting(Watched):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                if batch_idx == 2:
                    other.close()
                    until = time.monotonic() + 60
                    while endpoint.url is None and time.monotonic() < until:
                        time.sleep(0.02)

        module = Waiting(endpoint)
        make_trainer(None, callbacks=[endpoint]).fit(module, loader())
        assert module.pages["/metrics"][0] == 200


def test_the_endpoint_of_a_run_that_fails_is_gone_and_serves_the_next() -> None:
    class Failing(Watched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("bad sample")

    endpoint = PrometheusEndpoint(port=0)
    with pytest.raises(ValueError, match="bad sample"):
        make_trainer({}, callbacks=[endpoint]).fit(Failing(endpoint), loader())
    assert endpoint.url is None
    module = Watched(endpoint)
    make_trainer({}, callbacks=[endpoint]).fit(module, loader())
    assert samples(module.pages["/metrics"][1])["lightning_megatron_step"] == 3


class Asked(Small):
    """Is asked for its metrics by several clients, in every step again."""

    def __init__(self, endpoint: PrometheusEndpoint | None) -> None:
        super().__init__()
        self.endpoint = endpoint
        self.answers: set[tuple[str, str, int]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.endpoint is not None:
            asked = [
                (how, host) for how in ("GET", "POST") for host in ("localhost", "example.com")
            ]
            clients = [threading.Thread(target=self.ask, args=each) for each in asked * 4]
            for client in clients:
                client.start()
            for client in clients:
                client.join(60)
        return super().training_step(batch, batch_idx)

    def ask(self, method: str, host: str) -> None:
        port = int(str(getattr(self.endpoint, "url", "")).rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, "/metrics", headers={"Host": host})
            self.answers.add((method, host, connection.getresponse().status))


def test_clients_change_no_weight() -> None:
    expected, endpoint = Asked(None), PrometheusEndpoint(port=0)
    asked = Asked(endpoint)
    make_trainer({}).fit(expected, loader())
    make_trainer({}, callbacks=[endpoint]).fit(asked, loader())
    assert asked.answers == {
        *{("GET", "localhost", 200), ("GET", "example.com", 403)},
        *{("POST", "localhost", 405), ("POST", "example.com", 405)},
    }
    found = dict(asked.named_parameters())
    assert all(torch.equal(p, found[name]) for name, p in expected.named_parameters())


def test_a_token_from_a_file(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("0123456789abcdef\n")
    for headers, status in (({}, 401), ({"Authorization": "Bearer 0123456789abcdef"}, 200)):
        endpoint = PrometheusEndpoint(port=0, host="0.0.0.0", token=f"@{secret}")
        module = Watched(endpoint, **headers)
        make_trainer(None, callbacks=[endpoint]).fit(module, loader())
        assert [status for status, _ in module.pages.values()] == [status] * 2


def test_wrong_options(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0.0.0.0", "::", "node7"):
        with pytest.raises(ConfigError, match="without a token: other machines"):
            PrometheusEndpoint(host=host)
    with pytest.raises(ConfigError, match="port=-1(.|\n)*token of 5 characters(.|\n)*stale_s=0"):
        PrometheusEndpoint(port=-1, token="short", stale_s=0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-megatron\[monitor\]'"):
        PrometheusEndpoint()
