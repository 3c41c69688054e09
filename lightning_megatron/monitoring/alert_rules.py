"""Rules: thresholds on metrics, and the number of steps for which they must be crossed."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_megatron.errors import ConfigError

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
LOG = "log"
_TEXT = re.compile(
    r"\s*(?P<metric>[^\s<>=!]+)\s*(?P<op><=|>=|==|!=|<|>)\s*(?P<threshold>\S+)"
    r"(?:\s+for\s+(?P<steps>\d+)(?:\s+steps?)?)?(?:\s*->\s*(?P<action>\S+))?\s*"
)


@dataclass(frozen=True)
class Alert:
    """Alert: a rule that holds, or that no longer does."""

    rule: str
    """The rule as a text."""
    metric: str
    value: float
    step: int
    """Optimizer steps done."""
    resolved: bool = False
    """Whether the rule no longer holds."""

    def __str__(self) -> str:
        state = "no longer" if self.resolved else "alert"
        return f"{state}: {self.rule} (step {self.step}: {self.metric} = {self.value:.6g})"


@dataclass(frozen=True)
class Rule:
    """``Rule("perf/mfu", "<", 0.3, for_steps=20)``, in short ``"perf/mfu < 0.3 for 20"``."""

    metric: str
    """Any metric that is logged."""
    op: str
    """``<``, ``<=``, ``>``, ``>=``, ``==`` or ``!=``; none of them is true of what is no number."""
    threshold: float
    """Value to compare with."""
    for_steps: int = 1
    """Optimizer steps in a row for which it must hold."""
    action: str | Callable[[Alert], Any] = LOG
    """Action beside the event: ``"log"``, a line in the log; a URL, to which the alert is
    posted as JSON; or a function, which is called with the `Alert` in another thread."""

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Make a rule of ``METRIC OP NUMBER [for STEPS] [-> log|URL]``."""
        match = _TEXT.fullmatch(text)
        try:
            if match is not None:
                steps, action = int(match["steps"] or 1), match["action"] or LOG
                return cls(match["metric"], match["op"], float(match["threshold"]), steps, action)
        except ValueError:
            pass
        raise ConfigError(
            f"rule {text!r}: must be METRIC OP NUMBER [for STEPS] [-> log|URL]; nearest valid: "
            "'perf/tokens_per_s < 1000 for 20'"
        )

    def __str__(self) -> str:
        steps = f" for {self.for_steps}" if self.for_steps > 1 else ""
        return f"{self.metric} {self.op} {self.threshold:g}{steps}"

    def problems(self) -> list[str]:
        """Problems of the rule."""
        problems = []
        if self.op not in _COMPARE:
            problems.append(
                f"rule on {self.metric}: {self.op!r} must be one of {' '.join(_COMPARE)}; nearest "
                "valid: '<'"
            )
        if not math.isfinite(self.threshold):
            problems.append(
                f"rule on {self.metric}: the threshold {self.threshold} must be finite; nearest "
                "valid: 0"
            )
        if self.for_steps < 1:
            problems.append(
                f"rule on {self.metric}: for_steps={self.for_steps} must be at least 1; nearest "
                "valid: 1"
            )
        if isinstance(self.action, str) and self.action != LOG and not self.posts:
            problems.append(
                f"rule on {self.metric}: the action {self.action!r} must be 'log', a URL that "
                "begins with http:// or https://, or a function; nearest valid: 'log'"
            )
        return problems

    @property
    def posts(self) -> bool:
        """Whether the action is a URL."""
        return isinstance(self.action, str) and self.action.startswith(("http://", "https://"))

    def holds(self, value: float) -> bool:
        """Whether it holds for a value."""
        return not math.isnan(value) and _COMPARE[self.op](value, self.threshold)


class RuleState:
    """Number of steps for which a rule holds; alerts once, and again after it did not hold.

    Args:
        rule: this one.

    Attributes:
        seen: whether there was ever a value.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.seen = False
        self._steps = 0
        self._told = False

    def look(self, metrics: Mapping[str, float], step: int, passed: int) -> Alert | None:
        """Check new values.

        Args:
            metrics: all that is known.
            step: optimizer steps done.
            passed: how many of them since the last look, which the values stand for.
        """
        value = metrics.get(self.rule.metric)
        if value is None:
            return None
        self.seen = True
        if not self.rule.holds(value):
            self._steps = 0
            told, self._told = self._told, False
            return self._alert(value, step, resolved=True) if told else None
        self._steps += passed
        if self._told or self._steps < self.rule.for_steps:
            return None
        self._told = True
        return self._alert(value, step)

    def _alert(self, value: float, step: int, resolved: bool = False) -> Alert:
        return Alert(str(self.rule), self.rule.metric, value, step, resolved)
