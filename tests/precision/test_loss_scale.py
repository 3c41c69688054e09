"""float16 with a loss scale: every layout skips the steps that one process skips."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn

from lightning_megatron import ConfigError, MegatronStrategy, PipelineConfig
from lightning_megatron.precision.fp16 import Fp16Precision
from lightning_megatron.precision.loss_scale import LossScale
from lightning_megatron.precision.plugin import sharded_precision
from lightning_megatron.strategy.step_recovery import HeldSchedules
from lightning_megatron.testing import WorkerPool
from lightning_megatron.whole.memory import own_weights
from lightning_megatron.zero.gradients import local
from tests.parity.jobs import Outcome, Recorder, merge_stages, quiet_trainer, whole_parameters
from tests.parity.reference import Data
from tests.parity.test_precision import Deferred
from tests.strategy import small

OVERFLOWS_AT = (2, 5)
"""Optimizer steps in which a gradient becomes infinite."""


class Scheduled(Deferred):
    """With momentum, which a skipped step must leave alone, and a schedule that counts steps."""

    def __init__(self, batches: Any) -> None:
        super().__init__(batches, tied=True)
        self.rates: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        halved = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "interval": "step"}}


class Overflow(L.Callback):
    """Makes one element of one gradient of one rank infinite."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @own_weights  # on one rank only
    def on_after_backward(self, trainer: Any, module: L.LightningModule) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        # Those of batches that are accumulated may not be there before the last of them.
        if gradients and trainer.global_step in OVERFLOWS_AT and trainer.global_rank == self.rank:
            local(gradients[0]).view(-1)[0] = torch.inf


@dataclass
class Seen:
    skipped: int
    scale: float
    logged: dict[str, float]
    rates: list[float]


def overflow_job(options: dict[str, Any], rank: int, accumulate: int = 1) -> Outcome:
    L.seed_everything(3, verbose=False)
    plugin, recorder = Fp16Precision(2.0**10, growth_interval=2), Recorder(accumulate)
    strategy = MegatronStrategy(**options)
    trainer = quiet_trainer(
        strategy,
        precision=None,
        plugins=[plugin],
        callbacks=[Overflow(rank), recorder],
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulate,
    )
    module = Scheduled(Data(steps=7 * accumulate).batches())
    trainer.fit(module)
    logged = {k: float(v) for k, v in trainer.logged_metrics.items() if k.startswith("optim/")}
    scale = plugin.loss_scale
    seen = Seen(scale.skipped, scale.value, logged, module.rates)
    losses = [float(strategy.reduce(loss.float())) for loss in recorder.losses]
    return Outcome(losses, [], whole_parameters(module.model, strategy.topology), seen)


LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "tp=2": (2, {"tp": 2}, 1),
    "pp=2, first stage": (2, {"pp": 2, "num_microbatches": 2}, 0),
    "pp=2, last stage": (
        2,
        {"pp": PipelineConfig(degree=2, schedule="zb-h1"), "num_microbatches": 2},
        1,
    ),
    "dp=2 zero 0": (2, {"zero": 0}, 1),
    "dp=2 zero 1, 2 microbatches": (2, {"zero": 1, "num_microbatches": 2}, 1),
    "dp=2 zero 2": (2, {"zero": 2, "num_microbatches": 2}, 0),
    "dp=2 zero 3": (2, {"zero": 3}, 1),
    "tp=2 dp=2 zero 3": (4, {"tp": 2, "zero": 3}, 3),
    "pp=2 dp=2": (4, {"pp": 2, "num_microbatches": 2}, 1),
    "tp=2 pp=2 dp=2 zero 3": (8, {"tp": 2, "pp": 2, "zero": 3, "num_microbatches": 2}, 3),
}
LONG = (
    *("dp=2 zero 1, 2 microbatches", "tp=2 dp=2 zero 3", "pp=2 dp=2"),
    "tp=2 pp=2 dp=2 zero 3",
)


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Outcome:
    found: Outcome = pool.run(1, overflow_job, {}, 0)[0]
    return found


def test_one_process_skips(alone: Outcome) -> None:
    # 2**10, doubled after steps 1 and 4, and 6 is one good step: halved in 2 and 5.
    assert alone.extra.skipped == len(OVERFLOWS_AT)
    assert alone.extra.scale == 2.0**10
    assert alone.extra.logged == {"optim/loss_scale": 2.0**10, "optim/skipped_steps": 2.0}
    # The rate halves after every second step that was taken: 0, 1, 3, 4, 6.
    assert alone.extra.rates == [0.3, 0.15, 0.15, 0.15, 0.075, 0.075, 0.075]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in LONG)) for n in LAYOUTS]
)
def test_all_ranks_skip_what_one_found(pool: WorkerPool, alone: Outcome, name: str) -> None:
    world, options, rank = LAYOUTS[name]
    outcomes = pool.run(world, overflow_job, options, rank)
    for outcome in outcomes:
        assert outcome.extra == alone.extra
        torch.testing.assert_close(
            torch.tensor(outcome.losses), torch.tensor(alone.losses), rtol=1e-3, atol=0
        )
    for key, value in merge_stages(outcomes).items():
        name = key.replace("trunk.head", "trunk.embedding.tokens")  # tied
        torch.testing.assert_close(value, alone.weights[name], rtol=0, atol=2e-3)


