import json
import logging
import math
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.alert_rules import Rule, RuleState
from lightning_megatron.monitoring.alerts import BackgroundActions, post, shown_url


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("perf/mfu < 0.3", Rule("perf/mfu", "<", 0.3)),
        ("perf/tokens_per_s<1e3 for 20", Rule("perf/tokens_per_s", "<", 1000, 20)),
        (" loss >= -1.5 for 2 steps ", Rule("loss", ">=", -1.5, 2)),
        ("a != 0 -> log", Rule("a", "!=", 0)),
        ("a == 1 for 3 -> https://host/x?y=z", Rule("a", "==", 1, 3, "https://host/x?y=z")),
    ],
)
def test_rules_as_texts(text: str, rule: Rule) -> None:
    assert Rule.parse(text) == rule
    assert rule.problems() == []
    assert Rule.parse(str(rule)) == Rule(rule.metric, rule.op, rule.threshold, rule.for_steps)


@pytest.mark.parametrize("text", ["", "perf/mfu", "a < b", "a < 1 for x", "a << 1", "a < 1 -> "])
def test_texts_that_are_no_rules(text: str) -> None:
    with pytest.raises(ConfigError, match="must be METRIC OP NUMBER"):
        Rule.parse(text)


def test_faults_of_rules() -> None:
    found = Rule("a", "=<", math.inf, 0, "ftp://host").problems()
    assert [p.split(": ", 1)[1].split(" must")[0] for p in found] == [
        "'=<'",
        "the threshold inf",
        "for_steps=0",
        "the action 'ftp://host'",
    ]


def looks(rule: Rule, values: list[float | None], passed: int = 1) -> list[tuple[int, bool]]:
    """Looks at which there was an alert, and whether it was resolved then."""
    state, found = RuleState(rule), []
    for i, value in enumerate(values, 1):
        alert = state.look({} if value is None else {"a": value}, i * passed, passed)
        if alert is not None:
            found.append((alert.step, alert.resolved))
    return found


def test_a_rule_speaks_once_until_it_was_false() -> None:
    rule = Rule("a", "<", 1, for_steps=3)
    assert looks(rule, [0, 0, 0, 0, 0]) == [(3, False)]
    assert looks(rule, [0, 0, 1, 0, 0, math.nan, 0, 0]) == []
    assert looks(rule, [0, 0, None, 0, 0, 1, 1, 0, 0, 0]) == [(4, False), (6, True), (10, False)]
    assert looks(Rule("a", ">", 1), [2, 2, 0, 2]) == [(1, False), (3, True), (4, False)]
    assert looks(Rule("a", "<", 1, for_steps=20), [0] * 5, passed=10) == [(20, False)]


def test_the_text_of_an_alert() -> None:
    state = RuleState(Rule("perf/mfu", "<", 0.3, 2))
    state.look({"perf/mfu": 0.2}, 1, 1)
    alert = state.look({"perf/mfu": 0.25}, 2, 1)
    assert str(alert) == "alert: perf/mfu < 0.3 for 2 (step 2: perf/mfu = 0.25)"
    assert str(state.look({"perf/mfu": 0.4}, 3, 1)).startswith("no longer: perf/mfu < 0.3")


def test_actions_neither_hold_up_training_nor_end_it(caplog: pytest.LogCaptureFixture) -> None:
    actions, gate, done = BackgroundActions(length=2), threading.Event(), []
    taken = threading.Event()

    def fail() -> None:
        raise OSError("nobody there")

    def wait() -> None:
        taken.set()
        gate.wait(60)

    actions.submit("waiting", wait)
    assert taken.wait(60)
    for i in range(2):
        actions.submit("work", lambda i=i: done.append(i))
    actions.submit("work", lambda: done.append("too many"))
    assert actions.dropped == 1
    assert not actions.drain(0.05)
    gate.set()
    assert actions.drain(60)
    for _ in range(3):
        actions.submit("failing", fail)
        assert actions.drain(60)
    assert done == [0, 1]
    assert [r.levelno for r in caplog.records] == [logging.WARNING] * 2
    assert "failing failed: OSError: nobody there" in caplog.text


class Received(BaseHTTPRequestHandler):
    bodies: list[Any] = []

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


def test_posting() -> None:
    server = HTTPServer(("127.0.0.1", 0), Received)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    post(f"http://127.0.0.1:{server.server_port}/secret", {"value": 1.5})
    thread.join(60)
    server.server_close()
    assert Received.bodies == [{"value": 1.5}]
    assert shown_url("https://me:word@hooks.example.com/T0/secret?x=1") == (
        "https://hooks.example.com/..."
    )
