"""Lower precisions give, in every layout, what they give in one process, to their rounding."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron import PipelineConfig
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.parallel.activations.config import ActivationConfig
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.parity import reference
from tests.parity.jobs import (
    GlobalBatches,
    Outcome,
    Recorder,
    merge_stages,
    quiet_trainer,
    transformer_config,
    whole_parameters,
)
from tests.parity.reference import Data

STEPS = 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=2": {"tp": 2},
    "tp=2 sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp=2": {"pp": 2, "num_microbatches": 2},
    "cp=2 zero 3": {"cp": 2, "zero": 3},
    "dp=2 zero 0": {"zero": 0},
    "dp=2 zero 1": {"zero": 1},
    "dp=2 zero 3": {"zero": 3},
}
# Of losses and gradient norms, relative. A bfloat16 has 8 significant bits: one rounding is worth
# up to 2**-9 = 0.002. Layouts round sums of partial results, so losses differ by a few roundings
# averaged over 64 positions, and the norm of the gradient, a sum over thousands of elements that
# pass eight matrix products, by a few more. (Adam would divide such errors by themselves: SGD.)
TOLERANCES = {"bf16-mixed": (2e-3, 2e-2), "bf16-true": (4e-3, 3e-2), "32-true": (1e-6, 1e-5)}


class Deferred(GlobalBatches):
    """The transformer built in configure_model."""

    def __init__(self, batches: Any, tied: bool) -> None:
        super().__init__(batches)
        self.tied = tied

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            config = replace(transformer_config("llama"), tied_embeddings=self.tied)
            self.model = Transformer(config)
            self.loss = VocabParallelCrossEntropy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.model(batch[0]), batch[1])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class Types(L.Callback):
    """Number formats of parameters and their gradients before the optimizer step."""

    def __init__(self) -> None:
        self.at_rest: set[str] = set()
        self.gradients: set[str] = set()

    def on_before_optimizer_step(self, trainer: Any, module: L.LightningModule, _: Any) -> None:
        roles = trainer.strategy.gradients.roles
        self.at_rest |= {str(role.values.dtype) for role in roles}
        self.gradients |= {str(role.gradient.dtype) for role in roles if role.gradient is not None}


def run_once(strategy_options: dict[str, Any], precision: str, tied: bool) -> Outcome:
    L.seed_everything(3, verbose=False)
    strategy, recorder, types = MegatronStrategy(**strategy_options), Recorder(1), Types()
    trainer = quiet_trainer(
        strategy,
        precision=precision,
        callbacks=[recorder, types],
        gradient_clip_val=reference.CLIP,
    )
    module = Deferred(Data(steps=STEPS).batches(), tied)
    trainer.fit(module)
    losses = [float(strategy.reduce(loss.float())) for loss in recorder.losses]
    weights = whole_parameters(module.model, strategy.topology)
    return Outcome(losses, recorder.norms, weights, (types.at_rest, types.gradients))


def precision_job(
    strategy_options: dict[str, Any],
    tied: bool = True,
    precisions: Sequence[str] = tuple(TOLERANCES),
) -> dict[str, Outcome]:
    return {precision: run_once(strategy_options, precision, tied) for precision in precisions}


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> dict[str, Outcome]:
    """The run of one process in each precision."""
    found: dict[str, Outcome] = pool.run(1, precision_job, {})[0]
    return found


SPLIT: dict[str, dict[str, Any]] = {
    f"pp=2 dp=2 zero {zero} zb-h1 m={count}": {
        "pp": PipelineConfig(degree=2, schedule="zb-h1"),
        "zero": ShardingConfig(stage=zero, min_numel=1),
        "num_microbatches": count,
    }
    for zero, count in ((0, 2), (1, 1), (3, 1), (3, 3))
}
"""Gradients of one unit that FSDP2 meets in two formats, as they come at two times."""
NARROW = ("bf16-mixed", "bf16-true")


ALL = tuple(TOLERANCES)
PRECISIONS: dict[str, Sequence[str]] = {
    **dict.fromkeys(LAYOUTS, NARROW),
    "tp=2": ("32-true",),
    "dp=2 zero 0": ("32-true", "bf16-mixed"),
    "cp=2 zero 3": ("bf16-mixed",),
    "dp=2 zero 3": ("bf16-true",),
    "pp=2 dp=2 zero 3 zb-h1 m=1": ("bf16-true",),
}
"""Of a layout: one in float32 for a weight that is cut and for one that is not, and a schedule that
splits backwards where weights are cut. All others are tried in `make test-all`."""


@pytest.mark.parametrize(
    ("name", "precisions"),
    [
        *(pytest.param(*case, id=case[0]) for case in PRECISIONS.items()),
        *(
            pytest.param(name, ALL, marks=pytest.mark.thorough, id=f"{name}, all")
            for name in LAYOUTS
        ),
        *(
            pytest.param(name, NARROW, marks=pytest.mark.thorough, id=f"{name}, all")
            for name in SPLIT
        ),
    ],
)
def test_is_close_to_one_process(
    pool: WorkerPool, alone: dict[str, Outcome], name: str, precisions: Sequence[str]
) -> None:
    options = (LAYOUTS | SPLIT)[name]
    found = pool.run(2 if name in LAYOUTS else 4, precision_job, options, precisions=precisions)
    check(found, {precision: alone[precision] for precision in precisions})


V_SHAPED: dict[str, Any] = {"pp": PipelineConfig(degree=2, schedule="zbv"), "num_microbatches": 2}


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_a_v_shaped_pipeline(pool: WorkerPool, tied: bool) -> None:
    """Tied: a weight that two stages of one rank share is as narrow as ZeRO makes the others."""
    how: dict[str, Any] = {"tied": tied, "precisions": NARROW if tied else ALL}
    alone = pool.run(1, precision_job, {"num_microbatches": 2}, **how)[0]
    found = pool.run(2, precision_job, V_SHAPED, **how)
    check(found, alone)
    for precision, expected in alone.items():
        for outcome in found:  # nothing is cut or summed in another way before the first backward
            assert outcome[precision].losses[0] == expected.losses[0], precision


@pytest.mark.parametrize(
    "precisions", [("bf16-mixed",), pytest.param(ALL, marks=pytest.mark.thorough)], ids=str
)
def test_a_shared_weight_beside_shards(
    pool: WorkerPool, alone: dict[str, Outcome], precisions: Sequence[str]
) -> None:
    """ZeRO 3 holds all weights but one, which data parallelism averages."""
    options = {**V_SHAPED, "zero": ShardingConfig(stage=3, min_numel=1)}
    found = pool.run(4, precision_job, options, precisions=precisions)
    check(found, {precision: alone[precision] for precision in precisions})


def check(by_rank: list[dict[str, Outcome]], alone: dict[str, Outcome]) -> None:
    for precision, expected in alone.items():
        at_rest = "torch.bfloat16" if precision == "bf16-true" else "torch.float32"
        loss_tolerance, norm_tolerance = TOLERANCES[precision]
        outcomes = [found[precision] for found in by_rank]
        for outcome in outcomes:
            assert outcome.extra == ({at_rest}, {at_rest})
            close(precision, outcome.losses, expected.losses, loss_tolerance)
            close(precision, outcome.norms, expected.norms, norm_tolerance)
        merge_stages(outcomes)  # replicas are equal to the bit in low precision too


def close(what: str, found: list[float], expected: list[float], tolerance: float) -> None:
    pair = (torch.tensor(found), torch.tensor(expected))
    error = ((pair[0] - pair[1]) / pair[1]).abs().max()
    assert error <= tolerance, f"{what}: {error:.1e} between {found} and {expected}"


def test_low_precision_is_low(alone: dict[str, Outcome]) -> None:
    """The tolerances above would hide it if the low precisions computed in float32."""
    full = torch.tensor(alone["32-true"].losses)
    for precision in ("bf16-mixed", "bf16-true"):
        difference = (torch.tensor(alone[precision].losses) - full).abs() / full
        assert 1e-5 < difference.max() < 2e-2, precision


class Checked(Deferred):
    """Looks at its weights whenever a hook may, and validates on the first training batch."""

    def __init__(self, batches: Any) -> None:
        super().__init__(batches, tied=True)
        self.checked: list[float] = []
        self.formats: set[torch.dtype] = set()

    def val_dataloader(self) -> Any:
        return DataLoader(self.batches[:1], batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("checked", self.loss(self.model(batch[0]), batch[1]))

    def on_validation_end(self) -> None:
        self.checked.append(float(self.trainer.callback_metrics["checked"]))

    def on_train_batch_end(self, *_: Any) -> None:
        tied = ("tokens.weight", "head.weight")
        self.formats |= {p.dtype for name, p in self.named_parameters() if name.endswith(tied)}

    on_after_backward = on_train_batch_start = on_train_batch_end


def checked_job(options: dict[str, Any], recompute: Any) -> tuple[list[float], Outcome]:
    L.seed_everything(3, verbose=False)
    recorder = Recorder(2)
    trainer = quiet_trainer(
        MegatronStrategy(
            **options, num_microbatches=2, activations=ActivationConfig(recompute=recompute)
        ),
        precision="bf16-mixed",
        callbacks=[recorder],
        gradient_clip_val=reference.CLIP,
        accumulate_grad_batches=2,
        val_check_interval=2,
        num_sanity_val_steps=1,
    )
    module = Checked(Data(steps=4).batches())
    trainer.fit(module)
    assert module.formats <= {torch.bfloat16}
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    return module.checked, Outcome([float(x) for x in recorder.losses], recorder.norms)


def test_a_shared_weight_between_batches(pool: WorkerPool) -> None:
    """It follows every update, in validation too, is narrow in the run and wide after it."""
    checked, alone = pool.run(1, checked_job, {}, "none")[0]
    assert len(checked) == 3
    assert checked[2] < checked[1] < checked[0]
    for found, outcome in pool.run(
        2, checked_job, {"pp": PipelineConfig(degree=2, schedule="zbv")}, "full"
    ):
        # Before anything was summed in another order; processors round some products differently.
        assert found[0] == pytest.approx(checked[0], rel=1e-6)
        assert outcome.losses[:2] == pytest.approx(alone.losses[:2], rel=1e-6)
        close("validation", found, checked, TOLERANCES["bf16-mixed"][0])
        close("loss", outcome.losses, alone.losses, TOLERANCES["bf16-mixed"][0])
        close("norm", outcome.norms, alone.norms, TOLERANCES["bf16-mixed"][1])
