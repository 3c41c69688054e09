"""A run that is interrupted and resumed takes, bit for bit, the steps that it would have taken."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron.testing import WorkerPool
from tests.strategy.data.loaders import LOADERS
from tests.strategy.resuming import (
    POINTS,
    Noisy,
    augmented_loader,
    differences,
    interrupt_and_resume,
    train,
)

ROWS: list[tuple[int, dict[str, Any], int]] = [
    (1, {}, 0),
    (1, {"num_microbatches": 2}, 2),
    (2, {"zero": 2}, 0),
    (2, {"tp": 2}, 0),
    (2, {"pp": 2, "num_microbatches": 2}, 0),
]
"""Processes, layout, DataLoader workers."""
THOROUGH: list[tuple[int, dict[str, Any], int]] = [
    (4, {"pp": 2, "zero": 1}, 0),
    (2, {"zero": 0}, 1),
    (4, {"tp": 2, "sequence_parallel": False, "zero": 0}, 0),
]


@pytest.mark.parametrize(
    ("devices", "layout", "workers"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.thorough) for row in THOROUGH)],
    ids=str,
)
def test_resuming_changes_nothing(
    pool: WorkerPool, tmp_path: Path, devices: int, layout: dict[str, Any], workers: int
) -> None:
    points = list(POINTS)
    if workers:  # to start them takes most of the time
        points = ["during validation", "with the last batch of an epoch"]
    elif devices > 2:
        points = points[1::4] if "tp" in layout else points[2:3]
    elif devices > 1:  # a fifth each; one process takes all
        points = points[("zero", "tp", "pp").index(next(iter(layout))) :: 5]
    directory = str(tmp_path)
    by_rank = pool.run(devices, interrupt_and_resume, layout, devices, workers, points, directory)
    assert by_rank == [{point: [] for point in points}] * devices


FEW = ["in mid-accumulation", "with the last batch of an epoch", "between epochs"]


@pytest.mark.parametrize(
    ("devices", "layout", "name", "workers"),
    [
        *((1, {}, name, 0) for name in LOADERS),
        (1, {}, "a stream", 2),
        pytest.param(2, {"zero": 1}, "a sampler with a generator", 0, marks=pytest.mark.thorough),
        (2, {"zero": 1}, "a batch sampler", 0),
        (2, {"tp": 2}, "a stream with a state", 0),
        pytest.param(
            *(2, {"pp": 2, "num_microbatches": 2}, "a loader with a state", 0),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=str,
)
def test_so_it_is_with_loaders_of_every_kind(
    pool: WorkerPool, tmp_path: Path, devices: int, layout: dict[str, Any], name: str, workers: int
) -> None:
    points = FEW if devices == 1 else FEW[:2]
    by_rank = pool.run(devices, with_loader, name, layout, devices, workers, points, str(tmp_path))
    assert by_rank == [{point: [] for point in points}] * devices


def with_loader(name: str, *args: Any, **options: Any) -> dict[str, list[str]]:
    return interrupt_and_resume(*args, make_loader=LOADERS[name], **options)


COUNTED = {"max_steps": 6, "max_epochs": -1}
"""The two epochs, as a number of steps."""


def test_so_it_is_where_steps_are_counted(pool: WorkerPool, tmp_path: Path) -> None:
    """Lightning then goes on with an epoch that was over: one batch more of it than there is."""
    points = [*FEW, "in the first accumulation of an epoch", "after validation"]
    [found] = pool.run(1, interrupt_and_resume, {}, 1, 0, points, str(tmp_path), **COUNTED)
    assert found == {point: [] for point in points}
    for name in ("a stream", "a stream with a state", "a loader with a state"):
        folder = tmp_path / name
        folder.mkdir()
        arguments = (name, {}, 1, 0, FEW, str(folder))
        assert pool.run(1, with_loader, *arguments, **COUNTED) == [{point: [] for point in FEW}]


def ended_and_lengthened(layout: dict[str, Any], devices: int, directory: str) -> list[str]:
    """What differs where a run ends within an epoch, and its last checkpoint is gone on from."""
    whole = train(layout, devices, 0, augmented_loader, **COUNTED)
    save = ModelCheckpoint(directory, "ended", save_on_train_epoch_end=True)
    shorter = {**COUNTED, "max_steps": 2, "callbacks": [save]}
    train(layout, devices, 0, augmented_loader, **shorter)
    rest = train(layout, devices, 0, augmented_loader, path=save.best_model_path, **COUNTED)
    return differences(whole, rest, (0, 4))


@pytest.mark.parametrize(("devices", "layout"), [(1, {}), (2, {"zero": 2})], ids=str)
def test_so_it_is_after_the_last_step_of_a_shorter_run(
    pool: WorkerPool, tmp_path: Path, devices: int, layout: dict[str, Any]
) -> None:
    """Lightning counts the begun epoch as done, and would go on in the order of the next."""
    by_rank = pool.run(devices, ended_and_lengthened, layout, devices, str(tmp_path))
    assert by_rank == [[]] * devices


def batches_of(size: int, _: int, workers: int) -> Any:
    return augmented_loader(size, workers)


def resized(
    layout: dict[str, Any], devices: int, size: int, path: str | None, directory: str | None
) -> dict[tuple[int, int], list[int]]:
    """The samples of each batch, where each rank reads ``size`` at a time."""
    options: dict[str, Any] = {"val_check_interval": 1.0, "points": ["in mid-epoch"]}
    curve = train(layout, devices, 0, partial(batches_of, size), directory, path, **options)
    return {at: point[4] for at, point in curve.items()}


def test_another_batch_size_reads_the_rest_of_the_epoch(pool: WorkerPool, tmp_path: Path) -> None:
    """8 of 22 samples are done: 14 are left, in batches of 6 over two ranks."""
    [whole] = pool.run(1, resized, {}, 1, 4, None, str(tmp_path))
    path = str(tmp_path / "in mid-epoch.ckpt")
    ranks = pool.run(2, resized, {"zero": 1}, 2, 3, path, None)
    assert [sorted(rank) for rank in ranks] == [
        [(0, i) for i in (1, 2, 3)] + [(1, i) for i in range(4)]
    ] * 2
    order = [sample for at in sorted(whole) for sample in whole[at]]
    first, second = order[8:22], order[22:]
    expected = [first[:6], first[6:12], first[12:], *(second[i : i + 6] for i in range(0, 22, 6))]
    steps = [sorted(ranks[0][at] + ranks[1][at]) for at in sorted(ranks[0])]
    assert steps == [sorted(step) for step in expected]


class Failing(Noisy):
    """Draws random numbers in a step, and fails."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            raise ZeroDivisionError
        return loss


def fail_and_resume(directory: str) -> list[str]:
    whole = train({}, 1, 0, augmented_loader)
    save = ModelCheckpoint(directory, filename="failed", save_on_exception=True)
    with pytest.raises(ZeroDivisionError):
        train({}, 1, 0, augmented_loader, module=Failing, callbacks=[save])
    [path] = Path(directory).glob("*.ckpt")
    rest = train({}, 1, 0, augmented_loader, path=str(path))
    return differences(whole, rest, (0, 2))


def test_a_step_that_failed_is_taken_again(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(1, fail_and_resume, str(tmp_path)) == [[]]
