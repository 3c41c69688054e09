"""The use of experts is that of whole batches, the same under every layout."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch

from lightning_megatron import ActivationConfig, ExpertMonitor, MegatronStrategy
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.monitoring.console import console_line
from lightning_megatron.monitoring.expert_monitor import use_of
from lightning_megatron.monitoring.rank_stats import rank_metrics_of
from lightning_megatron.testing import WorkerPool
from tests.parity import reference
from tests.parity.jobs import ParityModule, quiet_trainer
from tests.parity.reference import Data

LAYERS = ["model.trunk.layers.0.mlp", "model.trunk.layers.1.mlp"]
ROUTER = RouterConfig(balance_weight=0.02, z_loss=0.01, capacity_factor=1.0)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep=2": (2, {"ep": 2}),
    "ep=2 tp=2": (2, {"ep": 2, "tp": 2, "sequence_parallel": True}),
    "cp=2": (2, {"cp": 2}),
    "pp=2": (2, {"pp": 2, "microbatch_size": 4}),
    "microbatches and recomputation": (
        1,
        {"microbatch_size": 2, "activations": ActivationConfig(recompute="full")},
    ),
}


class Routed(ParityModule):
    """A decoder with experts, whose routers drop and balance."""

    def __init__(self, data: Data) -> None:
        super().__init__("mixture", data)
        for layer in self.model.trunk.layers:
            torch.manual_seed(5)
            layer.mlp = MixtureOfExperts(
                reference.HIDDEN, reference.MLP, reference.EXPERTS, 2, router=ROUTER, init_std=0.5
            ).double()


def watched_job(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Use by layer, logged values, and the labelled metrics."""
    monitor = ExpertMonitor(every=2)
    # Another one reads the same counts, at other times.
    other = ExpertMonitor(every=1)
    trainer = quiet_trainer(MegatronStrategy(**options), callbacks=[other, monitor])
    trainer.fit(Routed(Data(steps=4)))
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    labelled = {m.name: dict(m.values) for m in rank_metrics_of(trainer).metrics()}
    return {name: asdict(use) for name, use in monitor.latest.items()}, logged, labelled


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> tuple[Any, ...]:
    [found] = pool.run(1, watched_job, {})
    return found


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(*layout, id=name, marks=[pytest.mark.thorough] * (name == "ep=2 tp=2"))
        for name, layout in LAYOUTS.items()
    ],
)
def test_a_layout_does_not_change_what_is_logged(
    pool: WorkerPool, alone: tuple[Any, ...], world: int, options: dict[str, Any]
) -> None:
    expected_use, expected, _ = alone
    for use, logged, _ in pool.run(world, watched_job, options):
        assert list(use) == LAYERS
        for layer in LAYERS:
            assert use[layer] == pytest.approx(expected_use[layer], rel=1e-9)
        ours = {name: value for name, value in logged.items() if name.startswith("moe")}
        assert ours == pytest.approx(
            {name: value for name, value in expected.items() if name.startswith("moe")}, rel=1e-9
        )


def test_the_worst_layer_and_each_layer_are_logged(alone: tuple[Any, ...]) -> None:
    use, logged, labelled = alone
    layers = list(use.values())
    for name in ("load_max_over_mean", "dead_experts", "dropped_fraction"):
        assert logged[f"moe/{name}"] == pytest.approx(max(layer[name] for layer in layers))
    assert logged["moe/entropy"] == pytest.approx(min(layer["entropy"] for layer in layers))
    assert logged["moe/z_loss"] == pytest.approx(sum(x["z_loss"] for x in layers) / 2)
    for layer in LAYERS:
        assert logged[f"moe_layers/entropy/{layer}"] == pytest.approx(use[layer]["entropy"])
        assert labelled["moe/entropy"][(layer,)] == use[layer]["entropy"]
        assert 0 < use[layer]["dropped_fraction"] < 0.9
        assert 1 < use[layer]["load_max_over_mean"] <= 8
        assert 0 < use[layer]["entropy"] < math.log(8)
        assert use[layer]["balance_loss"] > 1 or use[layer]["dead_experts"] > 0


def test_use_is_counted_by_hand() -> None:
    totals = {"tokens": 10.0, "dropped": 4.0, "entropy": 5.0, "balance_loss": 3.0}
    use = use_of([8.0, 4.0, 4.0, 0.0], {**totals, "z_loss": 1.0, "sequences": 2.0})
    assert use is not None
    assert asdict(use) == {
        "load_max_over_mean": 2.0,
        "dead_experts": 1,
        "dropped_fraction": 0.2,
        "entropy": 0.5,
        "balance_loss": 1.5,
        "z_loss": 0.5,
    }
    assert use_of([0.0, 0.0], {"tokens": 0.0}) is None


def test_the_line_does_not_take_an_auxiliary_loss_for_the_loss() -> None:
    line = console_line(1, 2, {"train_loss": 2.0, "moe/z_loss": 9.0})
    assert "loss 2" in line


def nothing_job() -> int:
    monitor = ExpertMonitor(every=1)
    trainer = quiet_trainer(MegatronStrategy(), callbacks=[monitor])
    trainer.fit(ParityModule("llama", Data(steps=2)))
    return len([name for name in trainer.callback_metrics if name.startswith("moe")])


def test_without_experts_nothing_is_logged(pool: WorkerPool) -> None:
    assert pool.run(1, nothing_job) == [0]
    with pytest.raises(ConfigError, match="every=0"):
        ExpertMonitor(every=0)
