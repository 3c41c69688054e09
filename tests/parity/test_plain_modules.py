"""Modules as users write them train in every layout as they do under Lightning's own strategies."""

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_megatron.strategies.megatron import MegatronStrategy
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
    "pp=3 gpipe": (3, {"pp": 3, "num_microbatches": 4, "schedule": "gpipe"}),
    "pp=2 dp=2 zero 0": (4, {"pp": 2, "num_microbatches": 2, "zero": 0}),
    "pp=2 dp=2 zero 3": (4, {"pp": 2, "num_microbatches": 2, "zero": 3}),
    "pp=2 tp=2": (4, {"pp": 2, "tp": 2, "num_microbatches": 1}),
}


def plain_job(kind: str, strategy_options: dict[str, Any] | str) -> Outcome:
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


def close(what: str, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}"
    )


def check(outcomes: list[Outcome], expected: Outcome, *, buffers: bool = True) -> None:
    weights = merge_stages(outcomes)
    assert weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert weight.dtype == torch.float64
        close(name, weights[name], weight)
    for outcome in outcomes:
        assert outcome.extra["rates"] == expected.extra["rates"]
        assert outcome.extra["logged"] == pytest.approx(expected.extra["logged"], rel=TOLERANCE)
        for name, buffer in outcome.extra["buffers"].items() if buffers else ():
            close(name, buffer, expected.extra["buffers"][name])


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Outcome]:
    """What one process with Lightning's default strategy gives."""
    return {kind: pool.run(1, plain_job, kind, "auto")[0] for kind in ORDINARY | PIPELINED}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ORDINARY)
def test_trains_as_in_one_process(
    pool: WorkerPool, alone: dict[str, Outcome], kind: str, layout: str
) -> None:
    expected = alone[kind]
    local_statistics = kind == "classifier" and "dp" in layout
    if local_statistics:  # BatchNorm sees the samples of one rank: DDP is the peer
        expected = pool.run(2, plain_job, kind, "ddp")[0]
    outcomes = pool.run(2, plain_job, kind, LAYOUTS[layout])
    check(outcomes, expected, buffers=not local_statistics)
    if local_statistics:
        for name, buffer in expected.extra["buffers"].items():
            if "running" in name:
                close(name, outcomes[0].extra["buffers"][name], buffer)


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize("kind", PIPELINED)
def test_a_pipeline_of_plain_modules_trains_as_in_one_process(
    pool: WorkerPool, alone: dict[str, Outcome], kind: str, layout: str
) -> None:
    world, options = PIPELINES[layout]
    check(pool.run(world, plain_job, kind, options), alone[kind])


@pytest.mark.parametrize("layout", ["dp=2 zero 3", "tp=2"])
@pytest.mark.parametrize("kind", PIPELINED)
def test_a_trunk_trains_without_a_pipeline(
    pool: WorkerPool, alone: dict[str, Outcome], kind: str, layout: str
) -> None:
    check(pool.run(2, plain_job, kind, LAYOUTS[layout]), alone[kind])


@pytest.mark.parametrize("kind", ["boring", "groups"])
def test_microbatches_change_nothing(
    pool: WorkerPool, alone: dict[str, Outcome], kind: str
) -> None:
    check(pool.run(1, plain_job, kind, {"num_microbatches": 4}), alone[kind])
    check(pool.run(2, plain_job, kind, {"zero": 2, "num_microbatches": 2}), alone[kind])


def test_one_warning_names_the_module_that_tp_does_not_split(pool: WorkerPool) -> None:
    outcomes = pool.run(2, plain_job, "groups", LAYOUTS["tp=2"])
    messages = [message for o in outcomes for message in o.extra["replicated"]]
    assert len(messages) == 1
    assert "Groups" in messages[0]
    assert "tp=2" in messages[0]
