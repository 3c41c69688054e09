"""Strategies by name: as strings and from the environment, and where they cannot be taken."""

import sys
from types import ModuleType
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.strategies import StrategyRegistry

from lightning_megatron import ConfigError, MegatronStrategy
from lightning_megatron.strategy.names import options_of


def degrees(trainer: pl.Trainer) -> tuple[int, ...]:
    assert isinstance(trainer.strategy, MegatronStrategy)
    options = trainer.strategy.options
    axes = options.tp, options.pp.degree, options.cp.degree, options.ep.degree
    return *axes, options.zero.stage


def of_name(name: Any, **options: Any) -> pl.Trainer:
    return pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, **options)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((f"megatron_zero_{stage}", (1, 1, 1, 1, stage)) for stage in range(4)),
        ("megatron", (1, 1, 1, 1, 1)),
        ("megatron_tp2_pp2_zero1", (2, 2, 1, 1, 1)),
        ("Megatron_ep4_cp16_zero_3", (1, 1, 16, 4, 3)),
    ],
)
def test_a_name_is_a_layout(name: str, expected: tuple[int, ...]) -> None:
    assert degrees(of_name(name)) == expected


def test_the_environment_and_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_TRAINER_STRATEGY", "megatron_tp2_zero0")
    assert degrees(pl.Trainer(accelerator="cpu", devices=1, logger=False)) == (2, 1, 1, 1, 0)
    assert StrategyRegistry.get("megatron_pp2").options.pp.degree == 2
    assert StrategyRegistry.get("nobody's", "default") == "default"
    assert {"ddp", "megatron", "megatron_zero_3"} <= set(StrategyRegistry.available_strategies())
    assert "megatron_pp2" in StrategyRegistry.available_strategies()
    with pytest.raises(KeyError, match="not found"):
        StrategyRegistry.get("nobody's")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("megatron_tp2_dp4", "megatron_tp2"),
        ("megatron_zero_7", "megatron_zero3"),
        ("megatron_tp0_pp2", "megatron_pp2"),
        ("megatron_tp2_tp4", "megatron_tp2"),
        ("megatron_tp2zero1", "megatron"),
        ("megatrn_zero_2", "megatron_zero2"),
    ],
)
def test_a_bad_name_has_a_nearest_valid_one(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'.* nearest valid: '{nearest}'"):
        of_name(name)
    assert options_of(nearest) is not None


def test_other_names_are_left_to_lightning() -> None:
    with pytest.raises(ValueError, match="invalid strategy name"):
        of_name("mega")
    assert type(of_name("ddp").strategy).__name__ == "DDPStrategy"


@pytest.mark.parametrize("given", [MegatronStrategy(tp=2), "megatron_zero_2"])
def test_fabric_says_what_to_write(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"Fabric\(.*a LightningModule of six lines"):
        L.Fabric(strategy=given, accelerator="cpu", devices=1)
    L.Fabric(strategy="ddp", accelerator="cpu", devices=1)


def test_the_other_package_says_what_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its Trainer asks; the package is not installed here."""
    other, registry = ModuleType("pytorch_lightning.strategies"), _StrategyRegistry()
    vars(other)["StrategyRegistry"] = registry
    monkeypatch.setitem(sys.modules, other.__name__, other)
    strategy = MegatronStrategy(zero=2)
    for given in (strategy, "megatron_tp2"):
        with pytest.raises(ConfigError, match="`import lightning_megatron.pytorch_lightning` bef"):
            _ = given in registry.available_strategies()
    assert "ddp" not in registry.available_strategies()
