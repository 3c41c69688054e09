"""Somebody is told when a metric crosses a threshold."""

import difflib
import functools
import logging
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict

import lightning.pytorch as pl
from typing_extensions import override

from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.monitoring.alert_rules import Alert, Rule, RuleState
from lightning_megatron.monitoring.background_task import Courier, post, shown_url
from lightning_megatron.monitoring.window import WindowCallback
from lightning_megatron.services import events_of

logger = logging.getLogger(__name__)

_UNSEEN_WINDOWS = 10
"""Windows without a value of a metric after which its name is doubted."""
_LAST_WORDS_S = 5.0
"""Seconds that the end of a run waits for alerts that are on their way."""


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
        self._courier = Courier()
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._states = [RuleState(rule) for rule in self.rules]
        self._windows, self._step = 0, step

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
                _doubt(state.rule, metrics)

    def _raise(self, trainer: pl.Trainer, rule: Rule, alert: Alert) -> None:
        log = events_of(trainer)
        log.write("alert", **asdict(alert))
        if callable(rule.action):
            name = getattr(rule.action, "__name__", type(rule.action).__name__)
            self._courier.send(f"the action {name}", functools.partial(rule.action, alert))
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
            self._courier.send(f"posting an alert to {shown_url(str(rule.action))}", work)
        else:
            logger.warning("%s", alert)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._courier.drain(_LAST_WORDS_S)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._courier.drain(_LAST_WORDS_S)


def _doubt(rule: Rule, metrics: dict[str, float]) -> None:
    near = difflib.get_close_matches(rule.metric, metrics, 1)
    logger.warning(
        "the rule %s waits for a metric that nobody has logged; %s",
        rule,
        f"nearest: {near[0]}" if near else f"there are {', '.join(sorted(metrics)) or 'none'}",
    )
