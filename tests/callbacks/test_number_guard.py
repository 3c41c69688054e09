"""`NumberGuard`: no update from bad numbers, in any layout, with one decision for all ranks."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron import NumberGuard
from lightning_megatron.testing import WorkerPool
from tests.callbacks.guarded import (
    BadGradient,
    Guarded,
    batches,
    differences,
    fit,
    poisoned,
    state_of,
)
from tests.strategies.small import dp_of, make_trainer

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp=2": (2, {"tp": 2}),
    "pp=2": (2, {"pp": 2, "num_microbatches": 2}),
    "zero 0": (2, {"zero": 0}),
    "zero 1, 2 microbatches": (2, {"zero": 1, "num_microbatches": 2}),
    "zero 3": (2, {"zero": 3}),
    "tp=2 pp=2 dp=2 zero 2": (8, {"tp": 2, "pp": 2, "zero": 2, "num_microbatches": 2}),
}
BAD = 2
READERS = " on ranks 2, 3, 6, 7, which read the data of data-parallel rank 1"


def skipping(
    layout: Mapping[str, Any], devices: int, accumulate: int = 1
) -> list[tuple[list[str], int, str]]:
    """For a bad loss and a bad gradient: what differs, the skips, and what was reported."""
    data = batches(6)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0}
    bad = BAD * accumulate
    clean = [b for i, b in enumerate(data) if not bad <= i < bad + accumulate]
    expected = state_of(fit(layout, devices, clean, **options))
    found = []
    for run, extra in (
        (poisoned(data, bad, torch.nan), ()),
        (data, (BadGradient([bad + accumulate - 1], rank=devices - 1),)),
    ):
        guard = NumberGuard(nonfinite="skip")
        trainer = fit(layout, devices, run, *extra, guard, **options)
        logged = int(trainer.callback_metrics["optim/skipped_steps"])
        assert logged == guard.skipped
        found.append((differences(state_of(trainer), expected), logged, guard.faults[0].detail))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_skip_leaves_what_a_run_without_the_batch_leaves(pool: WorkerPool, name: str) -> None:
    devices, layout = LAYOUTS[name]
    by_rank = pool.run(devices, skipping, layout, devices)
    assert by_rank == [by_rank[0]] * devices
    (lost, skips, loss), (lost_too, skips_too, gradient) = by_rank[0]
    assert lost == lost_too == []
    assert skips == skips_too == 1
    everywhere = devices > 1 and dp_of(devices, layout) == 1
    where = {1: "", 2: " on rank 1"}.get(devices, READERS) if not everywhere else " on every rank"
    assert loss == f"the loss of batch {BAD} is nan{where}"
    assert "the norm of the gradients is nan; those of 1 parameters are not finite" in gradient
    assert devices == 1 or gradient.endswith(f", on rank {devices - 1}")


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
    by_rank = pool.run(4, raising, {"pp": 2, "num_microbatches": 2}, 4)
    where = "on ranks 1, 3, which read the data of data-parallel rank 1"
    assert by_rank == [(f"step {BAD}: the loss of batch {BAD} is inf {where}", [])] * 4
