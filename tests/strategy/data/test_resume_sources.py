"""Runs over the packages' loaders that end at any step, and go on bit-identically."""

import random
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_megatron import ConfigError, WorkerGuard
from lightning_megatron.testing import WorkerPool
from tests.strategy.data.sources import SAMPLES, Stream, make, torch_loader, write_chunks
from tests.strategy.resuming import Curve, Noisy, differences
from tests.strategy.small import dp_of, make_trainer

SIZE, EPOCHS = 4, 2
STEPS = SAMPLES // SIZE


class Save(pl.Callback):
    """Saves after a batch; may fail in the next one."""

    def __init__(self, at: int, path: str, *, fails: bool) -> None:
        self.at, self.path, self.fails, self.done = at, path, fails, 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.done += 1
        if self.done == self.at:
            trainer.save_checkpoint(self.path)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.fails and self.done == self.at:
            raise ZeroDivisionError


class Reads(Noisy):
    """Makes its loader as the layout is known."""

    def __init__(self, name: str, directory: str, workers: int) -> None:
        super().__init__()
        self.source = name, directory, workers

    def train_dataloader(self) -> Any:
        (name, directory, workers), strategy = self.source, self.trainer.strategy
        rank, ranks = strategy.data_parallel_rank, strategy.data_parallel_size
        return make(name, directory, rank, ranks, SIZE // ranks, workers)


def train(
    source: tuple[str, str, int],
    devices: int,
    layout: dict[str, Any],
    accumulate: int,
    *,
    save: int = 0,
    fails: bool = False,
    resume: bool = False,
) -> dict[tuple[int, int], tuple[Any, ...]]:
    pl.seed_everything(8 if resume else 7, verbose=False)
    path = str(Path(source[1]) / "saved.ckpt")
    curve = Curve()
    callbacks = [curve, Save(save, path, fails=fails)] if save else [curve]
    callbacks += [WorkerGuard()] if source[2] else []  # which leaves loaders with a state alone
    options = {"max_epochs": EPOCHS, "accumulate_grad_batches": accumulate}
    trainer = make_trainer(layout, devices, callbacks=callbacks, **options)
    try:
        trainer.fit(Reads(*source), ckpt_path=path if resume else None)
    except ZeroDivisionError:
        assert fails
    return curve.points


def save_and_resume(
    source: tuple[str, str, int],
    devices: int,
    layout: dict[str, Any],
    save: int,
    accumulate: int,
    *,
    fails: bool = False,
) -> list[str]:
    """What differs after a step from which a run is gone on; nothing should."""
    whole = train(source, devices, layout, accumulate, save=save)
    size = SIZE // dp_of(devices, layout)
    assert len(whole) == EPOCHS * STEPS
    assert all(len(point[4]) == size for point in whole.values())
    if fails:
        train(source, devices, layout, accumulate, save=save, fails=True)
    rest = train(source, devices, layout, accumulate, resume=True)
    epoch, batch = divmod(save, STEPS)
    return differences(whole, rest, (epoch, batch - batch % accumulate))


ROWS = [
    ("torchdata: map", 2, 1, {}),
    ("torchdata: map", 0, 2, {}),
    ("torchdata: stream with a state", 0, 1, {}),
    ("torchdata: stream", 2, 1, {}),
    ("torch: rows", 2, 1, {}),
    ("torch: streamed rows", 2, 1, {}),
    ("torch: streamed rows", 0, 1, {}),
    ("torchdata: streamed rows", 2, 2, {}),
    ("litdata: litdata", 2, 1, {}),
]
"""Source, DataLoader workers, processes, layout."""
THOROUGH = [
    ("litdata: litdata", 0, 1, {}),
    ("litdata: litdata", 2, 2, {}),
    ("torchdata: stream with a state", 2, 2, {}),
    ("torchdata: map", 0, 4, {}),
    ("torchdata: streamed rows", 0, 4, {"zero": 1}),
    ("litdata: litdata", 0, 4, {}),
]


@pytest.mark.parametrize(
    ("name", "workers", "devices", "layout"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.thorough) for row in THOROUGH)],
    ids=str,
)
def test_a_run_goes_on_bit_identically(
    pool: WorkerPool, tmp_path: Path, name: str, workers: int, devices: int, layout: dict[str, Any]
) -> None:
    draw = random.Random(f"{name} {workers} {devices}")
    save, accumulate = draw.randrange(1, EPOCHS * STEPS), draw.choice([1, 2])
    if "litdata" in name:
        write_chunks(str(tmp_path / "chunks"))
    source = name, str(tmp_path), workers
    by_rank = pool.run(devices, save_and_resume, source, devices, layout, save, accumulate)
    assert by_rank == [[]] * devices, (save, accumulate)


