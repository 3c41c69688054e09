"""Blocks over parts of sequences, compiled: one node of the graph is all of the attention."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lightning_megatron import ActivationConfig, CompileConfig, MegatronStrategy
from lightning_megatron.testing import WorkerPool
from tests.parallel.activations.test_context import Attentive
from tests.parity.jobs import quiet_trainer, whole_parameters
from tests.parity.reference import Data
from tests.strategy.small import assert_same

PLAIN = ActivationConfig()
FULL, SELECTIVE = ActivationConfig(recompute="full"), ActivationConfig(recompute="selective")
EAGER = CompileConfig()
BLOCK = CompileConfig(scope="block", backend="aot_eager")
MODEL = CompileConfig(scope="model", backend="aot_eager")


def train(
    options: Mapping[str, Any], memory: ActivationConfig, compiled: CompileConfig
) -> tuple[dict[str, Tensor], tuple[int, int], int]:
    """Weights, messages and bytes over cp, and graphs, of two batches of 13 positions."""
    L.seed_everything(1, verbose=False)
    torch.compiler.reset()
    counters["stats"].clear()
    limits = {"recompile_limit": 3, "fail_on_recompile_limit_hit": True}
    strategy = MegatronStrategy(**options, activations=memory, compile=compiled)
    with torch._dynamo.config.patch(limits):
        module = Attentive(Data(steps=2, lengths=(13,)))
        quiet_trainer(strategy).fit(module)
    meter = strategy.topology.meters["cp"]
    weights = whole_parameters(module, strategy.topology)
    return weights, (meter.calls, meter.bytes), counters["stats"]["unique_graphs"]


def compared_job(
    options: Mapping[str, Any], memory: ActivationConfig, compiled: CompileConfig
) -> int:
    """Number of graphs; weights and messages are those without a compiler."""
    plain, sent, _ = train(options, PLAIN, EAGER)
    weights, found, graphs = train(options, memory, compiled)
    assert_same(weights, plain)
    assert (found == sent) == (memory.recompute != "full")
    return graphs


CASES = {
    "block": (PLAIN, BLOCK, 1),
    "block, selective": (SELECTIVE, BLOCK, 1),
    "model, full": (FULL, MODEL, 1),
}


@pytest.mark.parametrize(
    "name",
    [
        "block, selective",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in CASES if n != "block, selective"),
    ],
)
def test_compiled_blocks_train_as_others_do(pool: WorkerPool, name: str) -> None:
    """A graph serves all microbatches of sequences of one length."""
    memory, compiled, graphs = CASES[name]
    options = {"cp": 2, "num_microbatches": 2}
    found = pool.run(2, compared_job, options, memory, compiled)
    assert found == [graphs, graphs]
