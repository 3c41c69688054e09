"""``partition="measured"`` moves items between stages in mid-training; the loss does not notice."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import accumulate as running_sum
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import PipelineMonitor, PipelineSequential
from lightning_megatron.errors import ConfigError
from lightning_megatron.models.transformer import TransformerBlock
from lightning_megatron.optim.build import make_optimizer
from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.pipeline import timing
from lightning_megatron.schedules.repartition import Repartition
from lightning_megatron.strategy.megatron import MegatronStrategy
from lightning_megatron.testing import WorkerError, WorkerPool
from lightning_megatron.tuning import partition as measured_partition
from lightning_megatron.tuning.partition import MeasuredPartition
from lightning_megatron.zero.data_parallel import ShardingConfig
from tests.parity import reference
from tests.parity.jobs import (
    GlobalBatches,
    Outcome,
    ParityModule,
    Recorder,
    merge_stages,
    quiet_trainer,
    whole_parameters,
)
from tests.parity.reference import Architecture, Data, reference_curve
from tests.parity.test_matrix import check, close
from tests.strategy.small import dp_of, tuner_of


def measured(degree: int = 2, schedule: str = "1f1b") -> PipelineConfig:
    return PipelineConfig(degree=degree, schedule=schedule, partition="measured")


MOVES_BEFORE = measured_partition.SKIPPED + measured_partition.MEASURED
"""Optimizer steps before the move."""


@contextmanager
def forced(counts: Sequence[int] | None) -> Iterator[None]:
    """Within the block, the plan is this partition, whatever was measured."""
    borders = [0, *running_sum(counts or ())]
    plan = Repartition(
        stages=tuple(range(a, b) for a, b in pairwise(borders)),
        step_time_before=2.0,
        step_time_after=1.0,
    )
    with mock.patch.object(measured_partition, "repartition", return_value=plan):
        yield


def fit(
    module: L.LightningModule,
    options: dict[str, Any],
    accumulate: int = 1,
    callbacks: Sequence[L.Callback] = (),
    ckpt_path: str | None = None,
    loader: Any = None,
    **trainer_options: Any,
) -> Outcome:
    """Train; `extra` is the report of the measured partition."""
    strategy = MegatronStrategy(**options, gather_at_end=False)  # it is measured once
    recorder = Recorder(accumulate)
    trainer = quiet_trainer(
        strategy,
        callbacks=[recorder, *callbacks],
        gradient_clip_val=reference.CLIP,
        accumulate_grad_batches=accumulate,
        **trainer_options,
    )
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    losses = [float(strategy.reduce(loss)) for loss in recorder.losses]
    measured = tuner_of(strategy, MeasuredPartition)
    model = getattr(module, "model", module)
    weights = whole_parameters(model, strategy.topology)
    return Outcome(losses, recorder.norms, weights, measured.report if measured else None)


# Measured, of layers that differ in cost ----------------------------------------------------------

PAUSE_S, LOOK_S = 1.0, 0.001


class Clock:
    """A clock of the rank's own, which a look at it and a slow item move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += LOOK_S
        return self.now


CLOCK = Clock()


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        CLOCK.now += PAUSE_S
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        CLOCK.now += PAUSE_S
        return gradient


class SlowBlock(TransformerBlock):
    """A block that takes long, forward and backward."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        out: Tensor = _Pause.apply(super().forward(x, *args))
        return out


def slow_job(
    options: dict[str, Any],
    data: Data,
    slow: tuple[int, ...],
    least_gain: float = measured_partition.LEAST_GAIN,
) -> Outcome:
    """Train the reference's model, of which some layers are slow."""
    L.seed_everything(1, verbose=False)
    module = ParityModule("deep", data)
    for index in slow:
        module.model.trunk.layers[index].__class__ = SlowBlock
    with (
        mock.patch.object(measured_partition, "LEAST_GAIN", least_gain),
        mock.patch.object(timing, "time", CLOCK),
    ):
        return fit(module, options)


