"""Batches of about equally many tokens: one process's numbers under any layout, and after a resume.

Every batch has its own number of samples and its own padded length; ranks of ZeRO 3 have different
numbers of microbatches, pipelines get a new shape with every batch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_megatron import ConfigError, LanguageModel, LengthGrouped, Pad, TokenBudget
from lightning_megatron.testing import WorkerPool
from tests.strategy.refusals import refusal
from tests.strategy.small import (
    Small,
    assert_same,
    dp_of,
    make_trainer,
    merged,
    samples,
    weights,
)

LENGTHS = [9, 3, 14, 5, 2, 16, 7, 7, 4, 11, 3, 6, 13, 2, 8, 5, 10, 4, 3]
TOKENS, EPOCHS = 40, 2
"""19 samples: an even number in every batch but one, in which ranks have different numbers."""
SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "max_seq_len": 16,
}


class Sentences(Dataset[Any]):
    """Samples of unequal length."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, 16, (LENGTHS[index] + 1,), generator=generator)
        return {"tokens": ids[:-1], "labels": ids[1:], "index": index}


class Reader(LanguageModel):
    """Notes what it reads."""

    def __init__(self, sampler: str, dp: int, workers: int = 0, **options: Any) -> None:
        super().__init__(SIZES, lr=0.01, warmup_steps=0, schedule="constant")
        torch.manual_seed(5)
        self.configure_model()  # here, so that plain Lightning begins with the same weights
        self.sampler, self.dp, self.workers, self.sampling = sampler, dp, workers, options
        self.read: list[tuple[int, ...]] = []
        self.shapes: set[tuple[int, ...]] = set()

    def train_dataloader(self) -> Any:
        options: dict[str, Any] = {"collate_fn": Pad(multiple=2), "num_workers": self.workers}
        options |= {"multiprocessing_context": "fork"} if self.workers else {}
        if self.sampler == "grouped":
            grouped = LengthGrouped(LENGTHS, batch_size=4, window=2)
            return DataLoader(Sentences(), 4 // self.dp, sampler=grouped, **options)
        sampling = {"tokens_per_batch": TOKENS, "samples_multiple": 2, **self.sampling}
        budget = TokenBudget(LENGTHS, pad_multiple=2, **sampling)
        return DataLoader(Sentences(), batch_sampler=budget, **options)

    def split_batch(self, batch: Any, count: int) -> list[Any]:
        """Microbatches of different shapes: each as long as its own longest sample."""
        pieces = []
        for rows in torch.arange(len(batch["tokens"])).tensor_split(count):
            piece = {name: column[rows] for name, column in batch.items()}
            longest = int(piece["lengths"].max())
            piece |= {name: piece[name][:, :longest] for name in ("tokens", "labels")}
            pieces.append(piece)
        return pieces

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.read.append(tuple(batch["index"].tolist()))
        self.shapes.add(tuple(batch["tokens"].shape))


def fit(
    layout: Mapping[str, Any] | None,
    devices: int,
    sampler: str = "budget",
    path: str | None = None,
    save: str | None = None,
    workers: int = 0,
    **options: Any,
) -> tuple[dict[str, Tensor], list[tuple[int, ...]], set[tuple[int, ...]]]:
    """Train two epochs, or save after six steps and end."""
    module = Reader(sampler, dp_of(devices, layout or {}), workers, **options)
    steps = 6 if save else -1
    trainer = make_trainer(layout, devices, max_epochs=EPOCHS, max_steps=steps)
    trainer.fit(module, ckpt_path=path)
    if save:
        trainer.save_checkpoint(save)
    return weights(module), module.read, module.shapes


def steps_of(parts: list[list[tuple[int, ...]]]) -> list[list[int]]:
    """What all ranks that read different samples read in each step."""
    different = {tuple(part) for part in parts}
    return [sorted(sum(step, ())) for step in zip(*different, strict=True)]


@pytest.fixture(scope="module")
def plain(pool: WorkerPool) -> Any:
    return {name: pool.run(1, fit, None, 1, name)[0] for name in ("budget", "grouped")}


@pytest.mark.parametrize(
    ("sampler", "layout", "devices"),
    [
        ("budget", {"microbatch_size": 2}, 1),
        ("budget", {"zero": 1}, 2),
        ("budget", {"zero": 3, "microbatch_size": 1}, 2),
        ("budget", {"pp": 2, "num_microbatches": 3}, 2),
        ("grouped", {"zero": 1, "microbatch_size": 1}, 2),
        pytest.param(
            *("budget", {"pp": 2, "zero": 3, "microbatch_size": 1}, 4), marks=pytest.mark.thorough
        ),
        pytest.param(
            *("grouped", {"pp": 2, "zero": 1, "microbatch_size": 1}, 4), marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_every_layout_trains_what_plain_lightning_trains(
    pool: WorkerPool, plain: Any, sampler: str, layout: dict[str, Any], devices: int
) -> None:
    alone, batches, shapes = plain[sampler]
    assert len({length for _, length in shapes}) > 3
    by_rank = pool.run(devices, fit, layout, devices, sampler)
    assert_same(merged([held for held, _, _ in by_rank]), alone)
    assert steps_of([read for _, read, _ in by_rank]) == [sorted(batch) for batch in batches]
    half = len(batches) // EPOCHS
    for epoch in (batches[:half], batches[half:]):  # each sample once
        assert sorted(sum(epoch, ())) == list(range(len(LENGTHS)))
    assert batches[:half] != batches[half:]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(({"zero": 1}, 2), ({"microbatch_size": 2}, 1), marks=pytest.mark.thorough),
        (({}, 1), ({"pp": 2, "microbatch_size": 1}, 2)),
        pytest.param(
            *(({}, 1), ({"pp": 2, "zero": 3, "microbatch_size": 1}, 4)), marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_a_run_goes_on_with_the_next_batch_under_another_layout(
    pool: WorkerPool, tmp_path: Path, before: Any, after: Any
) -> None:
    path = str(tmp_path / "half.ckpt")
    [(alone, batches, _)] = pool.run(1, fit, {}, 1, workers=1)
    first = pool.run(before[1], fit, *before, save=path)
    rest = pool.run(after[1], fit, *after, path=path)
    assert_same(merged([held for held, _, _ in rest]), alone)
    read = steps_of([r for _, r, _ in first])[:6] + steps_of([r for _, r, _ in rest])
    assert read == [sorted(batch) for batch in batches]


def resume_with_another_budget(path: str) -> str:
    with pytest.raises(ConfigError) as raised:
        fit({}, 1, path=path, tokens_per_batch=TOKENS + 8)
    return str(raised.value)


def too_many_ranks(early: bool) -> None:
    module = Reader("budget", 2, samples_multiple=1)
    loader = module.train_dataloader() if early else None  # or Lightning asks the module later
    make_trainer({"zero": 1}, 2).fit(module, loader)


def too_many_ranks_late() -> str:
    with pytest.raises(ConfigError) as raised:
        too_many_ranks(early=False)
    return str(raised.value)


def test_batches_that_cannot_be_found_again_or_shared_are_refused(
    pool: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "half.ckpt")
    pool.run(1, fit, {}, 1, save=path)
    [text] = pool.run(1, resume_with_another_budget, path)
    assert "other lengths or options" in text
    early = str(refusal(lambda: too_many_ranks(early=True), 2))
    for text in (early, *pool.run(2, too_many_ranks_late)):
        assert "with 2 data-parallel ranks" in text
        assert "samples_multiple=2" in text


def evaluate_twice(layout: Mapping[str, Any], devices: int) -> list[tuple[float, int]]:
    """Loss of the same loader, and the number of batches, in two runs."""
    budget = TokenBudget(LENGTHS, tokens_per_batch=TOKENS, samples_multiple=2, shuffle=False)
    loader = DataLoader(Sentences(), batch_sampler=budget, collate_fn=Pad())
    module = Reader("budget", 1)
    found = []
    for _ in range(2):
        trainer = make_trainer(layout, devices)
        [metrics] = trainer.validate(module, loader, verbose=False)
        found.append((metrics["val_loss"], int(trainer.num_val_batches[0])))
    return found


def test_evaluation_counts_each_sample_once(pool: WorkerPool) -> None:
    [[one, again]] = pool.run(1, evaluate_twice, {}, 1)
    assert one == again
    for found in pool.run(2, evaluate_twice, {"zero": 1}, 2):
        assert found == [(pytest.approx(one[0], rel=1e-6), one[1])] * 2  # means are float32


class Indices(Reader):
    """Predicts which samples it reads."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch["index"].tolist()


def predict(layout: Mapping[str, Any], devices: int) -> Any:
    module = Indices("budget", 1)
    return make_trainer(layout, devices).predict(module, module.train_dataloader())


def test_predictions_are_divided_like_batches(pool: WorkerPool) -> None:
    """Lightning divides no batch sampler, and each rank would predict for all samples."""
    [alone] = pool.run(1, predict, {}, 1)
    parts = pool.run(2, predict, {"zero": 1}, 2)
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == [sorted(one) for one in alone]
    assert sorted(sum(alone, [])) == list(range(len(LENGTHS)))


class SavesAtThree(pl.Callback):
    """Saves in the midst of the epoch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("first", [True, False])
def test_a_position_counts_batches_or_samples(tmp_path: Path, first: bool) -> None:
    path, data = tmp_path / "saved", samples(32)
    budget = TokenBudget([3] * 32, tokens_per_batch=12)
    loaders = [DataLoader(data, batch_sampler=budget), DataLoader(data, batch_size=4)]
    before, after = loaders if first else loaders[::-1]
    make_trainer({}, callbacks=[SavesAtThree(path)]).fit(Small(), before)
    with pytest.raises(ConfigError, match="TokenBudget: the checkpoint was saved amid an epoch"):
        make_trainer({}).fit(Small(), after, ckpt_path=path)
