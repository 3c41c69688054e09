"""Callbacks reach the strategy by names that mypy knows."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

import lightning_megatron
from lightning_megatron import (
    CommunicationMonitor,
    GradientMonitor,
    GradientNoiseScale,
    HangDetector,
    MegatronStrategy,
    NumberGuard,
    ParameterNorm,
    Preemption,
    ReplicaCheck,
    SlowRankDetector,
)
from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.rank_stats import rank_metrics_of
from lightning_megatron.services import events_of, services_if_any, services_of

ROOT = Path(lightning_megatron.__file__).parent
FOLDERS = ("callbacks", "fault_tolerance", "monitoring")
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}
"""Functions whose argument is the name of an attribute, where mypy does not see it."""


def is_strategy(node: ast.AST | None) -> bool:
    """Whether an expression is ``trainer.strategy``, or a variable that is named after it."""
    if isinstance(node, ast.Name):
        return node.id == "strategy"
    return isinstance(node, ast.Attribute) and node.attr.lstrip("_") == "strategy"


def is_any(annotation: ast.expr | None) -> bool:
    return annotation is not None and "Any" in ast.unparse(annotation).split(" | ")


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions that a statement assigns to or deletes, those of tuples one by one."""
    if isinstance(node, ast.Assign | ast.Delete):
        found = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        found = [node.target]
    else:
        return
    while found:
        target = found.pop()
        if isinstance(target, ast.Tuple | ast.List):
            found += target.elts
        else:
            yield target


def untyped_uses(tree: ast.AST) -> list[int]:
    """Lines that reach the strategy where mypy cannot follow."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            untyped = is_any(node.annotation) and (
                is_strategy(node.value) or is_strategy(node.target)
            )
        elif isinstance(node, ast.arg):
            untyped = node.arg == "strategy" and is_any(node.annotation)
        elif isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            subject = node.args[0] if node.args else None
            if isinstance(subject, ast.Call) and ast.unparse(subject.func) == "type":
                subject = subject.args[0]  # hasattr(type(strategy), "topology")
            untyped = called in BY_NAME and is_strategy(subject)
            untyped |= called == "cast" and len(node.args) == 2 and is_strategy(node.args[1])
        else:
            untyped = False
        set_here = (target for target in targets_of(node) if isinstance(target, ast.Attribute))
        if untyped or any(is_strategy(target.value) for target in set_here):
            lines.append(node.lineno)
    return lines


def test_no_callback_reaches_the_strategy_untyped() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 50
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in untyped_uses(ast.parse(path.read_text("utf-8")))
    ]
    assert found == [], "use services_of or services_if_any of lightning_megatron.services"


@pytest.mark.parametrize(
    "text",
    [
        "strategy: Any = trainer.strategy",
        "plugin: Any = trainer.strategy",
        "self._strategy: Any = None",
        "def tell(strategy: Any) -> None: ...",
        "events = getattr(trainer.strategy, 'events', None)",
        "if hasattr(type(trainer.strategy), 'topology'): ...",
        "setattr(strategy, 'events', log)",
        "services = cast(MegatronServices, trainer.strategy)",
        "trainer.strategy.events = log",
        "log = strategy.events = EventLog()",
        "strategy.judge, strategy.can_undo = None, False",
        "del trainer.strategy.events",
    ],
)
def test_untyped_use_is_found(text: str) -> None:
    assert untyped_uses(ast.parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "strategy = trainer.strategy",
        "device = trainer.strategy.root_device",
        "recovery = services_of(trainer, self, 'it needs it').recovery\nrecovery.can_undo = True",
        "formula = getattr(member, 'formula', None)",
        "def tell(strategy: Strategy, what: Any) -> None: ...",
    ],
)
def test_typed_use_is_allowed(text: str) -> None:
    assert untyped_uses(ast.parse(text)) == []


def quiet(strategy: Any) -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False)


def test_services_of_the_strategy() -> None:
    strategy = MegatronStrategy()
    trainer = quiet(strategy)
    assert services_of(trainer, pl.Callback(), "it needs the gradients") is strategy
    assert services_if_any(trainer) is strategy
    assert events_of(trainer) is strategy.events


def test_services_under_another_strategy() -> None:
    trainer = quiet("ddp")
    assert isinstance(trainer.strategy, DDPStrategy)
    assert services_if_any(trainer) is None
    with pytest.raises(ConfigError) as error:
        services_of(trainer, ParameterNorm(), "it needs to know the shards")
    assert str(error.value) == (
        "ParameterNorm under DDPStrategy: it needs to know the shards of a MegatronStrategy; "
        "nearest valid: strategy=MegatronStrategy()"
    )


@pytest.mark.parametrize(
    "callback",
    [
        CommunicationMonitor(),
        GradientMonitor(),
        GradientNoiseScale(),
        HangDetector(),
        NumberGuard(),
        ParameterNorm(),
        Preemption(),
        ReplicaCheck(),
        SlowRankDetector(),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_refuse_another_strategy(callback: pl.Callback) -> None:
    trainer = quiet("auto")
    name = type(callback).__name__
    with pytest.raises(ConfigError, match=rf"^{name} under SingleDeviceStrategy: it .* of a Meg"):
        callback.setup(trainer, pl.LightningModule(), "fit")
    callback.teardown(trainer, pl.LightningModule(), "fit")


def test_events_and_numbers_by_rank_belong_to_a_strategy_of_any_kind() -> None:
    first, second = quiet("auto"), quiet("auto")
    assert isinstance(first.strategy, SingleDeviceStrategy)
    assert events_of(first) is events_of(first) is not events_of(second)
    assert rank_metrics_of(first) is rank_metrics_of(first) is not rank_metrics_of(second)
    assert not hasattr(first.strategy, "events")
