"""Who may read the endpoint, and the names of what is there."""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from lightning_megatron.monitoring import metrics_server
from lightning_megatron.monitoring.metrics_server import (
    Guard,
    MetricsServer,
    health_page,
    is_loopback,
)
from lightning_megatron.monitoring.prometheus import exposed, is_ours


def page(request: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"numbers"]


@pytest.fixture(scope="module")
def server() -> Iterator[MetricsServer]:
    guard = Guard({"/metrics": page})
    running = MetricsServer(guard, "127.0.0.1", 0)
    yield running
    running.close()


def ask(server: MetricsServer, method: str, path: str, body: Any = None, **headers: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_pages_and_nothing_else(server: MetricsServer) -> None:
    assert ask(server, "GET", "/metrics") == (200, b"numbers")
    assert ask(server, "GET", "/metrics?name=x") == (200, b"numbers")
    assert ask(server, "HEAD", "/metrics")[0] == 200
    for path in ("/", "/metrics/", "/../etc/passwd", "/etc/passwd"):
        assert ask(server, "GET", path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "BREW"):
        assert ask(server, method, "/metrics")[0] == 405


@pytest.mark.parametrize("host", ["example.com", "example.com:9400", "10.0.0.1", "", "[::2]"])
def test_a_page_of_another_host_is_refused(server: MetricsServer, host: str) -> None:
    assert ask(server, "GET", "/metrics", Host=host) == (403, b"403 Forbidden\n")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:9400"])
def test_names_of_this_machine_are_not(server: MetricsServer, host: str) -> None:
    assert ask(server, "GET", "/metrics", Host=host)[0] == 200


def test_a_client_that_says_nothing_is_cut_off(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.05)
    with socket.create_connection(("127.0.0.1", server.port), 60) as silent:
        assert ask(server, "GET", "/metrics")[0] == 200  # in the meantime
        assert silent.recv(1) == b""


def test_a_port_in_use_is_an_error(server: MetricsServer) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsServer(Guard({}), "127.0.0.1", server.port)


def test_a_token_lets_in_from_anywhere_and_nothing_else_does() -> None:
    server = MetricsServer(Guard({"/metrics": page}, "a" * 16), "127.0.0.1", 0)
    good = f"Bearer {'a' * 16}"
    assert ask(server, "GET", "/metrics", Host="node1", Authorization=good)[0] == 200
    assert ask(server, "GET", "/metrics")[0] == 401
    for given in ("Bearer", "Bearer " + "a" * 15, "Bearer \xe9", good + "a"):
        assert ask(server, "GET", "/metrics", Authorization=given)[0] == 401
    server.close()
    with pytest.raises(OSError, match="refused"):
        ask(server, "GET", "/metrics")


def test_health() -> None:
    for good, status in ((True, 200), (False, 503)):
        guard = Guard({"/healthz": health_page(lambda good=good: (good, {"step": 3}))})
        server = MetricsServer(guard, "127.0.0.1", 0)
        found, body = ask(server, "GET", "/healthz")
        assert (found, json.loads(body)) == (status, {"step": 3})
        server.close()


def test_what_only_this_machine_can_reach() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "localhost", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "", "*")))


@pytest.mark.parametrize(
    ("metric", "name", "factor", "counter"),
    [
        ("perf/tokens_per_s", "perf_tokens_per_second", 1, False),
        ("perf/tokens_per_s_per_device", "perf_tokens_per_second_per_device", 1, False),
        ("time/data_wait_s", "time_data_wait_seconds", 1, False),
        ("time/data_wait_fraction", "time_data_wait_ratio", 1, False),
        ("mem/peak_rss_gib", "mem_peak_rss_bytes", 2**30, False),
        ("ckpt/GB_per_s", "ckpt_bytes_per_second", 1e9, False),
        ("comm/mib/tp", "comm_bytes_tp", 2**20, False),
        ("time/comm_exposed_s/dp", "time_comm_exposed_seconds_dp", 1, False),
        ("comm/wait_ms", "comm_wait_seconds", 1e-3, False),
        ("ft/steps_lost_total", "ft_steps_lost", 1, True),
        ("loss/max over ranks", "loss_max_over_ranks", 1, False),
        ("perf/mfu", "perf_mfu", 1, False),
    ],
)
def test_names(metric: str, name: str, factor: float, counter: bool) -> None:
    assert exposed(metric) == (f"lightning_megatron_{name}", factor, counter)


def test_which_metrics_are_ours() -> None:
    assert is_ours("perf/mfu")
    assert not is_ours("perf")
    assert not is_ours("train/loss")
