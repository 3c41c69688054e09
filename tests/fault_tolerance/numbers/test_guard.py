"""`NumberGuard`: no update from bad numbers, in any layout, with one decision for all ranks."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_megatron import (
    ConfigError,
    EventLogWriter,
    Fp16Precision,
    GradientMonitor,
    NumberGuard,
    RollbackConfig,
    SpikeConfig,
)
from lightning_megatron.run_log.events import read_events
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.gradients import local
from tests.fault_tolerance.numbers.guarded import (
    BadGradient,
    Guarded,
    Manual,
    batches,
    differences,
    fit,
    poisoned,
    state_of,
)
from tests.strategy.small import Small, dp_of, loader, make_trainer

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp=2": (2, {"tp": 2}),
    "pp=2": (2, {"pp": 2, "num_microbatches": 2}),
    "zero 0": (2, {"zero": 0}),
    "zero 1, 2 microbatches": (2, {"zero": 1, "num_microbatches": 2}),
    "zero 2, 2 microbatches": (2, {"zero": 2, "num_microbatches": 2}),
    "zero 3": (2, {"zero": 3}),
    "pp=2 dp=2 zero 2": (4, {"pp": 2, "zero": 2, "num_microbatches": 2}),
}
SELDOM = ("zero 0", "zero 1, 2 microbatches", "pp=2 dp=2 zero 2")
"""Layouts of which the others have all that the guard does for them."""
BAD = 2
READERS = " on ranks 1, 3, which read the data of data-parallel rank 1"


def skipping(
    layout: Mapping[str, Any], devices: int, accumulate: int = 1
) -> tuple[list[str], int, list[str]]:
    """After a bad loss, and later a bad gradient: what differs, the skips, what was reported."""
    data = batches(6 * accumulate)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0}
    clean = [b for i, b in enumerate(data) if i // accumulate not in (BAD, BAD + 2)]
    # Sums are made in another order where somebody may look at gradients.
    expected = state_of(fit(layout, devices, clean, BadGradient([], 0), **options))
    guard = NumberGuard(nonfinite="skip")
    gradient = BadGradient([(BAD + 3) * accumulate - 1], rank=devices - 1)
    run = poisoned(data, BAD * accumulate, torch.nan)
    trainer = fit(layout, devices, run, gradient, guard, **options)
    logged = int(trainer.callback_metrics["optim/skipped_steps"])
    assert logged == guard.skipped
    return differences(state_of(trainer), expected), logged, [f.detail for f in guard.faults]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough) if name in SELDOM else name
        for name in LAYOUTS
    ],
)
def test_skip_leaves_what_a_run_without_the_batch_leaves(pool: WorkerPool, name: str) -> None:
    devices, layout = LAYOUTS[name]
    by_rank = pool.run(devices, skipping, layout, devices)
    assert by_rank == [by_rank[0]] * devices
    lost, skips, (loss, gradient) = by_rank[0]
    assert (lost, skips) == ([], 2)
    everywhere = devices > 1 and dp_of(devices, layout) == 1
    where = {1: "", 2: " on rank 1"}.get(devices, READERS) if not everywhere else " on every rank"
    assert loss == f"the loss of batch {BAD} is nan{where}"
    assert "the norm of the gradients is nan; those of 1 parameters are not finite" in gradient
    assert devices == 1 or gradient.endswith(f", on rank {devices - 1}")


def rolling_back(layout: Mapping[str, Any], devices: int) -> tuple[Any, ...]:
    """For a bad number and a spike: what differs from a run that never saw the batches."""
    data, last = batches(12), 6
    # Copies are made after 0, 2, 4 and 6 updates; that of 4 is the newest that is old enough.
    clean = state_of(fit(layout, devices, [b for i, b in enumerate(data) if not 4 <= i < 9]))
    found = []
    for value in (torch.nan, 1e6):
        guard = NumberGuard(
            nonfinite="rollback",
            spike="rollback",
            rollback=RollbackConfig(steps=2, skip_batches=5),
            spikes=SpikeConfig(warmup=4, floor=1.0),
        )
        trainer = fit(layout, devices, poisoned(data, last, value), guard)
        logged = trainer.callback_metrics
        counts = [int(logged[key]) for key in ("optim/rollbacks", "optim/skipped_steps")]
        [fault] = guard.faults
        lost = differences(state_of(trainer), clean)
        assert lost.pop() == "mean loss"  # the steps that were undone had a loss
        found.append((lost, counts, fault.what))
    return tuple(found)


@pytest.mark.parametrize(
    "name",
    [
        *("pp=2", "zero 3"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("tp=2", "zero 0")),
    ],
)
def test_rollback_leaves_what_a_run_without_the_window_leaves(pool: WorkerPool, name: str) -> None:
    devices, layout = LAYOUTS[name]
    for found in pool.run(devices, rolling_back, layout, devices):
        # The bad step is left out, and so are the two batches that follow.
        assert found == (([], [1, 3], "loss"), ([], [1, 3], "spike"))


def raising(layout: Mapping[str, Any], devices: int) -> tuple[str, list[str]]:
    """The error, and what differs from the state that the run had reached."""
    data, guard = batches(4), NumberGuard()
    expected = state_of(fit(layout, devices, data[:BAD]))
    module = Guarded(poisoned(data, BAD, torch.inf))
    pl.seed_everything(5, verbose=False)
    trainer = make_trainer(layout, devices, callbacks=[guard], use_distributed_sampler=False)
    try:
        trainer.fit(module)
    except FloatingPointError as error:
        kept = state_of(trainer)
        return str(error), [
            n for n in differences(kept, expected) if n in dict(module.named_parameters())
        ]
    return "no error", []


def test_raise_ends_all_ranks_with_the_weights_of_before(pool: WorkerPool) -> None:
    layout = {"pp": 2, "num_microbatches": 2, "gather_at_end": False}
    by_rank = pool.run(4, raising, layout, 4)
    where = "on ranks 1, 3, which read the data of data-parallel rank 1"
    assert by_rank == [(f"step {BAD}: the loss of batch {BAD} is inf {where}", [])] * 4


def running_again(layout: Mapping[str, Any], devices: int) -> tuple[Any, ...]:
    """What differs from a clean run after a fault that passes, and from one without the batch."""
    data = batches(5)
    clean = state_of(fit(layout, devices, data))
    without = state_of(fit(layout, devices, [b for i, b in enumerate(data) if i != BAD]))
    guard = NumberGuard(nonfinite="rerun", after_rerun="skip")
    once = fit(layout, devices, data, BadGradient([BAD], rank=devices - 1, times=1), guard)
    transient = differences(state_of(once), clean), guard.skipped
    guard = NumberGuard(nonfinite="rerun", after_rerun="skip")
    always = fit(layout, devices, poisoned(data, BAD, torch.nan), guard)
    return transient, (differences(state_of(always), without), guard.skipped)


@pytest.mark.parametrize(
    "name", ["pp=2", "zero 3", pytest.param("tp=2", marks=pytest.mark.thorough)]
)
def test_rerun_tells_a_fault_that_passes_from_one_that_stays(pool: WorkerPool, name: str) -> None:
    devices, layout = LAYOUTS[name]
    for found in pool.run(devices, running_again, layout, devices):
        assert found == (([], 0), ([], 1))


class Save(pl.Callback):
    """Saves while batches are passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 6:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_passes_over_the_rest_of_the_window(tmp_path: Path) -> None:
    data = poisoned(batches(12), 4, torch.nan)

    def guard() -> NumberGuard:
        config = RollbackConfig(steps=2, skip_batches=8)  # 2 to 9; two copies, after 2 and 4
        return NumberGuard(nonfinite="rollback", rollback=config)

    whole = fit({}, 1, data, guard(), Save(tmp_path / "amid.ckpt"))
    resumed = guard()
    rest = fit({}, 1, data, resumed, ckpt_path=str(tmp_path / "amid.ckpt"))
    lost = differences(state_of(rest), state_of(whole))
    assert [name for name in lost if name != "mean loss"] == []
    assert resumed.rollbacks == 1
    # Batch 4, and 5 to 9: those before had been trained on, which was undone.
    assert rest.callback_metrics["optim/skipped_steps"] == 6


