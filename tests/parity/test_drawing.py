"""What a step draws is the same on every rank that works on the same samples."""

import random
from collections.abc import Mapping
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch import Tensor

import lightning_megatron
from lightning_megatron import MegatronStrategy, PipelineConfig
from lightning_megatron.testing import WorkerPool
from tests.parity.drawing import Denoiser
from tests.parity.jobs import quiet_trainer

TWO = PipelineConfig(degree=2, schedule="interleaved", stages_per_rank=2)
Found = tuple[dict[str, Tensor], list[tuple[float, ...]], float]


class Between(L.Callback):
    """Draws between the steps; an attribute of the module would be that of the last stage."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, ...]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.drawn.append((float(torch.rand(())), random.random(), numpy.random.rand()))


def between_job(options: Mapping[str, Any]) -> list[tuple[float, ...]]:
    """What a callback draws after every step on this rank."""
    L.seed_everything(7, verbose=False)
    between = Between()
    strategy = MegatronStrategy(**options)
    quiet_trainer(strategy, max_epochs=2, callbacks=[between]).fit(Denoiser())
    return between.drawn


def job(options: Mapping[str, Any], dp: int = 1, **habits: Any) -> Found:
    """Weights, what the steps drew on this rank, and the validated loss."""
    L.seed_everything(7, verbose=False)
    module = Denoiser(batch_size=8 // dp, **habits)
    trainer = quiet_trainer(MegatronStrategy(**options), max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(module)
    return lightning_megatron.gather(module), module.drawn, float(trainer.callback_metrics["val"])


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (2, {"tp": 2, "num_microbatches": 4}),
    "1f1b": (2, {"pp": 2, "num_microbatches": 4}),
    "interleaved": (
        2,
        {"pp": TWO, "num_microbatches": 4},
    ),
    "V": (2, {"pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 4}),
    "four stages": (4, {"pp": PipelineConfig(degree=4, schedule="zb-h1"), "num_microbatches": 4}),
    "tp, one microbatch": (2, {"tp": 2}),
    "pp, one microbatch": (2, {"pp": 2, "num_microbatches": 1}),
    "both": (4, {"tp": 2, "pp": 2, "num_microbatches": 2}),
}


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Any:
    """What one process gives, by number of microbatches."""
    found: dict[int, Found] = {}

    def get(count: int) -> Found:
        if count not in found:
            found[count] = pool.run(1, job, {"num_microbatches": count})[0]
        return found[count]

    return get


THOROUGH = ("interleaved", "four stages", "tp, one microbatch")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (case in THOROUGH)) for case in CASES],
)
def test_draws_are_those_of_one_process(pool: WorkerPool, alone: Any, case: str) -> None:
    ranks, options = CASES[case]
    weights, drawn, val = alone(options.get("num_microbatches", 1))
    found = pool.run(ranks, job, options)
    assert len(found[0][1]) >= len(drawn)  # global rank 0 runs every step to its end
    for ours, seen, ours_val in found:
        for name, value in weights.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)
        if "pp" not in options:
            assert (seen, ours_val) == (drawn, pytest.approx(val, abs=1e-10))
        elif seen:  # pipelines cut batches when they evaluate, too
            training = [draw for draw in seen if draw in drawn]
            assert len(set(training)) >= 4 * options["num_microbatches"]
        assert ours_val == found[0][2]


def test_draws_between_steps_do_not_depend_on_what_a_stage_drew_within(pool: WorkerPool) -> None:
    """Stage 0 leaves a step at its trunk, and a rank with two stages runs it twice."""
    layout = {"pp": 2, "num_microbatches": 2}
    for options in (layout, {**layout, "pp": TWO}):
        first, second = pool.run(2, between_job, options)
        assert first == second
        assert len(set(first)) == len(first) == 4


def test_other_samples_get_other_numbers_and_what_one_rank_draws_separates_nobody(
    pool: WorkerPool,
) -> None:
    apart = pool.run(2, job, {"num_microbatches": 2}, dp=2)
    assert all(a != b for a, b in zip(apart[0][1], apart[1][1], strict=True))
    disturbed = {"rank_zero_draws": True}
    reference = pool.run(1, job, {"num_microbatches": 2}, **disturbed)[0]
    for axis in ("pp", "tp"):
        for ours in pool.run(2, job, {axis: 2, "num_microbatches": 2}, **disturbed):
            for name, value in reference[0].items():
                torch.testing.assert_close(ours[0][name], value, rtol=0, atol=1e-10)
