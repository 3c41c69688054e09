"""Rules on metrics with an action each: a log line, a webhook or a function.

`Alerts` checks the rules of `alert_rules` each time that metrics are logged. Webhooks and functions
run in a daemon thread with a bounded queue: an action that is slow or fails neither holds up
training nor ends it, and each kind of failure costs one warning.
"""

import difflib
import functools
import json
import logging
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import lightning.pytorch as pl
from typing_extensions import override

from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.monitoring.alert_rules import Alert, Rule, RuleState
from lightning_megatron.monitoring.window import WindowCallback
from lightning_megatron.services import events_of

logger = logging.getLogger(__name__)

_UNSEEN_WINDOWS = 10
"""Windows without a value of a metric after which a warning says so."""
_DRAIN_S = 5.0
"""Seconds that the end of a run waits for actions under way."""
_POST_TIMEOUT_S = 5.0


class Alerts(WindowCallback):
    """Holds rules against everything that is logged; under any strategy, on global rank 0.

    A rule that comes true, and the same rule when it is no longer, makes an event (kind ``alert``)
    and what its action says. Webhooks and functions run in a thread of their own: they neither
    hold up training nor make it fail.

    Args:
        rules: `Rule`s or texts like ``"perf/tokens_per_s < 1000 for 20 -> https://..."``.
        every_n_steps: how often to look; by default the Trainer's ``log_every_n_steps``. What is
            seen then stands for the steps since the last look.

    Attributes:
        rules: those given.

    Raises:
        ConfigError: a rule is none.
    """

    def __init__(self, rules: Sequence[Rule | str], every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self.rules: list[Rule] = []
        problems: list[str] = []
        for rule in rules:
            try:
                self.rules.append(Rule.parse(rule) if isinstance(rule, str) else rule)
            except ConfigError as error:
                problems += error.problems
        raise_if_any([*problems, *(p for rule in self.rules for p in rule.problems())])
        self._actions = BackgroundActions()
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._states = [RuleState(rule) for rule in self.rules]
        self._windows = 0
        self._step = step

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._begin(trainer.global_step)

    @override
    def on_window(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, metrics: dict[str, float]
    ) -> None:
        if not trainer.is_global_zero:
            return
        step, passed = trainer.global_step, trainer.global_step - self._step
        self._step = step
        self._windows += 1
        for state in self._states:
            alert = state.look(metrics, step, passed)
            if alert is not None:
                self._raise(trainer, state.rule, alert)
            if self._windows == _UNSEEN_WINDOWS and not state.seen:
                _warn_of_unknown_metric(state.rule, metrics)

    def _raise(self, trainer: pl.Trainer, rule: Rule, alert: Alert) -> None:
        log = events_of(trainer)
        log.write("alert", **asdict(alert))
        if callable(rule.action):
            name = getattr(rule.action, "__name__", type(rule.action).__name__)
            self._actions.submit(f"the action {name}", functools.partial(rule.action, alert))
        elif rule.posts:
            content = {
                **asdict(alert),
                "text": str(alert),
                "run": log.run,
                "attempt": log.attempt,
                "host": socket.gethostname(),
                "t": time.time(),
            }
            work = functools.partial(post, str(rule.action), content)
            self._actions.submit(f"posting an alert to {shown_url(str(rule.action))}", work)
        else:
            logger.warning("%s", alert)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._actions.drain(_DRAIN_S)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._actions.drain(_DRAIN_S)


def _warn_of_unknown_metric(rule: Rule, metrics: dict[str, float]) -> None:
    near = difflib.get_close_matches(rule.metric, metrics, 1)
    logger.warning(
        "the rule %s waits for a metric that nobody has logged; %s",
        rule,
        f"nearest: {near[0]}" if near else f"there are {', '.join(sorted(metrics)) or 'none'}",
    )


class BackgroundActions:
    """Runs functions one after the other in a daemon thread.

    Args:
        length: how many may wait.

    Attributes:
        dropped: how many did not fit.
    """

    def __init__(self, length: int = 100) -> None:
        self.dropped = 0
        self._queue: queue.Queue[tuple[str, Callable[[], Any]]] = queue.Queue(length)
        self._thread: threading.Thread | None = None
        self._reported: set[str] = set()

    def submit(self, name: str, work: Callable[[], Any]) -> None:
        """Have ``work`` called soon; ``name`` is how a failure is reported."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((name, work))
        except queue.Full:
            self.dropped += 1
            self._report(name, "too many are waiting")

    def drain(self, timeout_s: float) -> bool:
        """Wait until all is done, or not longer; returns whether it is."""
        until = time.monotonic() + timeout_s
        while self._queue.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)
        return not self._queue.unfinished_tasks

    def _run(self) -> None:
        while True:
            name, work = self._queue.get()
            try:
                work()
            except Exception as error:
                self._report(name, f"{type(error).__name__}: {error}")
            finally:
                self._queue.task_done()

    def _report(self, name: str, why: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            message = "%s failed: %s; training goes on, further failures are not reported"
            logger.warning(message, name, why)


def post(url: str, content: Mapping[str, Any], timeout_s: float = _POST_TIMEOUT_S) -> None:
    """Post JSON."""
    body = json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        answer.read(1024)


def shown_url(url: str) -> str:
    """The part of a URL that is no secret: webhooks carry theirs in the path."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}/..."
