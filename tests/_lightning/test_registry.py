"""Registries of Lightning ask as `_lightning.registry` has them ask."""

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy, StrategyRegistry

from lightning_megatron._lightning.registry import open_registry


def test_open_registry() -> None:
    asked: list[object] = []

    def takes(given: object) -> bool:
        asked.append(given)
        return given == "nine"

    registry = _StrategyRegistry()
    registry.register("three", lambda: 3)
    open_registry(registry, takes, len)
    names = registry.available_strategies()
    assert list(names) == ["three"]
    assert "three" in names
    assert not asked
    assert "nine" in names
    assert "ten" not in names
    assert asked == ["nine", "ten"]
    assert (registry.get("three"), registry.get("nine"), registry.get("ten", 0)) == (3, 4, 0)
    with pytest.raises(KeyError):
        registry.get("ten")


def test_a_trainer_asks_about_a_strategy_before_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that what a strategy still has of another Trainer can be forgotten."""
    for name in ("available_strategies", "get"):
        monkeypatch.setitem(vars(StrategyRegistry), name, vars(StrategyRegistry).get(name))
    asked: list[Any] = []

    def takes(given: Any) -> bool:
        asked.append((given, isinstance(given, Strategy) and given.accelerator))
        return False

    open_registry(StrategyRegistry, takes)
    strategy = SingleDeviceStrategy("cpu")
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    assert asked[0] == (strategy, None)
    assert trainer.strategy is strategy
    assert type(STRATEGY_REGISTRY) is type(StrategyRegistry) is _StrategyRegistry
