"""Every layout trains the same weights as a plain PyTorch loop in one process."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_megatron import CompileConfig
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.testing import WorkerPool
from lightning_megatron.topology.context_layout import ContextConfig
from tests.parity.jobs import Outcome, merge_stages, our_name, train_job
from tests.parity.layouts import (
    FURTHER,
    LAYOUTS,
    MOST_PROCESSES,
    SMALL,
    VALUES,
    Layout,
    legal_layouts,
)
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


def check(outcomes: Sequence[Outcome], curve: Curve, what: str = "") -> None:
    """Losses and norms on every rank, and the weights put together from all of them."""
    for rank, outcome in enumerate(outcomes):
        close(f"{what}losses on rank {rank}", outcome.losses, curve.losses)
        close(f"{what}gradient norms on rank {rank}", outcome.norms, curve.norms)
    weights = merge_stages(outcomes)
    tied = {"trunk.head.weight": curve.weights["tokens.weight"]}
    expected: dict[str, Tensor] = {our_name(n): w for n, w in curve.weights.items()}
    assert set(expected) <= set(weights) <= set(expected | tied)
    for name, weight in (expected | tied).items():
        if name in weights:
            error = (weights[name] - weight).abs().max() / weight.abs().max()
            assert error <= TOLERANCE, f"{what}{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS, *(pytest.param(one, marks=pytest.mark.thorough) for one in FURTHER)],
    ids=str,
)
def test_trains_as_a_plain_loop_does(pool: WorkerPool, layout: Layout) -> None:
    """Under cp also where labels are ignored, and with lengths that no rank number divides."""
    data = Data() if layout.cp == 1 else Data(ignored=True, lengths=(8, 7))
    options, architecture = layout.strategy_options(), layout.architecture
    outcomes = pool.run(
        layout.world_size, train_job, options, architecture, data, by_token=layout.cp > 1
    )
    check(outcomes, reference_curve(architecture, data))


@pytest.mark.parametrize(
    ("layout", "by_token"),
    [
        (Layout(cp=2, kind="gather"), False),
        (Layout(cp=2, zero=3, architecture="gpt"), False),
        (Layout(cp=2, pp=2, kind="ulysses", num_microbatches=2), True),
        *(
            pytest.param(layout, False, marks=pytest.mark.thorough)
            for layout in (
                Layout(cp=4, zero=3, architecture="gpt"),
                Layout(cp=2, tp=2, sequence_parallel=True),
            )
        ),
    ],
    ids=str,
)
def test_a_part_of_a_sequence_may_have_no_label(
    pool: WorkerPool, layout: Layout, by_token: bool
) -> None:
    data, architecture = Data(first_labels=True, lengths=(13, 5, 2)), layout.architecture
    options = layout.strategy_options()
    outcomes = pool.run(layout.world_size, train_job, options, architecture, data, by_token)
    check(outcomes, reference_curve(architecture, data))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sequence_parallel=True, architecture="qwen"),
        *(
            pytest.param(layout, marks=pytest.mark.thorough)
            for layout in (
                Layout(tp=4, architecture="qwen"),
                Layout(tp=2, pp=2, num_microbatches=2, architecture="qwen"),
                Layout(tp=2, dp=2, zero=3, sequence_parallel=True, architecture="qwen"),
            )
        ),
    ],
    ids=str,
)
def test_norms_of_heads_train_as_in_a_plain_loop(pool: WorkerPool, layout: Layout) -> None:
    data = Data()
    outcomes = pool.run(layout.world_size, train_job, layout.strategy_options(), "qwen", data)
    check(outcomes, reference_curve("qwen", data))


@pytest.mark.parametrize(
    ("layout", "by_token"),
    [
        (Layout(tp=2, pp=2, num_microbatches=2, schedule="zb-h1"), False),
        (Layout(tp=2, sequence_parallel=True, architecture="gpt"), False),
        (Layout(dp=2, zero=3, architecture="gpt"), False),
        (Layout(cp=2, zero=2, num_microbatches=2), True),
        *(
            pytest.param(layout, by_token, marks=pytest.mark.thorough)
            for layout, by_token in (
                (Layout(tp=2, dp=2, zero=3, sequence_parallel=True, architecture="gpt"), False),
                (Layout(pp=2, dp=2, zero=1, num_microbatches=2), True),
                (Layout(cp=2, dp=2, zero=2, num_microbatches=2), True),
                (Layout(cp=2, tp=2, sequence_parallel=True), False),
            )
        ),
    ],
    ids=str,
)
def test_chunked_loss_trains_as_whole_logits_do(
    pool: WorkerPool, layout: Layout, by_token: bool
) -> None:
    data, architecture = Data(ignored=by_token), layout.architecture
    options = layout.strategy_options()
    outcomes = pool.run(
        layout.world_size, train_job, options, architecture, data, by_token, chunked_loss=True
    )
    check(outcomes, reference_curve(architecture, data))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "scope", "how"),
    [
        (Layout(dp=2, zero=3, architecture="gpt"), "block", {}),
        *(
            pytest.param(layout, scope, how, marks=pytest.mark.thorough)
            for layout, scope, how in (
                (Layout(tp=2, sequence_parallel=True, architecture="shallow"), "model", {}),
                (Layout(dp=2, zero=3, architecture="gpt"), "model", {"group": 2}),
                (
                    Layout(pp=2, num_microbatches=2, architecture="gpt"),
                    "block",
                    {"recompute": "selective"},
                ),
                (Layout(tp=2, dp=2, zero=3, architecture="gpt"), "block", {}),
                (
                    Layout(
                        tp=2, pp=2, sequence_parallel=True, num_microbatches=2, architecture="gpt"
                    ),
                    "block",
                    {"recompute": "selective"},
                ),
            )
        ),
    ],
    ids=str,
)
def test_compiled_models_that_recompute_train_as_others_do(
    pool: WorkerPool, layout: Layout, scope: Any, how: dict[str, Any]
) -> None:
    lengths = (8, 12) if layout.tp == 1 and scope == "block" else (8,)
    data, architecture = Data(steps=2, lengths=lengths), layout.architecture
    activations = ActivationConfig(**{"recompute": "full", **how})
    compiled = CompileConfig(scope=scope, backend="aot_eager")
    options = {**layout.strategy_options(), "activations": activations, "compile": compiled}
    outcomes = pool.run(layout.world_size, train_job, options, architecture, data)
    check(outcomes, reference_curve(architecture, data))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (2, {"cp": ContextConfig(degree=2, kind="ring", order="contiguous")}),
        (3, {"cp": 3, "zero": 3, "num_microbatches": 2}),
        *(
            pytest.param(world, options, marks=pytest.mark.thorough)
            for world, options in (
                (3, {"cp": ContextConfig(degree=3, kind="gather", order="contiguous"), "zero": 3}),
                (4, {"cp": ContextConfig(degree=4, kind="ring", ulysses=2, order="contiguous")}),
                (4, {"cp": ContextConfig(degree=4, kind="ring", order="contiguous")}),
                (6, {"cp": 3, "pp": 2, "zero": 3, "num_microbatches": 2}),
                (4, {"cp": 4}),
                (4, {"cp": ContextConfig(degree=4, kind="ulysses", order="contiguous")}),
            )
        ),
    ],
    ids=str,
)
def test_parts_in_other_orders_and_numbers(
    pool: WorkerPool, world: int, options: dict[str, Any]
) -> None:
    data = Data(ignored=True, lengths=(8, 7, 5))
    outcomes = pool.run(world, train_job, options, "llama", data, by_token=True)
    check(outcomes, reference_curve("llama", data))


@pytest.mark.parametrize(
    ("layouts", "values", "most"),
    [
        pytest.param(LAYOUTS, SMALL, 4, id="default"),
        pytest.param(
            *(LAYOUTS + FURTHER, VALUES, MOST_PROCESSES), marks=pytest.mark.thorough, id="all"
        ),
    ],
)
def test_layouts_cover_all_pairs(
    layouts: tuple[Layout, ...], values: dict[str, tuple[Any, ...]], most: int
) -> None:
    possible = set().union(*(layout.pairs() for layout in legal_layouts(values, most)))
    covered = set().union(*(layout.pairs() for layout in layouts))
    missing = sorted(sorted(pair, key=str) for pair in possible - covered)
    assert not missing
    assert all(layout.legal for layout in layouts)
    assert len(set(layouts)) == len(layouts)


@dataclass(frozen=True)
class Case:
    """Batches that are not all alike."""

    data: Data
    by_token: bool = False
    accumulate: int = 1
    strategy: dict[str, Any] = field(default_factory=dict)


CASES = {
    "gradients accumulate over batches": Case(Data(steps=4), accumulate=2),
    "batch is no multiple of microbatches": Case(
        Data(steps=2, batch=10), strategy={"num_microbatches": 4}
    ),
    "microbatch size leaves a rest": Case(
        Data(steps=2, batch=10), strategy={"num_microbatches": None, "microbatch_size": 3}
    ),
    "mean over unevenly spread tokens": Case(Data(steps=3, ignored=True), by_token=True),
    "mean over tokens of accumulated batches": Case(
        Data(steps=4, ignored=True), by_token=True, accumulate=2
    ),
    "shapes change from step to step": Case(Data(steps=4, lengths=(4, 12, 8, 4))),
}
ALL_CASES = ("pp=2",)
"""Layouts of all cases; the others take one, in turn."""
CASE_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp=2": (2, {"pp": 2, "num_microbatches": 2}),
    "pp=3 gpipe": (3, {"pp": PipelineConfig(degree=3, schedule="gpipe"), "num_microbatches": 2}),
    "pp=2 zbv": (2, {"pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 2}),
    "pp=2 tp=2 sequence parallel": (
        4,
        {"pp": 2, "tp": 2, "sequence_parallel": True, "num_microbatches": 2},
    ),
    "pp=2 tp=2 in parts": (
        4,
        {"pp": PipelineConfig(degree=2, scatter_gather=True), "tp": 2, "num_microbatches": 2},
    ),
    "pp=2 dp=2 interleaved zero 1": (
        4,
        {"pp": PipelineConfig(degree=2, schedule="interleaved"), "num_microbatches": 2},
    ),
    "pp=2 dp=2 zb-h1 zero 0": (
        4,
        {"pp": PipelineConfig(degree=2, schedule="zb-h1"), "num_microbatches": 2, "zero": 0},
    ),
    "pp=2 dp=2 zero 3": (4, {"pp": 2, "num_microbatches": 2, "zero": 3}),
    "cp=2 pp=2 zero 3": (4, {"cp": 2, "pp": 2, "num_microbatches": 2, "zero": 3}),
    "cp=2 dp=2 zero 2": (4, {"cp": 2, "num_microbatches": 2, "zero": 2}),
    "dp=2 zero 0": (2, {"zero": 0, "num_microbatches": 2}),
    "dp=2 zero 1 without microbatches": (2, {"zero": 1}),
    "dp=2 zero 2": (2, {"zero": 2, "num_microbatches": 2}),
}


FEW_CASES = (
    "pp=2 dp=2 zero 3",
    *("pp=2 tp=2 in parts", "pp=2 dp=2 interleaved zero 1", "pp=2 dp=2 zb-h1 zero 0"),
    *("cp=2 dp=2 zero 2", "dp=2 zero 2", "pp=2 zbv"),
)
"""Layouts that meet cases in `make test-all`: each axis of them is in another layout, too."""


def cases_of(layout: str) -> dict[str, Case]:
    if layout in ALL_CASES:
        return CASES
    return dict(list(CASES.items())[list(CASE_LAYOUTS).index(layout) % len(CASES) :: len(CASES)])


def cases_job(strategy_options: dict[str, Any], cases: dict[str, Case]) -> dict[str, Outcome]:
    """Cases under one layout, in the same processes."""
    return {
        name: train_job(
            strategy_options | case.strategy, "llama", case.data, case.by_token, case.accumulate
        )
        for name, case in cases.items()
    }


def check_cases(pool: WorkerPool, layout: str, cases: dict[str, Case]) -> None:
    world, options = CASE_LAYOUTS[layout]
    by_rank = pool.run(world, cases_job, options, cases)
    for name, case in cases.items():
        curve = reference_curve("llama", case.data, case.accumulate)
        check([found[name] for found in by_rank], curve, f"{name}: ")


@pytest.mark.parametrize("layout", [name for name in CASE_LAYOUTS if name not in FEW_CASES])
def test_batches_of_every_shape(pool: WorkerPool, layout: str) -> None:
    check_cases(pool, layout, cases_of(layout))


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [name for name in CASE_LAYOUTS if name not in ALL_CASES])
def test_batches_of_every_shape_in_every_layout(pool: WorkerPool, layout: str) -> None:
    check_cases(pool, layout, CASES)


def nodes_job(options: dict[str, Any], nodes: str, data: Data, accumulate: int) -> Outcome:
    """Training where ranks take themselves to be on the node of their letter."""
    with mock.patch("socket.gethostname", return_value=nodes[int(os.environ["RANK"])]):
        return train_job(options, "gpt", data, accumulate=accumulate)


@pytest.mark.parametrize(
    ("layout", "nodes", "accumulate"),
    [
        (Layout(dp=4), "aabb", 2),
        (Layout(dp=4, zero=2, num_microbatches=2), "abab", 1),
        (Layout(dp=4, zero=3), "aabb", 1),
        *(
            pytest.param(*case, 1, marks=pytest.mark.thorough)
            for case in (
                (Layout(cp=2, dp=2), "aabb"),
                (Layout(dp=4, zero=3), "abba"),
                (Layout(dp=4), "aaab"),
                (Layout(cp=4, zero=3), "abab"),
                (Layout(dp=8), "aaaabbbb"),
                (Layout(dp=8, zero=3), "aabbccdd"),
                (Layout(pp=2, dp=4, num_microbatches=2), "aabbaabb"),
                (Layout(dp=8, dp_replicate=2, zero=2), "aabbccdd"),
                (Layout(tp=2, pp=2, dp=2, num_microbatches=2), "aaaabbbb"),
            )
        ),
    ],
    ids=str,
)
def test_trains_the_same_over_several_nodes(
    pool: WorkerPool, layout: Layout, nodes: str, accumulate: int
) -> None:
    data = Data(steps=2 * accumulate)
    options = layout.strategy_options()
    outcomes = pool.run(layout.world_size, nodes_job, options, nodes, data, accumulate)
    check(outcomes, reference_curve("gpt", data, accumulate))