SLOW: dict[str, tuple[int, PipelineConfig, tuple[int, ...], int]] = {
    # Embedding, five layers, norm and head are eight items, cut into 4 and 4 by parameters.
    "pp=2": (2, measured(), (0, 1), 1),
    "pp=2 zbv": (2, measured(schedule="zbv"), (2, 3), 1),
}
"""Processes, pipeline, slow layers, and how many of them a stage may hold in the end."""


def _parts(counts: Sequence[int]) -> list[set[int]]:
    """Layers of every stage, from its number of items; the embedding comes before the layers."""
    ends = list(itertools.accumulate(counts))
    return [set(range(end - count - 1, end - 1)) for end, count in zip(ends, counts, strict=True)]


@pytest.mark.parametrize("case", ["pp=2", pytest.param("pp=2 zbv", marks=pytest.mark.thorough)])
def test_slow_items_are_spread_over_the_ranks(pool: WorkerPool, case: str) -> None:
    world, pp, slow, expected = SLOW[case]
    data = Data(steps=2 * MOVES_BEFORE + 1)
    outcomes = pool.run(world, slow_job, {"pp": pp, "num_microbatches": 4}, data, slow)
    check(outcomes, reference_curve("deep", data))
    report = outcomes[0].extra
    assert report == outcomes[1].extra
    assert report.before in ((4, 4), (2, 1, 2, 3))
    assert report.after != report.before
    assert max(sum(item in part for item in slow) for part in _parts(report.after)) <= expected
    others = [s for item, s in enumerate(report.item_seconds) if item - 1 not in slow]
    assert 0 < sum(others) < PAUSE_S
    for item in slow:
        assert report.item_seconds[item + 1] >= 2 * PAUSE_S
    assert report.step_expected < report.step_before
    assert report.step_after is not None


def test_nothing_moves_for_too_small_a_gain(pool: WorkerPool) -> None:
    """Stages of equal cost would halve the step; it must be more than that here."""
    data = Data(steps=MOVES_BEFORE + 2)
    options = {"pp": measured(), "num_microbatches": 4}
    outcomes = pool.run(2, slow_job, options, data, (0, 1), least_gain=0.9)
    check(outcomes, reference_curve("deep", data))
    report = outcomes[0].extra
    assert report.after == report.before
    assert report.step_after is None


# Every layout, to any partition -------------------------------------------------------------------


def forced_job(
    options: dict[str, Any],
    data: Data,
    to: Sequence[int],
    accumulate: int,
    architecture: Architecture = "deep",
) -> Outcome:
    L.seed_everything(1, verbose=False)
    with forced(to):
        # Its measurements and these do not disturb each other.
        monitor = PipelineMonitor(every=1)
        return fit(ParityModule(architecture, data), options, accumulate, [monitor])


LAYOUTS: dict[str, tuple[int, dict[str, Any], list[int], int]] = {
    "pp=3 gpipe": (3, {"pp": measured(3, "gpipe")}, [1, 6, 1], 1),
    "zero 0, accumulated": (4, {"zero": 0}, [7, 1], 2),
    "zero 1": (4, {"zero": ShardingConfig(stage=1, min_numel=1)}, [6, 2], 1),
    "zero 2": (4, {"zero": 2}, [1, 7], 1),
    "tp=2": (4, {"tp": 2}, [2, 6], 1),
    "cp=2": (4, {"cp": 2, "zero": 3}, [2, 6], 1),
    "interleaved": (2, {"pp": measured(schedule="interleaved")}, [1, 4, 2, 1], 1),
    "zbv zero 3": (4, {"pp": measured(schedule="zbv"), "zero": 3}, [3, 3, 1, 1], 1),
    "schedule=auto": (2, {"pp": measured(schedule="auto")}, [1, 3, 3, 1], 1),
}


@pytest.mark.thorough  # by default those below, and of weights that ZeRO 3 cuts, of experts
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_goes_on_after_the_move(pool: WorkerPool, layout: str) -> None:
    world, options, to, accumulate = LAYOUTS[layout]
    data = Data(steps=(MOVES_BEFORE + 3) * accumulate)
    options = {"pp": measured(), "num_microbatches": 2, **options}
    outcomes = pool.run(world, forced_job, options, data, to, accumulate)
    check(outcomes, reference_curve("deep", data, accumulate))
    assert outcomes[0].extra.after == tuple(to)


