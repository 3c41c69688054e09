"""A signal ends a run with a checkpoint, from which it goes on as if nothing had happened."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron import Preemption
from lightning_megatron.testing import WorkerPool
from tests.strategy.data.loaders import LOADERS
from tests.strategy.resuming import augmented_loader, differences, train
from tests.strategy.small import Small, loader, make_trainer


class Strike(pl.Callback):
    """Sends this process a signal in a hook, at one batch of one epoch."""

    def __init__(self, hook: str, epoch: int, batch: int, rank: int = 0) -> None:
        self.at, self.rank = (epoch, batch), rank
        self.done = False
        setattr(self, hook, self.strike)

    def strike(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        validates = trainer.validating or trainer.sanity_checking
        loop: Any = trainer.fit_loop.epoch_loop
        batch = loop.val_loop.batch_progress.current.ready - 1 if validates else loop.batch_idx
        here = (trainer.current_epoch, batch) == self.at
        if here and not self.done and self.rank == trainer.global_rank:
            self.done = True
            os.kill(os.getpid(), signal.SIGTERM)


class Journal(pl.Callback):
    """Validations with their batches, and epochs as they begin and end."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.batches = 0

    def on_after_backward(self, *args: Any) -> None:
        """As `Strike` has one: where such a hook exists, gradients are summed in another order."""

    def on_train_epoch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(("begin", trainer.current_epoch, trainer.global_step))

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(("end", trainer.current_epoch, trainer.global_step))

    def on_validation_start(self, *args: Any) -> None:
        self.batches = 0

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.batches += 1

    def on_validation_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.seen.append((self.batches, trainer.current_epoch, trainer.global_step))


AT_THE_END = {"val_check_interval": 1.0}
POINTS: dict[str, tuple[tuple[str, int, int], tuple[int, int], dict[str, Any]]] = {
    "before the first step": (("on_train_start", 0, -1), (0, 0), {}),
    "after a step": (("on_after_backward", 0, 1), (0, 2), {}),
    "amid an accumulation": (("on_after_backward", 0, 2), (0, 2), {}),
    "when validation is due": (("on_train_batch_start", 0, 3), (0, 4), {}),
    "in validation": (("on_validation_batch_start", 0, 2), (0, 4), {}),
    "in the last batch of validation": (("on_validation_batch_end", 0, 5), (0, 4), {}),
    "in the last batch of an epoch": (("on_after_backward", 0, 5), (1, 0), {}),
    "after the last step of an epoch": (("on_train_epoch_end", 0, 5), (1, 0), {}),
    "in the second epoch": (("on_train_batch_start", 1, 3), (1, 4), {}),
    "validation due as an epoch ends": (("on_after_backward", 0, 5), (1, 0), AT_THE_END),
    "in validation as an epoch ends": (("on_validation_batch_start", 0, 1), (1, 0), AT_THE_END),
    "in the last batch": (("on_after_backward", 1, 5), (2, 0), {}),
    "in the last batch of an epoch of so many steps": (
        ("on_after_backward", 0, 5),
        (1, 0),
        {"max_steps": 6, "max_epochs": -1},
    ),
}
"""Hook, epoch and batch of the signal; first batch of the resumed run; options."""

COUPLED = ["amid an accumulation", "in validation", "in the last batch of an epoch"]
"""Points at which ranks wait for each other in different ways."""


def preempt_and_resume(
    layout: Mapping[str, Any],
    devices: int,
    workers: int,
    points: list[str],
    folder: str,
    make_loader: Any = augmented_loader,
) -> dict[str, Any]:
    """What differs, for each point."""
    faults: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for point in points:
        strike, first, options = POINTS[point]
        if str(options) not in whole:
            seen = Journal()
            curve = train(layout, devices, workers, make_loader, callbacks=[seen], **options)
            whole[str(options)] = curve, seen.seen
        expected, journal = whole[str(options)]
        root = f"{folder}/{point}"
        seen = Journal()
        run = {**options, "default_root_dir": root}
        killing = [seen, Preemption(), Strike(*strike, rank=devices - 1)]
        with pytest.raises(SystemExit) as end:
            train(layout, devices, workers, make_loader, callbacks=killing, **run)
        found = [path.name for path in Path(root).iterdir()]
        rest = train(
            layout,
            devices,
            workers,
            make_loader,
            path="auto",
            callbacks=[seen, Preemption()],
            **run,
        )
        faults[point] = differences(expected, rest, first)
        if end.value.code != 143:
            faults[point].append(f"exit code {end.value.code}")
        if len(found) != 1:
            faults[point].append(f"saved {found}")
        if seen.seen != journal:
            faults[point].append(f"{seen.seen} instead of {journal}")
    return faults


@pytest.mark.parametrize(
    ("devices", "layout", "workers", "points"),
    [
        (1, {}, 0, list(POINTS)),
        (2, {"zero": 2}, 1, ["amid an accumulation"]),
        (2, {"pp": 2, "num_microbatches": 2}, 0, ["in validation"]),
        *(
            pytest.param(2, *rest, COUPLED, marks=pytest.mark.thorough)
            for rest in (({"zero": 2}, 2), ({"pp": 2, "num_microbatches": 2}, 0))
        ),
    ],
)
def test_the_run_that_goes_on_takes_the_same_steps_and_validates_as_often(
    pool: WorkerPool,
    tmp_path: Path,
    devices: int,
    layout: dict[str, Any],
    workers: int,
    points: list[str],
) -> None:
    by_rank = pool.run(devices, preempt_and_resume, layout, devices, workers, points, str(tmp_path))
    assert by_rank == [{point: [] for point in points}] * devices


@pytest.mark.parametrize("name", ["a generator for sampler and loader", "a stream with a state"])
def test_a_validation_that_is_made_up_for_does_not_move_the_data(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    """Though Lightning iterates the loaders once more after it."""
    points = ["in validation as an epoch ends"]
    [faults] = pool.run(1, preempt_with_loader, name, points, str(tmp_path))
    assert faults == {point: [] for point in points}


def preempt_with_loader(name: str, *args: Any) -> dict[str, Any]:
    return preempt_and_resume({}, 1, 0, *args, make_loader=LOADERS[name])


class StrikeAtStep(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGINT)


def preempt_often(steps: list[int], folder: str) -> list[tuple[Any, list[str]]]:
    """Exit code and checkpoints, after each time."""
    found = []
    for step in steps:
        callbacks = [Preemption(dirpath=folder, exit_code=9), StrikeAtStep(step)]
        trainer = make_trainer({}, max_epochs=-1, callbacks=callbacks, default_root_dir=folder)
        with pytest.raises(SystemExit) as end:
            trainer.fit(Small(), loader(), ckpt_path="auto")
        found.append((end.value.code, sorted(path.name for path in Path(folder).iterdir())))
    return found


def test_the_last_two_preemptions_keep_their_checkpoints(pool: WorkerPool, tmp_path: Path) -> None:
    """Should the last be spoiled; by their steps, not by their names. After Ctrl-C, too."""
    [found] = pool.run(1, preempt_often, [9, 10, 11], str(tmp_path))
    names = [f"preempted-step={step}.ckpt" for step in (10, 11, 9)]
    assert found == [(130, names[2:]), (130, [names[0], names[2]]), (130, names[:2])]
