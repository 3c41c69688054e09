"""Recomputation changes no bit in any precision: what was rounded is rounded again alike."""

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from lightning_megatron import Fp8Precision, MegatronStrategy, PipelineConfig
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.precision.fp8_recipes import RECIPES
from lightning_megatron.precision.fp16 import Fp16Precision
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import Outcome, Recorder, quiet_trainer, whole_parameters
from tests.precision.test_fp8 import SHALLOW, Model

MODES = ("full", "selective")


def low(recipe: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"plugins": [Fp8Precision(recipe, keep_first=0, keep_last=0, **options)]}


PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "bf16-true": lambda: {"precision": "bf16-true"},
    # The first step overflows and is skipped, the second is taken.
    "16-mixed": lambda: {"plugins": [Fp16Precision(2.0**24, backoff_factor=2.0**-12)]},
    **{recipe: low(recipe) for recipe in RECIPES},
    "tensorwise, gathered in FP8": low("tensorwise", gather="fp8"),
}


def train(options: dict[str, Any], precision: str, recompute: Any) -> Outcome:
    L.seed_everything(3, verbose=False)
    strategy = MegatronStrategy(**options, activations=ActivationConfig(recompute=recompute))
    # The second step has scales that follow from the first, and weights from all gradients.
    recorder, module = Recorder(1), Model(2, SHALLOW)
    trainer = quiet_trainer(
        strategy,
        callbacks=[recorder],
        gradient_clip_val=10.0,
        **{"precision": None, **PRECISIONS[precision]()},
    )
    trainer.fit(module)
    losses = [float(strategy.reduce(loss.float())) for loss in recorder.losses]
    return Outcome(losses, recorder.norms, whole_parameters(module.model, strategy.topology))


def compare_job(options: dict[str, Any], runs: dict[str, tuple[str, ...]]) -> None:
    for precision, modes in runs.items():
        plain = train(options, precision, "none")
        assert math.isfinite(plain.norms[0]) == (precision != "16-mixed")
        assert math.isfinite(plain.norms[1])
        for mode in modes:
            found, what = train(options, precision, mode), f"{precision}, {mode}"
            assert found.losses == plain.losses, what
            assert repr(found.norms) == repr(plain.norms), what  # nan is nan
            for name, value in plain.weights.items():
                assert torch.equal(found.weights[name], value), f"{what}: {name}"


ALL = tuple(PRECISIONS)[:-1]
CASES: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "alone": (1, {}, ALL),
    "alone, the other mode": (1, {"num_microbatches": 2}, ALL),
    "tp=2": (2, {"tp": 2, "sequence_parallel": True}, ("delayed",)),
    "tp=2, others": (
        2,
        {"tp": 2, "sequence_parallel": True},
        ("bf16-mixed", "rowwise", "blockwise"),
    ),
    "pp=2": (2, {"pp": 2, "num_microbatches": 2}, ("bf16-mixed", "tensorwise")),
    "pp=2 zb-h1": (
        2,
        {"pp": PipelineConfig(degree=2, schedule="zb-h1"), "num_microbatches": 2},
        ("16-mixed", "delayed"),
    ),
    "pp=2 zb-h1, blocks": (
        2,
        {"pp": PipelineConfig(degree=2, schedule="zb-h1"), "num_microbatches": 2},
        ("mxfp8",),
    ),
    "dp=2 zero 3": (2, {"zero": 3}, ("tensorwise, gathered in FP8",)),
    "dp=2 zero 3, bfloat16": (2, {"zero": 3}, ("bf16-mixed",)),
}


THOROUGH = (
    *("alone, the other mode", "tp=2, others", "pp=2"),
    *("pp=2 zb-h1, blocks", "dp=2 zero 3, bfloat16"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in THOROUGH)) for n in CASES]
)
def test_the_same_to_the_bit(pool: WorkerPool, name: str) -> None:
    """The modes take turns."""
    world, options, precisions = CASES[name]
    first = name == "alone, the other mode"
    runs = {p: (MODES[(i + first) % 2],) for i, p in enumerate(precisions)}
    pool.run(world, compare_job, options, runs, timeout=180)