@pytest.mark.thorough  # `tests.parity.test_experts` moves them by default
@pytest.mark.parametrize("zero", [1, 3])
def test_experts_move_with_their_layers(pool: WorkerPool, zero: int) -> None:
    data = Data(steps=MOVES_BEFORE + 3)
    options = {"pp": measured(), "num_microbatches": 2, "ep": 2, "zero": zero}
    outcomes = pool.run(4, forced_job, options, data, [3, 2], 1, "mixture")
    check(outcomes, reference_curve("mixture", data))
    assert outcomes[0].extra.after == (3, 2)


# Optimizers whose state has other shapes, or formats ----------------------------------------------


class OtherOptimizer(ParityModule):
    """In float32, with an optimizer by name."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__("deep", Data(steps=MOVES_BEFORE + 3))
        self.float()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.optimizer, self, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))


def optimizer_job(optimizer: str, options: dict[str, Any], to: Sequence[int] | None) -> Outcome:
    L.seed_everything(1, verbose=False)
    with forced(to):
        return fit(OtherOptimizer(optimizer), options, precision="32-true")


@pytest.mark.parametrize(
    "optimizer", [pytest.param("adafactor", marks=pytest.mark.thorough), "muon-int8"]
)
def test_narrow_and_factored_state_moves(pool: WorkerPool, optimizer: str) -> None:
    options = {"pp": 2, "num_microbatches": 2}
    still = pool.run(2, optimizer_job, optimizer, options, None)
    moved = pool.run(2, optimizer_job, optimizer, {**options, "pp": measured()}, [2, 6])
    assert moved[0].extra.after == (2, 6)
    torch.testing.assert_close(moved[0].losses, still[0].losses, rtol=1e-6, atol=0)


# Items of any kind --------------------------------------------------------------------------------


class Odd(nn.Module):
    """Keeps state in every way that a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.calls = 0
        self.table = {"calls": 0}
        self.constant = torch.full((4,), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.table["calls"] += 1
            self.seen += 1
            self.mean += 1e-3
        y = self.linear(x).tanh() + x * self.constant.to(x.dtype)
        return y + self.mean + 1e-3 * self.seen + 1e-3 * self.calls + 1e-3 * self.table["calls"]

    def get_extra_state(self) -> Any:
        return dict(self.table)

    def set_extra_state(self, state: Any) -> None:
        self.table = dict(state)


class OddModule(GlobalBatches):
    """Eight odd items, of which two pairs share a weight, one is frozen and one is evaluated."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        batches = [
            (
                torch.randn(8, 4, generator=draw, dtype=torch.float64),
                torch.randn(8, 4, generator=draw, dtype=torch.float64),
            )
            for _ in range(MOVES_BEFORE + 2)
        ]
        super().__init__(batches)
        torch.manual_seed(2)
        self.trunk = PipelineSequential(layers=[Odd() for _ in range(8)])
        self.scale = nn.Parameter(torch.ones(4))
        layers: Any = self.trunk.layers
        layers[4].linear.weight = layers[5].linear.weight
        layers[3].linear.weight = layers[6].linear.weight
        layers[2].linear.bias.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == MOVES_BEFORE - 1:
            layers: Any = self.trunk.layers
            layers[1].eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.trunk(batch[0] * self.scale), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        vectors = [p for p in self.parameters() if p.ndim == 1]
        matrices = [p for p in self.parameters() if p.ndim == 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.1, eps=1e-5)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def odd_job(options: dict[str, Any], to: Sequence[int] | None) -> Outcome:
    """Train for two epochs, the second by another Trainer."""
    L.seed_everything(1, verbose=False)
    module = OddModule()
    with forced(to):
        first = fit(module, options)
        second = fit(module, options)
    report = first.extra
    assert to is None or second.extra is None, "it is measured once"
    return Outcome(first.losses + second.losses, first.norms + second.norms, second.weights, report)


# Ranks hold stages 0 and 3, and 1 and 2; each has two items at first.
ODD = {
    "stages of one rank come to share a weight": (4, 2, [2, 3, 1, 2]),
    "so do both ranks": (2, 1, [5, 1, 1, 1]),
    "two ranks share no longer": (4, 3, [1, 1, 5, 1]),
    "zero 0": (4, 0, [1, 4, 1, 2]),
}
"""Processes, ZeRO stage, stages."""


ODD_OPTIONS = {"pp": measured(schedule="zbv"), "num_microbatches": 2}


@cache
def stays(pool: WorkerPool, world: int) -> Outcome:
    """A run in which nothing moves: what an item counts depends on its copies."""
    options = {**ODD_OPTIONS, "pp": PipelineConfig(degree=2, schedule="zbv")}
    ranks = pool.run(world, odd_job, options, None)
    return replace(ranks[0], weights=merge_stages(ranks))


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.thorough] * (ODD[case][0] > 2)) for case in ODD],
)
def test_all_state_of_an_item_moves_with_it(pool: WorkerPool, case: str) -> None:
    world, zero, to = ODD[case]
    stay = stays(pool, world)
    outcomes = pool.run(world, odd_job, {**ODD_OPTIONS, "zero": zero}, to)
    assert outcomes[0].extra.after == tuple(to)
    weights = stay.weights
    for outcome in outcomes:
        close("losses", outcome.losses, stay.losses)
        close("norms", outcome.norms, stay.norms)
        for name in outcome.weights.keys() & weights.keys():  # a shared one has several names
            torch.testing.assert_close(outcome.weights[name], weights[name], rtol=1e-9, atol=1e-12)


# Checkpoints --------------------------------------------------------------------------------------


def saving_job(options: dict[str, Any], data: Data, directory: str, resume: bool) -> Outcome:
    L.seed_everything(1, verbose=False)
    step = MOVES_BEFORE + 1
    save = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    path = f"{directory}/step={step}.ckpt" if resume else None
    given: dict[str, Any] = {} if resume else {"callbacks": [save], "enable_checkpointing": True}
    samples = TensorDataset(*(torch.cat(part) for part in zip(*data.batches(), strict=True)))
    loader = DataLoader(samples, batch_size=data.batch // dp_of(2, options))
    given |= {"loader": loader, "use_distributed_sampler": True, "ckpt_path": path}
    with forced([2, 6]):
        return fit(ParityModule("deep", data), options, **given)


def test_a_run_resumes_after_the_move(pool: WorkerPool, tmp_path: Path) -> None:
    data, done = Data(steps=2 * MOVES_BEFORE + 2), MOVES_BEFORE + 1
    here = {"pp": measured(), "num_microbatches": 2}
    outcomes = pool.run(2, saving_job, here, data, str(tmp_path), False)
    curve = reference_curve("deep", data)
    check(outcomes, curve)
    without = {"zero": 1, "num_microbatches": 2}
    for options in (here, without):
        for outcome in pool.run(2, saving_job, options, data, str(tmp_path), True):
            close("losses", outcome.losses, curve.losses[done:])
            close("norms", outcome.norms, curve.norms[done:])
            assert (outcome.extra is not None) == ("pp" in options), "it is measured again"


# What cannot work ---------------------------------------------------------------------------------


class Referring(OddModule):
    """Reaches into its trunk from outside."""

    def __init__(self) -> None:
        super().__init__()
        layers: Any = self.trunk.layers
        self.favourites = [layers[0]]


class Grouped(OddModule):
    """Has as many groups as parameters."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p], "lr": 0.1 / p.numel()} for p in self.parameters()]
        return torch.optim.SGD(groups)


def refused_job(kind: type[L.LightningModule]) -> Outcome:
    return fit(kind(), {"pp": measured(), "num_microbatches": 2})


@pytest.mark.parametrize(
    ("kind", "message"), [(Referring, "favourites"), (Grouped, "other parameter groups")]
)
def test_what_cannot_move_is_refused_at_the_start(
    pool: WorkerPool, kind: type[L.LightningModule], message: str
) -> None:
    with pytest.raises(WorkerError, match=message) as found:
        pool.run(2, refused_job, kind)
    assert ConfigError.__name__ in str(found.value)
