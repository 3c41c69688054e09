"""A small DeepSeek, with latent attention and experts, trains the same under every layout."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import pytest
import torch

# What the first compilation imports: here, once, rather than in every worker.
import torch._dynamo.backends.debugging
import torch._inductor.compile_fx

from lightning_megatron import (
    ActivationConfig,
    CompileConfig,
    ContextConfig,
    MegatronStrategy,
    PipelineConfig,
    TransformerConfig,
)
from lightning_megatron.layers import LatentSizes, RouterConfig, VocabParallelCrossEntropy
from lightning_megatron.models import MixtureConfig, Transformer
from lightning_megatron.testing import WorkerPool
from tests.parity import reference
from tests.parity.jobs import (
    GlobalBatches,
    Outcome,
    Recorder,
    merge_stages,
    quiet_trainer,
    whole_parameters,
)
from tests.parity.reference import Data

TOLERANCE = 1e-10
DATA = Data(ignored=True, lengths=(8, 6))
CONFIG = TransformerConfig(
    vocab_size=reference.VOCABULARY,
    hidden_size=reference.HIDDEN,
    num_layers=4,
    num_heads=4,
    mlp_size=24,
    max_seq_len=16,
    init_std=0.2,
    latent=LatentSizes(q_rank=12, kv_rank=8, rope_dim=2, nope_dim=4, value_dim=5),
    experts=MixtureConfig(
        num_experts=4,
        top_k=2,
        mlp_size=12,
        shared_size=8,
        first_dense=1,
        router=RouterConfig(
            score="sigmoid",
            groups=2,
            top_groups=1,
            scale=1.5,
            bias_update=0.01,
            balance_weight=0.02,
        ),
    ),
)
FULL, SELECTIVE = ActivationConfig(recompute="full"), ActivationConfig(recompute="selective")
BLOCK = CompileConfig(scope="block", backend="aot_eager")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp, ep, sequences": (2, {"tp": 2, "ep": 2, "sequence_parallel": True, "zero": 2}),
    "tp, ZeRO 3, selective": (4, {"tp": 2, "zero": 3, "activations": SELECTIVE}),
    "cp, full": (2, {"cp": 2, "ep": 2, "activations": FULL}),
    "cp, selective": (2, {"cp": 2, "zero": 3, "activations": SELECTIVE}),
    "ring": (2, {"cp": ContextConfig(degree=2, kind="ring")}),
    "tp, cp, sequences": (4, {"tp": 2, "cp": 2, "ep": 4, "sequence_parallel": True}),
    "zero bubble": (2, {"pp": PipelineConfig(degree=2, schedule="zbv")}),
    "zero bubble, tp": (4, {"pp": PipelineConfig(degree=2, schedule="zbv"), "tp": 2, "zero": 0}),
    "compiled": (2, {"cp": 2, "compile": BLOCK, "activations": SELECTIVE}),
}


class Deep(GlobalBatches):
    def __init__(self) -> None:
        super().__init__(DATA.batches())
        torch.manual_seed(3)
        self.model = Transformer(CONFIG).double()
        self.loss = VocabParallelCrossEntropy(ignore_index=reference.IGNORED)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, targets = batch
        counted = (targets != reference.IGNORED).sum()
        loss = self.loss(self.model(tokens), targets) * counted
        return {"loss": loss, "num_tokens": counted}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **reference.ADAMW)


def deep_job(options: Mapping[str, Any]) -> Outcome:
    L.seed_everything(1, verbose=False)
    torch.compiler.reset()
    strategy = MegatronStrategy(**options)
    recorder = Recorder(1)
    trainer = quiet_trainer(strategy, callbacks=[recorder], gradient_clip_val=reference.CLIP)
    module = Deep()
    trainer.fit(module)
    weights = whole_parameters(module.model, strategy.topology)
    biases = {name: value.clone() for name, value in module.model.named_buffers()}
    losses = [float(strategy.reduce(loss)) for loss in recorder.losses]
    return Outcome(losses, recorder.norms, {**weights, **biases})


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Outcome:
    [found] = pool.run(1, deep_job, {})
    biases = [value for name, value in found.weights.items() if name.endswith("router.bias")]
    assert len(biases) == 3
    assert all(bias.abs().max() > 0 for bias in biases)
    return found


THOROUGH = (
    *("tp, ZeRO 3, selective", "cp, full", "ring", "compiled"),
    *("tp, cp, sequences", "zero bubble, tp"),
)


@pytest.mark.parametrize(
    "name",
    [n if n not in THOROUGH else pytest.param(n, marks=pytest.mark.thorough) for n in LAYOUTS],
)
def test_every_layout_trains_the_same(pool: WorkerPool, alone: Outcome, name: str) -> None:
    world, options = LAYOUTS[name]
    outcomes = pool.run(world, deep_job, options, timeout=300)
    for outcome in outcomes:
        assert outcome.norms == pytest.approx(alone.norms, rel=TOLERANCE)
    found = merge_stages(outcomes)
    assert set(found) == set(alone.weights)
    for key, expected in alone.weights.items():
        error = (found[key] - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE, f"{key}: relative error {error:.1e}"
