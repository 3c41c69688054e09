"""Experts in FP8: each computes as a linear layer of its own, by every recipe and backend."""

import itertools
import logging
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import Fp8Precision, MegatronStrategy
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.precision.fp8_blocks import BlockwiseGemm
from lightning_megatron.precision.fp8_experts import EachExpert
from lightning_megatron.precision.fp8_gemm import DelayedGemm, RowwiseGemm, TensorwiseGemm
from lightning_megatron.precision.fp8_torchao import TorchaoGemm
from lightning_megatron.precision.scaling import E4M3, E5M2
from lightning_megatron.testing import WorkerPool
from tests.parity.jobs import GlobalBatches, Outcome, Recorder, quiet_trainer

WHOLE = (False, False, False)
GEMMS: dict[str, Any] = {
    "tensorwise": lambda: TensorwiseGemm(E5M2, None, WHOLE),
    "delayed": lambda: DelayedGemm(E5M2, None, WHOLE, 4, torch.device("cpu"), True),
    "rowwise": lambda: RowwiseGemm(E5M2),
    "blockwise": lambda: BlockwiseGemm(E4M3, 128, square=True),
    "mxfp8": lambda: BlockwiseGemm(E4M3, 32, square=False),
    "torchao": lambda: TorchaoGemm("tensorwise", None, WHOLE),
}


@pytest.mark.parametrize("name", GEMMS)
def test_each_expert_multiplies_as_a_layer_of_its_own(name: str) -> None:
    counts, factor = [5, 0, 20], 0.5
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(25, 32, generator=draw).bfloat16()
    weight = torch.randn(3, 48, 32, generator=draw).bfloat16()
    grad = torch.randn(25, 48, generator=draw).bfloat16()

    together = EachExpert([GEMMS[name]() for _ in counts])
    y, kept = together.output(x, weight, counts)
    prepared = together.prepare_gradient(grad, kept, counts)
    of_rows = together.input_gradient(prepared, weight, counts)
    of_weights = together.weight_gradient(prepared, x, counts, factor, torch.float32)

    parts = zip(*(t.split(counts) for t in (x, y, grad, of_rows)), weight, of_weights, strict=True)
    for rows, out, grad_out, grad_rows, matrix, grad_matrix in parts:
        if not len(rows):
            assert not grad_matrix.any()
            continue
        gemm = GEMMS[name]()
        expected, needed = gemm.output(rows, matrix)
        alone = gemm.prepare_gradient(grad_out, needed)
        assert torch.equal(out, expected)
        assert torch.equal(grad_rows, gemm.input_gradient(alone, matrix))
        assert torch.equal(grad_matrix, gemm.weight_gradient(alone, rows).float() * factor)


def test_an_expert_that_was_idle_is_scaled_by_its_first_tokens() -> None:
    gemm = DelayedGemm(E5M2, None, WHOLE, 2, torch.device("cpu"), True)
    gemm.advance(torch.zeros(3))
    y, kept = gemm.output(torch.full((16, 16), 4.0), torch.eye(16))
    assert float(y[0, 0]) == pytest.approx(4.0, rel=1e-6)  # processors round differently
    grad = torch.full((16, 16), 2.0)
    assert gemm.input_gradient(gemm.prepare_gradient(grad, kept), torch.eye(16))[0, 0] == 2.0


class Block(nn.Module):
    def __init__(self, mlp_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.moe = MixtureOfExperts(32, mlp_size, 4, 2, init_std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.norm(x))
        return y


class Model(GlobalBatches):
    def __init__(self, mlp_size: int) -> None:
        draw = torch.Generator().manual_seed(0)
        super().__init__(list(torch.randn(3, 4, 8, 32, generator=draw)))
        self.mlp_size = mlp_size

    def configure_model(self) -> None:
        if not hasattr(self, "trunk"):
            self.trunk = PipelineSequential(blocks=[Block(self.mlp_size) for _ in range(2)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out: Tensor = self.trunk(batch)
        return (out - batch.roll(1, -1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(
    recipe: str | None, options: dict[str, Any], mlp_size: int = 48
) -> tuple[Outcome, dict[str, Any]]:
    L.seed_everything(3, verbose=False)
    strategy, recorder = MegatronStrategy(**options), Recorder(1)
    chosen: dict[str, Any] = {"precision": "bf16-mixed"}
    if recipe is not None:
        plugin = Fp8Precision(recipe, keep_first=0, keep_last=0)  # type: ignore[arg-type]
        chosen = {"plugins": [plugin], "precision": None}
    trainer = quiet_trainer(strategy, callbacks=[recorder], gradient_clip_val=10.0, **chosen)
    trainer.fit(Model(mlp_size))
    losses = [float(strategy.reduce(loss.float())) for loss in recorder.losses]
    state = trainer.precision_plugin.state_dict()
    return Outcome(losses, recorder.norms), state


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep=2": (2, {"ep": 2}),
    "ep=2 tp=2": (2, {"ep": 2, "tp": 2}),
}
PAIRS = (("rowwise", "ep=2"), ("delayed", "ep=2 tp=2"))


def train_all() -> dict[str | None, tuple[Outcome, dict[str, Any]]]:
    return {recipe: train(recipe, {}) for recipe in (None, "rowwise", "delayed")}


@pytest.fixture(scope="module")
def one_process(pool: WorkerPool) -> dict[str | None, tuple[Outcome, dict[str, Any]]]:
    return pool.run(1, train_all)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        pytest.param(*pair, marks=[pytest.mark.thorough] * (pair not in PAIRS))
        for pair in itertools.product(("rowwise", "delayed"), LAYOUTS)
    ],
)
def test_training_is_close_to_one_process(
    pool: WorkerPool, one_process: dict[str | None, Any], recipe: str, name: str
) -> None:
    (alone, state), (wide, _) = one_process[recipe], one_process[None]
    assert alone.losses != wide.losses  # it is in FP8
    world, options = LAYOUTS[name]
    for found, spread in pool.run(world, train, recipe, options):
        torch.testing.assert_close(found.losses, alone.losses, rtol=1e-2, atol=0)
        torch.testing.assert_close(found.norms, alone.norms, rtol=5e-2, atol=0)
        assert spread.get("amax_history", {}).keys() == state.get("amax_history", {}).keys()
    if recipe == "delayed":
        names = {
            f"trunk.{block}.moe.experts.{matrix}.{expert}"
            for block in range(2)
            for matrix in ("gate", "up", "down")
            for expert in range(4)
        }
        assert {n.replace("blocks.", "") for n in state["amax_history"]} == names


def odd_job() -> tuple[list[str], list[float]]:
    """What is said, and the losses, where sizes of experts are no multiple of 16."""
    log = logging.getLogger("lightning_megatron.precision.fp8")
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        outcome, _ = train("tensorwise", {}, mlp_size=40)
    finally:
        log.removeHandler(handler)
    return found, outcome.losses


def test_experts_of_odd_sizes_stay_in_bfloat16(pool: WorkerPool) -> None:
    said, losses = pool.run(1, odd_job)[0]
    assert any("moe.experts 40 x 32" in message for message in said)
    assert losses == pool.run(1, train, None, {}, mlp_size=40)[0][0].losses
