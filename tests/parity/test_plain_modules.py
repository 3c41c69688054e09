"""Modules as users write them train in every layout as they do under Lightning's own strategies."""

import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import Outcome, merge_stages, quiet_trainer, whole_parameters
from tests.parity.plain_modules import ORDINARY, PIPELINED

TOLERANCE = 1e-10
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2 zero 0": {"zero": 0},
    "dp=2 zero 1": {"zero": 1},
    "dp=2 zero 3": {"zero": 3},
    "tp=2": {"tp": 2},
}
PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp=2": (2, {"pp": 2, "num_microbatches": 2}),
    "pp=3 gpipe": (3, {"pp": PipelineConfig(degree=3, schedule="gpipe"), "num_microbatches": 4}),
    "pp=2 dp=2 zero 0": (4, {"pp": 2, "num_microbatches": 2, "zero": 0}),
    "pp=2 dp=2 zero 3": (4, {"pp": 2, "num_microbatches": 2, "zero": 3}),
    "pp=2 tp=2": (4, {"pp": 2, "tp": 2, "num_microbatches": 1}),
}


def train_module(kind: str, strategy_options: dict[str, Any] | str) -> Outcome:
    """Train a module; a string names one of Lightning's own strategies."""
    L.seed_everything(5, verbose=False)
    module = (ORDINARY | PIPELINED)[kind]()
    strategy: Any = strategy_options
    if isinstance(strategy_options, dict):
        strategy = MegatronStrategy(**strategy_options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(strategy, max_epochs=2, enable_model_summary=False)
        trainer.fit(module)
    replicated = [str(w.message) for w in caught if "no parallel layers" in str(w.message)]
    extra = {
        "buffers": {name: b.clone() for name, b in module.named_buffers()},
        "logged": {name: float(v) for name, v in trainer.callback_metrics.items()},
        "rates": [[g["lr"] for g in o.param_groups] for o in trainer.optimizers],
        "replicated": replicated,
    }
    if isinstance(strategy_options, dict):
        weights = whole_parameters(module, strategy.topology)
    else:
        weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return Outcome(weights=weights, extra=extra)


def plain_job(kinds: Sequence[str], strategy_options: dict[str, Any] | str) -> dict[str, Outcome]:
    """Train several modules one after the other in the same processes."""
    return {kind: train_module(kind, strategy_options) for kind in kinds}


def close(what: str, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}"
    )


def check(kind: str, outcomes: list[Outcome], expected: Outcome, *, buffers: bool = True) -> None:
    weights = merge_stages(outcomes)
    assert weights.keys() == expected.weights.keys(), kind
    for name, weight in expected.weights.items():
        assert weight.dtype == torch.float64
        close(f"{name} of {kind}", weights[name], weight)
    for outcome in outcomes:
        assert outcome.extra["rates"] == expected.extra["rates"], kind
        assert outcome.extra["logged"] == pytest.approx(expected.extra["logged"], rel=TOLERANCE)
        for name, buffer in outcome.extra["buffers"].items() if buffers else ():
            close(f"{name} of {kind}", buffer, expected.extra["buffers"][name])


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Outcome]:
    """What one process with Lightning's default strategy gives."""
    return pool.run(1, plain_job, [*ORDINARY, *PIPELINED], "auto")[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def data_parallel(pool: WorkerPool) -> Outcome:
    """The classifier under Lightning's DDP: BatchNorm sees the samples of one rank."""
    return pool.run(2, plain_job, ["classifier"], "ddp")[0]["classifier"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_modules_train_as_in_one_process(
    pool: WorkerPool, alone: dict[str, Outcome], data_parallel: Outcome, layout: str
) -> None:
    kinds = [*ORDINARY, *PIPELINED]  # a trunk is an ordinary module where there is no pipeline
    by_rank = pool.run(2, plain_job, kinds, LAYOUTS[layout])
    for kind in kinds:
        outcomes = [found[kind] for found in by_rank]
        if kind != "classifier" or "tp" in layout:
            check(kind, outcomes, alone[kind])
            continue
        check(kind, outcomes, data_parallel, buffers=False)
        for name, buffer in data_parallel.extra["buffers"].items():
            if "running" in name:
                close(name, outcomes[0].extra["buffers"][name], buffer)


@pytest.mark.parametrize("layout", PIPELINES)
def test_pipelines_of_plain_modules_train_as_in_one_process(
    pool: WorkerPool, alone: dict[str, Outcome], layout: str
) -> None:
    world, options = PIPELINES[layout]
    by_rank = pool.run(world, plain_job, list(PIPELINED), options)
    for kind in PIPELINED:
        check(kind, [found[kind] for found in by_rank], alone[kind])


def test_a_stage_may_have_no_parameters(pool: WorkerPool, alone: dict[str, Outcome]) -> None:
    """The second stage is the ReLU alone; its optimizer has nothing to do."""
    for world, zero in ((3, 1), (6, 3)):
        pp = PipelineConfig(degree=3, partition=[3, 1, 2])
        options = {"pp": pp, "zero": zero, "num_microbatches": 2}
        by_rank = pool.run(world, plain_job, ["trunk"], options)
        check("trunk", [found["trunk"] for found in by_rank], alone["trunk"])


def test_microbatches_change_nothing(pool: WorkerPool, alone: dict[str, Outcome]) -> None:
    kinds = ["boring", "groups", "tied"]
    for world, options in ((1, {"num_microbatches": 4}), (2, {"zero": 2, "num_microbatches": 2})):
        by_rank = pool.run(world, plain_job, kinds, options)
        for kind in kinds:
            check(kind, [found[kind] for found in by_rank], alone[kind])


def test_one_warning_names_the_module_that_tp_does_not_split(pool: WorkerPool) -> None:
    outcomes = pool.run(2, plain_job, ["groups"], LAYOUTS["tp=2"])
    messages = [message for found in outcomes for message in found["groups"].extra["replicated"]]
    assert len(messages) == 1
    assert "Groups" in messages[0]
    assert "tp=2" in messages[0]