def test_accumulated_batches_are_skipped_together(pool: WorkerPool) -> None:
    expected = pool.run(1, overflow_job, {}, 0, accumulate=2)[0].extra
    assert expected.skipped == len(OVERFLOWS_AT)
    for options in ({"pp": 2, "num_microbatches": 2}, {"zero": 2}):
        assert [o.extra for o in pool.run(2, overflow_job, options, 1, accumulate=2)] == [
            expected
        ] * 2


class Plain(small.Small):
    """In float16: `small.samples` are float64, of which autocast takes no notice."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss([t.float() for t in batch])


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def fit_small(
    module: Plain, plugin: Any, path: str | None = None, epochs: int = 1, plain: bool = False
) -> dict[str, Tensor]:
    """Train in a worker of one process; ``plain`` without the strategy."""
    options: dict[str, Any] = {"precision": None, "plugins": [plugin], "max_epochs": epochs}
    trainer = small.make_trainer(None if plain else {}, **options)
    trainer.fit(module, small.loader(), ckpt_path=path)
    return small.weights(module)


def too_large_job() -> None:
    module, plugin = Plain(), Fp16Precision(2.0**40)
    small.assert_same(fit_small(module, plugin), small.weights(Plain()))
    assert plugin.loss_scale.skipped == 4  # all four steps of the epoch
    assert plugin.loss_scale.value == 2.0**36


def test_too_large_a_scale_is_halved_until_it_fits(pool: WorkerPool) -> None:
    pool.run(1, too_large_job)


def same_as_torch_job() -> None:
    ours = fit_small(Plain(), MixedPrecision("16-mixed", "cpu"))  # the strategy exchanges it
    torchs = fit_small(Plain(), MixedPrecision("16-mixed", "cpu"), plain=True)
    untrained = small.weights(Plain())
    for name, value in torchs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)
        assert (value - untrained[name]).abs().max() > 1e-3


def test_training_is_that_of_the_scaler_of_torch(pool: WorkerPool) -> None:
    pool.run(1, same_as_torch_job)


def manual_job() -> None:
    small.assert_same(fit_small(Manual(), Fp16Precision()), fit_small(Plain(), Fp16Precision()))


def test_manual_optimization(pool: WorkerPool) -> None:
    pool.run(1, manual_job)


def checkpoint_job(directory: Path) -> None:
    path = str(directory / "a.ckpt")
    trainer = small.make_trainer({}, precision=None, plugins=[Fp16Precision(2.0**40)])
    trainer.fit(Plain(), small.loader())
    trainer.save_checkpoint(path)
    later = Fp16Precision()
    fit_small(Plain(), later, path, epochs=2)
    assert (later.loss_scale.skipped, later.loss_scale.value) == (8, 2.0**32)
    # Another precision has no use for it.
    fit_small(Plain(), MixedPrecision("bf16-mixed", "cpu"), path, epochs=2)


def test_checkpoints_keep_scale_and_counts(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(1, checkpoint_job, tmp_path)


def test_scale_follows_the_rule_of_torch() -> None:
    ours = LossScale(8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    theirs = torch.amp.GradScaler("cpu", 8.0, 4.0, 0.25, 2)
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(12):
        gradient = torch.full((2,), float("nan") if step in (3, 4, 8) else 6.0)
        weight.grad = gradient.clone()
        theirs.scale(torch.ones(()))
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        finite = ours.unscale([gradient], torch.device("cpu"))
        torch.testing.assert_close(gradient, weight.grad, equal_nan=True)
        ours.update(finite=finite)
        assert ours.value == theirs.get_scale()
    assert ours.skipped == 3


class Lost(Plain):
    """Whose loss is no number from the third batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 if batch_idx < 2 else torch.nan)


def lost_job() -> None:
    module, plugin = Lost(), Fp16Precision(8.0, min_scale=4.0)
    trainer = small.make_trainer({}, precision=None, plugins=[plugin])
    with pytest.raises(FloatingPointError, match="even at a loss scale of 4, after 2 skipped"):
        trainer.fit(module, small.loader())


def test_gradients_that_no_scale_makes_finite_end_the_run(pool: WorkerPool) -> None:
    pool.run(1, lost_job)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="min_scale=2.0, initial_scale=1.0: .* min_scale=1.0"):
        Fp16Precision(1.0, min_scale=2.0)
    with pytest.raises(ConfigError, match="5 options are wrong") as caught:
        Fp16Precision(0.0, 1.0, 1.0, 0, 0.0)
    assert "initial_scale=0.0: must be a finite number above 0" in str(caught.value)
    scaler = torch.amp.GradScaler("cpu", 32.0, growth_interval=7)
    taken = sharded_precision(MixedPrecision("16-mixed", "cpu", scaler))
    assert isinstance(taken, Fp16Precision)
    assert taken.loss_scale.value == 32.0


@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_only_schedules_that_are_due_stay_where_they_are(frequency: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    config = LRSchedulerConfig(scheduler, interval="step", frequency=frequency)
    held = []
    for index in range(6):
        trainer: Any = SimpleNamespace(
            lightning_module=SimpleNamespace(automatic_optimization=True),
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=index)),
        )
        schedules = HeldSchedules()
        schedules.hold([config], trainer)
        held.append("step" in vars(scheduler))
        schedules.release()
        assert "step" not in vars(scheduler)
    assert held == [(index + 1) % frequency == 0 for index in range(6)]