def samples_of(*args: Any, **options: Any) -> tuple[dict[tuple[int, int], list[int]], list[str]]:
    """The samples of each batch of this rank, and what was said about the data."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        curve = train(*args, 1, **options)
    said = [str(one.message) for one in caught if one.filename.endswith(("position.py", "hes.py"))]
    return {at: point[4] for at, point in curve.items()}, said


def together(by_rank: list[Any]) -> dict[tuple[int, int], list[int]]:
    """The samples of each step, of all ranks."""
    return {at: sorted(n for rank in by_rank for n in rank[0][at]) for at in by_rank[0][0]}


@pytest.mark.parametrize(
    ("name", "before", "after", "said"),
    [
        ("torchdata: rows", 2, 1, ""),
        ("torchdata: stream with a state", 2, 1, "of StatefulStream cannot be divided: 2 ranks"),
        ("torch: stream with a state", 1, 2, "of StatefulStream cannot be divided: 1 ranks"),
        ("torch: stream", 2, 1, "DataLoader of Stream has no position to return to: 4 batches"),
    ],
)
def test_so_it_does_under_another_degree(
    pool: WorkerPool, tmp_path: Path, name: str, before: int, after: int, said: str
) -> None:
    """Where the source allows; else by reading again, of which it says when that is exact."""
    source, saved = (name, str(tmp_path), 0), 4
    whole = together(pool.run(before, samples_of, source, before, {}, save=saved))
    rest = pool.run(after, samples_of, source, after, {}, resume=True)
    assert together(rest) == {at: whole[at] for at in whole if at >= (0, saved)}
    warned = rest[0][1]
    assert said in " ".join(warned) if said else not warned


@pytest.mark.parametrize("name", ["torch: shuffled streamed rows", "torch: streamed rows"])
def test_a_shuffle_buffer_that_may_be_lost_is_told_of(
    pool: WorkerPool, tmp_path: Path, name: str
) -> None:
    """`datasets` keeps none in its state: without one a run goes on exactly, with one it skips."""
    source, saved = (name, str(tmp_path), 0), 2
    whole = together(pool.run(1, samples_of, source, 1, {}, save=saved))
    [(rest, said)] = pool.run(1, samples_of, source, 1, {}, resume=True)
    assert len(said) == 1
    assert "DataLoader of IterableDataset goes on where its state" in said[0]
    first = {at: sorted(samples) for at, samples in rest.items() if at[0] == 0}
    if "shuffled" not in name:
        assert first == {at: whole[at] for at in whole if (0, saved) <= at < (1, 0)}
    done = {n for at in whole if at < (0, saved) for n in whole[at]}
    assert first
    assert not done & {n for samples in first.values() for n in samples}


class Shares(Reads):
    """Every process reads a stream that knows of this rank of so many."""

    def train_dataloader(self) -> Any:
        rank = self.trainer.strategy.global_rank if self.source[0] == "all" else 0
        return torch_loader(Stream(rank, 1 + rank), 8, 0)


def shares(layout: dict[str, Any], which: str) -> list[str]:
    trainer = make_trainer(layout, 2, max_steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Shares(which, "", 0))
    return [str(one.message) for one in caught if "first batch" in str(one.message)]


def refused(layout: dict[str, Any], which: str) -> None:
    with pytest.raises(ConfigError, match="0 and 1 work on the same samples.*split_dataset_by"):
        shares(layout, which)


def refused_chunks(directory: str) -> None:
    trainer = make_trainer({"tp": 2}, 2, max_steps=1)
    with pytest.raises(ConfigError, match="StreamingDataset: processes 0 and 1 work on the same"):
        trainer.fit(Reads("litdata: litdata", directory, 0))


def test_chunks_that_litdata_divides_among_all_processes_are_refused_under_tp(
    pool: WorkerPool, tmp_path: Path
) -> None:
    write_chunks(str(tmp_path / "chunks"))
    pool.run(2, refused_chunks, str(tmp_path))


def test_ranks_that_read_the_same_or_should_are_named(pool: WorkerPool) -> None:
    first, _ = pool.run(2, shares, {"zero": 1}, "none")
    assert len(first) == 1
    assert "Stream: the first batch is the same on the data-parallel ranks [0, 1]" in first[0]
    assert pool.run(2, shares, {"zero": 1}, "all") == [[], []]
    assert pool.run(2, shares, {"tp": 2}, "none") == [[], []]
    pool.run(2, refused, {"tp": 2}, "all")


@pytest.mark.parametrize(
    ("save", "fails"), [(STEPS - 1, True), pytest.param(STEPS, False, marks=pytest.mark.thorough)]
)
def test_a_stream_that_some_worker_has_read_to_its_end(
    pool: WorkerPool, tmp_path: Path, save: int, fails: bool
) -> None:
    """Its state there may be that of the start, and torchdata reads on in each worker."""
    source = "torchdata: stream with a state", str(tmp_path), 2
    assert pool.run(1, save_and_resume, source, 1, {}, save, 1, fails=fails) == [[]]
