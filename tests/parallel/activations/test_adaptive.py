"""Blocks that are recomputed as memory allows: what is kept, what is alive, what is chosen."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor

from benchmarks.recomputation import LiveBytes
from lightning_megatron import ActivationConfig, CompileConfig, MegatronStrategy, PipelineConfig
from lightning_megatron._torch.graphs import compare_memory_of_recomputed
from lightning_megatron.errors import ConfigError
from lightning_megatron.parallel.activations.knapsack import needed
from lightning_megatron.pipeline.timing import saved_bytes
from lightning_megatron.testing import WorkerPool
from lightning_megatron.tuning.recomputation import AdaptiveMemory
from tests.parity.jobs import ParityModule, quiet_trainer, whole_parameters
from tests.parity.reference import Data
from tests.strategy.small import tuner_of

PLAIN = ActivationConfig()
STEPS = 3
"""Two are measured, and the last one runs by what was chosen."""


class Kept(L.Callback):
    """Bytes that autograd keeps of each batch, parameters excluded."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        step = module.training_step

        def counted(*args: Any) -> Any:
            with saved_bytes() as kept:
                try:
                    return step(*args)
                finally:  # a stage ends by an exception
                    self.sizes.append(kept[0])

        module.training_step = counted


def adaptive_run(options: dict[str, Any], memory: ActivationConfig) -> tuple[Any, ...]:
    L.seed_everything(1, verbose=False)
    strategy = MegatronStrategy(**options, activations=memory)
    module, kept = ParityModule("deep", Data(steps=STEPS)), Kept()
    quiet_trainer(strategy, callbacks=[kept]).fit(module)
    return strategy, whole_parameters(module.model, strategy.topology), kept.sizes


def adaptive_job(options: dict[str, Any]) -> tuple[Any, ...]:
    """Without, with much, with some and with too little memory; what is recomputed with some."""
    _, expected, all_bytes = adaptive_run(options, ActivationConfig())
    much = ActivationConfig(recompute="adaptive", limit_gib=1.0)
    strategy, weights, kept_bytes = adaptive_run(options, much)
    assert kept_bytes[-1] == all_bytes[-1] > kept_bytes[0]
    adaptive = tuner_of(strategy, AdaptiveMemory)
    assert set(adaptive.ways.values()) == {"none"}
    needs, rank = [], strategy.topology.pp.rank
    for stages in range(strategy.topology.pp.size):
        own = [b.costs for b in adaptive.measured.values() if b.rank == stages]
        full, none = ["full"] * len(own), ["none"] * len(own)
        when = adaptive.moments[stages]
        needs.append((needed(own, full, when), needed(own, none, when)))
    limit = (max(least for least, _ in needs) + max(most for _, most in needs)) / 2
    some = ActivationConfig(recompute="adaptive", limit_gib=limit / 2**30)
    strategy, others, few_bytes = adaptive_run(options, some)
    for name, value in expected.items():
        assert torch.equal(weights[name], value)
        assert torch.equal(others[name], value)
    adaptive = tuner_of(strategy, AdaptiveMemory)
    ways, table = adaptive.ways, adaptive.measured
    chosen = [name for name, way in ways.items() if way != "none"]
    mine = {name: block.costs for name, block in table.items() if block.rank == rank}
    assert 0 < len(chosen) < len(table)
    # The results that a block keeps are not in autograd's hands.
    saved = sum(c.kept - c.input for name, c in mine.items() if name in chosen)
    passes = len(few_bytes) // STEPS  # the step runs once for every microbatch and stage
    assert sum(all_bytes[-passes:]) - sum(few_bytes[-passes:]) == pytest.approx(
        saved * options.get("num_microbatches", 1), rel=0.1
    )
    if "pp" in options:
        little = ActivationConfig(recompute="adaptive", limit_gib=needs[0][0] / 2**31)
        with pytest.raises(ConfigError, match="nearest valid: limit_gib="):
            adaptive_run(options, little)
    return tuple(ways.items())