class Astray(pl.Callback):
    """Enlarges all weights after a step, as a bad update does that nobody noticed."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == 40:
            with torch.no_grad():
                for parameter in module.parameters():
                    local(parameter).mul_(8.0)


class Learnable(Guarded):
    """Targets that a linear map gives, and no dropout: a smooth curve."""

    def between(self) -> nn.Module:
        return nn.Tanh()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        if not trainer.strategy.recovery.skips_batch:
            self.found.append(float(trainer.strategy.reduce(outputs["loss"])))


def going_astray(layout: Mapping[str, Any], devices: int, run_dir: str) -> tuple[Any, ...]:
    data, losses = [(x, x.flip(1) * 0.5) for x, _ in batches(90)], Losses()
    guard = NumberGuard(
        spike="rollback",
        rollback=RollbackConfig(steps=10, skip_batches=20),
        spikes=SpikeConfig(warmup=20),
    )
    writer = EventLogWriter(run_dir)
    trainer = fit(layout, devices, data, Astray(), guard, losses, writer, make=Learnable)
    return guard.rollbacks, losses.found, trainer.global_step


def test_a_spike_is_over_within_twenty_steps(pool: WorkerPool, tmp_path: Path) -> None:
    [(rollbacks, losses, steps)] = pool.run(1, going_astray, {}, 1, str(tmp_path))
    assert rollbacks == 1
    assert steps == 90  # of which Lightning counts those left out
    before, spike, after = losses[31:41], losses[41], losses[42:62]
    assert spike > 10 * max(before)
    assert fmean(after[-5:]) <= 1.05 * fmean(before)
    events = {e["kind"]: e for e in read_events(tmp_path)}
    assert events["fault"]["what"] == "spike"
    assert events["fault"]["action"] == "rollback"
    assert events["fault"]["step"] == 41
    back = events["rollback"]
    assert (back["updates_back"], back["batches_since"], back["batches_ahead"]) == (11, 12, 8)


def by_hand(layout: Mapping[str, Any], devices: int) -> tuple[str, int]:
    data, guard = batches(4), NumberGuard(nonfinite="skip")
    run = fit(layout, devices, poisoned(data, BAD, torch.nan), guard, make=Manual)
    assert all(bool(local(p).isfinite().all()) for p in run.lightning_module.parameters())
    try:
        fit(layout, devices, poisoned(data, BAD, torch.nan), NumberGuard(), make=Manual)
    except FloatingPointError as error:
        return str(error), guard.skipped
    return "no error", guard.skipped


def test_manual_optimization_raises_and_skips(pool: WorkerPool) -> None:
    for error, skipped in pool.run(2, by_hand, {"zero": 2}, 2):
        assert error.startswith(f"step {BAD}: the norm of the gradients is nan; those of")
        assert skipped == 1


class Half(Guarded):
    """Without the batch norm, which does not run in float16 on CPUs."""

    def between(self) -> nn.Module:
        return nn.Dropout(0.2)


def half(layout: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """16-mixed: a scale that is too large, and faults that have nothing to do with it."""
    data = batches(6, torch.float32)
    kept: dict[str, Any] = {}

    def run(given: Any, scale: float, *callbacks: Any) -> Any:
        plugin = Fp16Precision(scale)
        trainer = fit(
            layout, devices, given, *callbacks, make=Half, precision=None, plugins=[plugin]
        )
        kept["scale"], kept["skipped"] = plugin.loss_scale.value, plugin.skipped_steps
        return trainer

    for callback in (NumberGuard(), GradientMonitor(nonfinite="raise")):
        run(data, 2.0**40, callback)  # overflows in every step
        kept["overflows"] = kept.get("overflows", ()) + (kept["skipped"], kept["scale"])
    monitor = GradientMonitor(nonfinite="skip")
    run(data, 2.0**40, monitor)
    kept["monitor"] = monitor.skipped, kept["skipped"]
    clean = state_of(run([b for i, b in enumerate(data) if i != BAD], 16.0))
    bad = run(poisoned(data, BAD, torch.nan), 16.0, NumberGuard(nonfinite="skip"))
    kept["skip"] = differences(state_of(bad), clean), kept["scale"], kept["skipped"]
    try:
        run(data, 1.0, BadGradient([BAD], rank=0), NumberGuard())
    except FloatingPointError as error:
        kept["error"] = str(error)
    return kept


def test_overflow_of_the_loss_scale_is_no_fault(pool: WorkerPool) -> None:
    for found in pool.run(2, half, {"zero": 2}, 2):
        assert found["overflows"] == (6, 2.0**34) * 2
        assert found["monitor"] == (0, 6)
        assert found["skip"] == ([], 16.0, 1)
        assert found["error"].startswith(f"step {BAD}: the norm of the gradients is nan")


def test_accumulated_batches_share_one_fate(pool: WorkerPool) -> None:
    found = pool.run(2, skipping, {"zero": 2}, 2, 2)
    for lost, skips, _ in found:
        assert (lost, skips) == ([], 2)


def test_a_run_without_a_good_batch_ends(pool: WorkerPool) -> None:
    data = batches(6)
    for at in range(2, 6):
        data = poisoned(data, at, torch.nan)
    guard = NumberGuard(nonfinite="skip", max_skips_in_a_row=3)
    with pytest.raises(FloatingPointError, match="3 steps in a row were skipped"):
        fit({}, 1, data, guard)
    twice = RollbackConfig(steps=1, skip_batches=0, max_rollbacks=2)
    with pytest.raises(FloatingPointError, match="max_rollbacks=2 rollbacks are done"):
        fit({}, 1, data, NumberGuard(nonfinite="rollback", rollback=twice))


def test_wrong_options() -> None:
    with pytest.raises(ConfigError) as caught:
        NumberGuard("stop", spike="raise", rollback=RollbackConfig(steps=0))  # type: ignore[arg-type]
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "nonfinite='stop'",
        "spike='raise'",
        "rollback.steps=0",
    ]
    with pytest.raises(ConfigError, match="it needs the losses and gradients of a MegatronStr"):
        make_trainer(None, callbacks=[NumberGuard()]).fit(Small(), loader())
    with pytest.raises(ConfigError, match="only the last of the accumulated batches"):
        fit({}, 1, batches(2), NumberGuard("rerun"), accumulate_grad_batches=2)
    with pytest.raises(ConfigError, match="steps the optimizer itself cannot be undone"):
        fit({}, 1, batches(2), NumberGuard("rollback"), make=Manual)
    with pytest.raises(ConfigError, match="both respond to the same fault"):
        fit({}, 1, batches(2), NumberGuard(), GradientMonitor(nonfinite="skip"))
