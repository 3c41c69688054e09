"""What works under DistributedDataParallel works here, with the numbers of one process."""

import re
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

import lightning_megatron
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool
from tests.parity.habits import HABITS
from tests.parity.jobs import quiet_trainer

TOLERANCE = 1e-10
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {"zero": 0},
    "zero 1": {"zero": 1},
    "zero 2": {"zero": 2},
}
# What ZeRO 3 refuses, by the error that names the module and what to do; all else it does.
_KEPT = "zero=2 or lower keeps parameters whole, or .*"
ZERO3 = {
    "CallsInHooks": r"CallsInHooks is called outside of a run.*nearest valid",
    "Generates": rf"model\.transformer\.wte, used in Generates\.on_train_batch_end: .*{_KEPT}",
    "HookEarly": r"net\.0\.weight: Tensor\.register_hook .*nearest valid: zero=2",
    "HookLate": r"net\.0\.weight: Tensor\.register_hook .*nearest valid: zero=2",
    "Copies": rf"net\.0, used in Copies\.training_step: .*{_KEPT}lightning_megatron\.gather",
    "Prunes": rf"ModelPruning\.on_train_epoch_end: .*{_KEPT}full_tensor",
    "Averages": r"callbacks=\[EMAWeightAveraging\].*nearest valid: zero of at most 2",
    "AveragesEvenly": r"callbacks=\[WeightAveraging\].*nearest valid: zero of at most 2",
    "ReducesByHand": rf"ReducesByHand\.on_after_backward: .*{_KEPT}gradients",
    "CopiesAtEpochEnd": rf"CopiesAtEpochEnd\.on_train_epoch_end: .*{_KEPT}lightning_megatron",
    "ZeroRedundancy": "optimizer=ZeroRedundancyOptimizer: .*|ZeroRedundancy: .*full_tensor",
    "AssignsElsewhere": r"net\.0\.weight, .*: \.data was assigned.*nearest valid: p\.data\.copy_",
    "GradientPenalty": rf"GradientPenalty: .*{_KEPT}differentiate once",
    "OtherMethods": rf"blocks\.0\.linear, used in OtherMethods\.training_step: .*{_KEPT}call",
}
Found = tuple[dict[str, Tensor], list[float]]


def train(name: str, strategy: Any) -> tuple[L.LightningModule, Any]:
    L.seed_everything(5, verbose=False)
    module = HABITS[name]()
    trainer = quiet_trainer(strategy, max_epochs=2)
    trainer.fit(module)
    return module, trainer


def habits_job(
    options: dict[str, Any] | str, names: Sequence[str] = tuple(HABITS)
) -> dict[str, Found | str]:
    """Weights and notes of habits, or the error in which one ended."""
    found: dict[str, Found | str] = {}
    for name in names:
        strategy = options if isinstance(options, str) else MegatronStrategy(**options)
        try:
            module, _ = train(name, strategy)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        found[name] = lightning_megatron.gather(module), module.seen
    return found


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Found]:
    """What plain Lightning gives in one process."""
    return pool.run(1, habits_job, "auto")[0]  # type: ignore[no-any-return]


def check(found: dict[str, Found | str], alone: dict[str, Found]) -> None:
    failed = {name: text for name, text in found.items() if isinstance(text, str)}
    assert not failed
    for name, (weights, seen) in alone.items():
        ours, ours_seen = found[name]
        assert ours.keys() == weights.keys(), name
        for key, value in weights.items():
            torch.testing.assert_close(
                *(ours[key], value),
                rtol=TOLERANCE,
                atol=TOLERANCE,
                msg=lambda text, name=name, key=key: f"{name}, {key}: {text}",
            )
        assert ours_seen == pytest.approx(seen, rel=TOLERANCE, abs=TOLERANCE), name


_HALVES = tuple(HABITS)[::2], tuple(HABITS)[1::2]


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("zero 0", tuple(HABITS)),
        # Gradients are cut under both: half of the habits each, the rest in `make test-all`.
        ("zero 1", _HALVES[0]),
        ("zero 2", _HALVES[1]),
        pytest.param("zero 1", _HALVES[1], marks=pytest.mark.thorough),
        pytest.param("zero 2", _HALVES[0], marks=pytest.mark.thorough),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_habits_give_the_numbers_of_one_process(
    pool: WorkerPool, alone: dict[str, Found], layout: str, names: Sequence[str]
) -> None:
    for found in pool.run(2, habits_job, LAYOUTS[layout], names):
        if layout != "zero 0" and "ZeroRedundancy" in names:
            text = found.pop("ZeroRedundancy")
            assert "optimizer=ZeroRedundancyOptimizer: it divides" in str(text)
        check(found, {name: alone[name] for name in found})


def test_habits_under_zero_3_give_those_numbers_or_say_why_not(
    pool: WorkerPool, alone: dict[str, Found]
) -> None:
    # Ranks that run other units end one after the other: `tests.parallel.test_fully_sharded`.
    names = [name for name in HABITS if name != "Experts"]
    for found in pool.run(2, habits_job, {"zero": 3}, names):
        for name, pattern in ZERO3.items():
            text = found.pop(name)
            assert isinstance(text, str), f"{name} runs"
            assert re.search(pattern, text), f"{name}: {text}"
        check(found, {name: alone[name] for name in found})