ADAPTIVE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp=2": (2, {"tp": 2}),
    "pp=2 zbv": (2, {"pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 2}),
}


@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_recomputes_some_blocks(pool: WorkerPool, name: str) -> None:
    world, options = ADAPTIVE[name]
    plans = pool.run(world, adaptive_job, options)
    assert len(set(plans)) == 1, "all ranks know of the same plan"


class Peak(L.Callback):
    """The most bytes that are alive in the last step, from its forward to its update."""

    most = 0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self.live = LiveBytes()
            self.live.__enter__()

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == STEPS - 1:
            self.live.__exit__(None, None, None)
            self.most = self.live.most


@dataclass
class Held:
    """What a rank holds under a plan."""

    counted: int
    peak: int
    ways: list[str]
    weights: dict[str, Tensor]


def peak_of(options: dict[str, Any], memory: ActivationConfig = PLAIN) -> tuple[int, Any]:
    L.seed_everything(1, verbose=False)
    strategy, peak = MegatronStrategy(**options, activations=memory), Peak()
    module = ParityModule("deep", Data(steps=STEPS, batch=12))
    quiet_trainer(strategy, callbacks=[peak]).fit(module)
    return peak.most, strategy


def peak_job(options: dict[str, Any], parts: Sequence[float]) -> list[Held]:
    """Of plans for parts of all memory, on this rank."""
    # Of each block: a forward of ten seconds, noting at no cost, and a repetition of one.
    clock = itertools.cycle([0.0, 10.0, 0.0, 10.0, 0.0, 1.0])
    with patch.object(AdaptiveMemory, "_now", lambda _: next(clock)):
        return peaks_under_limits(options, parts)


def peaks_under_limits(options: dict[str, Any], parts: Sequence[float]) -> list[Held]:
    most, strategy = peak_of(options, ActivationConfig(recompute="adaptive", limit_fraction=0.5))
    plan = tuner_of(strategy, AdaptiveMemory)
    by_rank = [[b.costs for b in plan.measured.values() if b.rank == rank] for rank in plan.moments]
    least, whole = (
        max(
            needed(costs, [way] * len(costs), plan.moments[rank])
            for rank, costs in enumerate(by_rank)
        )
        for way in ("full", "none")
    )
    rank = strategy.topology.pp.rank
    costs, when = by_rank[rank], plan.moments[rank]
    outside = most - needed(costs, ["none"] * len(costs), when)
    found = []
    for part in parts:
        limit = int(least + part * (whole - least))
        memory = ActivationConfig(recompute="adaptive", limit_gib=limit / 2**30)
        peak, strategy = peak_of(options, memory)
        plan = tuner_of(strategy, AdaptiveMemory)
        ways = [plan.ways[name] for name, b in plan.measured.items() if b.rank == rank]
        assert peak - outside <= limit < whole
        trained = whole_parameters(strategy.lightning_module.model, strategy.topology)
        found.append(Held(needed(costs, ways, when), peak - outside, ways, trained))
    return found


def test_the_peak_stays_under_the_limit(pool: WorkerPool) -> None:
    """What is outside of the blocks, the backward's own tensors too, is the same in all modes."""
    little, more = pool.run(1, peak_job, {}, (0.1, 0.7))[0]
    assert "full" in little.ways
    assert set(more.ways) >= {"none", "selective"}


@pytest.mark.parametrize(
    ("schedule", "part", "ways"),
    [
        ("1f1b", 0.7, {"none", "selective"}),
        pytest.param("zb-h1", 0.05, {"full"}, marks=pytest.mark.thorough),
    ],
)
def test_a_pipeline_holds_what_is_counted(
    pool: WorkerPool, schedule: str, part: float, ways: set[str]
) -> None:
    options = {"pp": PipelineConfig(degree=2, schedule=schedule), "num_microbatches": 3}
    for held in pool.run(2, peak_job, options, (part,))[-1]:  # the first stage's rank
        assert ways <= set(held.ways)
        # The halves of a backward leave less to be kept than all of it, which is counted.
        least = 0.97 if schedule == "1f1b" else 0.8
        assert least * held.counted < held.peak < 1.01 * held.counted


def compiled_job() -> list[str]:
    """The ways in which compiled blocks are recomputed, whose weights have been compared."""
    compiled = CompileConfig(scope="block", backend="aot_eager")
    _, plainly = peak_of({})
    torch.compiler.reset()
    compare_memory_of_recomputed()  # as every run with weights in parts does, for good
    # One graph serves all blocks, whether they are measured, recomputed or neither.
    limits = {"recompile_limit": 1, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):
        [found] = peak_job({"compile": compiled}, (0.4,))
    expected = whole_parameters(plainly.lightning_module.model, plainly.topology)
    for name, value in found.weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-13)
    return found.ways


def test_compiled_blocks_are_measured(pool: WorkerPool) -> None:
    ways = pool.run(1, compiled_job)[0]
    assert set(ways) == {"none", "full"}
