"""Every layout trains the same weights as a plain PyTorch loop in one process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import Outcome, merge_stages, our_name, train_job
from tests.parity.layouts import LAYOUTS, Layout, legal_layouts
from tests.parity.reference import Curve, Data, reference_curve

TOLERANCE = 1e-10


def close(what: str, found: Sequence[float], expected: Sequence[float]) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=TOLERANCE,
        atol=0.0,
        msg=lambda text: f"{what}: {text}",
    )


def check(outcomes: Sequence[Outcome], curve: Curve) -> None:
    """Losses and norms on every rank, and the weights put together from all of them."""
    for rank, outcome in enumerate(outcomes):
        close(f"losses on rank {rank}", outcome.losses, curve.losses)
        close(f"gradient norms on rank {rank}", outcome.norms, curve.norms)
    weights = merge_stages(outcomes)
    tied = {"trunk.head.weight": curve.weights["tokens.weight"]}
    expected: dict[str, Tensor] = {our_name(n): w for n, w in curve.weights.items()}
    assert set(expected) <= set(weights) <= set(expected | tied)
    for name, weight in (expected | tied).items():
        if name in weights:
            error = (weights[name] - weight).abs().max() / weight.abs().max()
            assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_trains_as_a_plain_loop_does(pool: WorkerPool, layout: Layout) -> None:
    data = Data()
    options, architecture = layout.strategy_options(), layout.architecture
    outcomes = pool.run(layout.world_size, train_job, options, architecture, data)
    check(outcomes, reference_curve(architecture, data))


def test_layouts_cover_all_pairs() -> None:
    possible = set().union(*(layout.pairs() for layout in legal_layouts()))
    covered = set().union(*(layout.pairs() for layout in LAYOUTS))
    missing = sorted(sorted(pair, key=str) for pair in possible - covered)
    assert not missing
    assert all(layout.legal for layout in LAYOUTS)
    assert len(set(LAYOUTS)) == len(LAYOUTS)


# Batches that are not all alike, in pipelines of two and three stages and on two data ranks.
PIPELINES: dict[str, dict[str, Any]] = {
    "pp=2": {"pp": 2, "num_microbatches": 2},
    "pp=3 gpipe": {"pp": 3, "num_microbatches": 2, "schedule": "gpipe"},
    "pp=2 dp=2": {"pp": 2, "num_microbatches": 2, "zero": 3},
    "dp=2 zero 0": {"zero": 0, "num_microbatches": 2},
    "dp=2 zero 1, one microbatch": {"zero": 1},
    "dp=2 zero 2": {"zero": 2, "num_microbatches": 2},
}
WORLDS = {"pp=2": 2, "pp=3 gpipe": 3, "pp=2 dp=2": 4}


def run(pool: WorkerPool, name: str, data: Data, **options: Any) -> None:
    layout = {**PIPELINES[name], **options.pop("strategy", {})}
    world = WORLDS.get(name, 2)
    outcomes = pool.run(world, train_job, layout, "llama", data, **options)
    check(outcomes, reference_curve("llama", data, options.get("accumulate", 1)))


@pytest.mark.parametrize("name", PIPELINES)
def test_gradients_accumulate_over_batches(pool: WorkerPool, name: str) -> None:
    run(pool, name, Data(steps=6), accumulate=2)


@pytest.mark.parametrize("name", ["pp=2", "pp=3 gpipe", "pp=2 dp=2", "dp=2 zero 2"])
def test_a_batch_that_is_no_multiple_of_the_microbatches(pool: WorkerPool, name: str) -> None:
    run(pool, name, Data(steps=4, batch=10), strategy={"num_microbatches": 4})


def test_microbatch_size_leaves_a_smaller_rest(pool: WorkerPool) -> None:
    size = {"num_microbatches": None, "microbatch_size": 3}
    run(pool, "pp=2 dp=2", Data(steps=4, batch=10), strategy=size)


@pytest.mark.parametrize("name", PIPELINES)
def test_mean_over_tokens_that_are_spread_unevenly(pool: WorkerPool, name: str) -> None:
    run(pool, name, Data(steps=4, ignored=True), by_token=True)


def test_mean_over_tokens_while_accumulating(pool: WorkerPool) -> None:
    run(pool, "pp=2 dp=2", Data(steps=4, ignored=True), by_token=True, accumulate=2)


def test_mean_over_tokens_while_accumulating_without_a_pipeline(pool: WorkerPool) -> None:
    run(pool, "dp=2 zero 0", Data(steps=4, ignored=True), by_token=True, accumulate=2)


@pytest.mark.parametrize("name", ["pp=2", "pp=3 gpipe", "pp=2 dp=2"])
def test_shapes_change_from_step_to_step(pool: WorkerPool, name: str) -> None:
    run(pool, name, Data(steps=5, lengths=(4, 12, 8, 16, 3)))


def test_shapes_change_under_sequence_parallelism(pool: WorkerPool) -> None:
    data, layout = Data(steps=3, lengths=(8, 16, 4)), {"tp": 2, "sequence_parallel": True}
    outcomes = pool.run(4, train_job, {**layout, "pp": 2, "num_microbatches": 2}, "llama", data)
    check(outcomes, reference_curve("llama", data))
