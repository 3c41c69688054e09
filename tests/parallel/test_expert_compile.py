"""Blocks with mixtures of experts, compiled: the mixture stands between graphs."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from lightning_megatron import ActivationConfig, CompileConfig, PipelineConfig
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import train_job
from tests.parity.reference import Data, reference_curve
from tests.parity.test_matrix import check

BLOCK = CompileConfig(scope="block", backend="aot_eager")
MODEL = CompileConfig(scope="model", backend="aot_eager")
FULL, SELECTIVE = ActivationConfig(recompute="full"), ActivationConfig(recompute="selective")
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "block, tp": (2, {"ep": 2, "tp": 2, "compile": BLOCK}),
    "block": (2, {"ep": 2, "compile": BLOCK}),
    "block, full": (2, {"ep": 2, "compile": BLOCK, "activations": FULL}),
    "block, selective": (2, {"ep": 2, "compile": BLOCK, "activations": SELECTIVE}),
    "model": (2, {"ep": 2, "compile": MODEL}),
    "model, full": (2, {"ep": 2, "compile": MODEL, "activations": FULL}),
    "split backwards": (
        2,
        {"pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 2, "compile": BLOCK},
    ),
}


def compiled_job(options: dict[str, Any], data: Data) -> tuple[Any, int]:
    torch.compiler.reset()
    counters["stats"].clear()
    with torch._dynamo.config.patch(recompile_limit=4, fail_on_recompile_limit_hit=True):
        outcome = train_job(options, "mixture", data)
    return outcome, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "name",
    ["block, tp", *(pytest.param(n, marks=pytest.mark.thorough) for n in [*CASES][1:])],
)
def test_compiled_blocks_with_experts_train_as_a_plain_loop_does(
    pool: WorkerPool, name: str
) -> None:
    world, options = CASES[name]
    data = Data()
    found = pool.run(world, compiled_job, options, data, timeout=300)
    check([outcome for outcome, _ in found], reference_curve("mixture", data))
    if name.startswith("block, tp"):
        assert [graphs for _, graphs in found] == [2, 2]  # before the mixture, and behind it
