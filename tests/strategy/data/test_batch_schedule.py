"""Global batches of changing sizes: one process's weights, under every layout and after a resume.

The reference is a loop by hand: it cuts the order of each epoch by the schedule, and sets the
learning rate of every step.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatron.callbacks.batch_schedule import BatchSchedule
from lightning_megatron.data.reading.batch_sizes import BatchSizes, NoiseScale
from lightning_megatron.data.reading.sampler import ResumableSampler
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from tests.strategy.data.loaders import Pairs, Stream
from tests.strategy.small import Small, assert_same, loader, make_trainer, merged, samples, weights

COUNT, EPOCHS = 44, 3
STEPS = [(0, 4), (20, 8), (60, 16)]
LAYOUTS = {
    "one process": (1, {"microbatch_size": 4}),
    "zero=1": (2, {"zero": 1}),
    "zero=3": (2, {"zero": 3, "microbatch_size": 2}),
    "pp=2": (2, {"pp": 2, "num_microbatches": 2}),
    "pp=2 x dp=2": (4, {"pp": 2, "num_microbatches": 2}),
}


class Scheduled(Small):
    """Has a schedule of the learning rate too."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Seen(pl.Callback):
    """Size of each step on this rank, and rate that the scheduler has set."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.rates: list[float] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        self.sizes.append(len(batch[0]))
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class StopAfter(pl.Callback):
    """Saves after so many steps, and ends the run."""

    def __init__(self, steps: int, path: str) -> None:
        self.steps, self.path = steps, path

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True
            trainer.limit_train_batches = 0


def by_hand() -> tuple[dict[str, Tensor], list[int]]:
    """Weights after all epochs, and the sizes of the steps."""
    module, data = Scheduled().double(), samples(COUNT)
    (optimizer,), (schedule,) = module.configure_optimizers()
    sampler, total, sizes = ResumableSampler(COUNT), 0, []
    table = BatchSizes(STEPS)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        order = sampler.order().tolist()
        while order:
            size = table.at(total)
            batch, order = order[:size], order[size:]
            total += len(batch)
            sizes.append(len(batch))
            optimizer.zero_grad()
            module.loss([column[batch] for column in data.tensors]).backward()
            rate = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = rate * (size / 4) ** 0.5
            optimizer.step()
            optimizer.param_groups[0]["lr"] = rate
            schedule["scheduler"].step()
    return weights(module), sizes


def train(
    layout: Mapping[str, Any], devices: int, *callbacks: pl.Callback, resume: str | None = None
) -> tuple[dict[str, Tensor], list[int]]:
    module, seen = Scheduled(), Seen()
    schedule = BatchSchedule(STEPS, lr="sqrt")
    trainer = make_trainer(
        layout, devices, max_epochs=EPOCHS, callbacks=[schedule, seen, *callbacks]
    )
    data = DataLoader(samples(COUNT), shuffle=True, num_workers=0)
    trainer.fit(module, data, ckpt_path=resume, weights_only=False)
    return weights(module), seen.sizes


@pytest.mark.parametrize(
    "layout", [*list(LAYOUTS)[:-1], pytest.param("pp=2 x dp=2", marks=pytest.mark.thorough)]
)
def test_weights_of_one_process(pool: WorkerPool, layout: str) -> None:
    devices, options = LAYOUTS[layout]
    expected, sizes = by_hand()
    assert sizes == [4] * 5 + [8] * 5 + [16, 12] + [16, 16, 12]  # 44 samples in each epoch
    results = pool.run(devices, train, options, devices)
    assert_same(merged([held for held, _ in results]), expected)


def interrupt(layout: Mapping[str, Any], devices: int, steps: int, path: str) -> None:
    train(layout, devices, StopAfter(steps, path))


def resume(layout: Mapping[str, Any], devices: int, path: str) -> tuple[dict[str, Tensor], Any]:
    return train(layout, devices, resume=path)


@pytest.mark.parametrize(
    "steps", [8, *(pytest.param(steps, marks=pytest.mark.thorough) for steps in (6, 11))]
)  # the first epoch has eight
def test_resuming_under_another_layout(pool: WorkerPool, tmp_path: Path, steps: int) -> None:
    path = str(tmp_path / "last.ckpt")
    pool.run(2, interrupt, {"zero": 3}, 2, steps, path)
    expected, sizes = by_hand()
    [(held, seen)] = pool.run(1, resume, {}, 1, path)
    assert seen == sizes[steps:]
    assert_same(held, expected)


def test_sizes_that_ranks_cannot_share() -> None:
    trainer = make_trainer({}, 2, callbacks=[BatchSchedule([(0, 4), (8, 7)])])
    with pytest.raises(ConfigError, match="7 cannot be divided so; nearest valid: 6 or 8"):
        trainer.fit(Scheduled(), loader())


@pytest.mark.parametrize(
    ("given", "strategy", "text"),
    [
        ([(0, 4)], {"global_batch_size": 4}, "the schedule gives all sizes"),
        (NoiseScale(max=8), {}, "no size to begin with"),
        (NoiseScale(max=8, start=2), {"global_batch_size": 4}, "both are the first size"),
        (NoiseScale(max=8), {"global_batch_size": 16}, "nearest valid: max=16"),
    ],
)
def test_where_sizes_come_from(given: Any, strategy: dict[str, Any], text: str) -> None:
    trainer = make_trainer(strategy, callbacks=[BatchSchedule(given)])
    with pytest.raises(ConfigError, match=text):
        trainer.fit(Scheduled(), loader())


def test_batches_of_the_users() -> None:
    data = DataLoader(samples(), batch_sampler=Pairs(4))
    trainer = make_trainer({}, callbacks=[BatchSchedule([(0, 4)])])
    with pytest.raises(ConfigError, match="batch_sampler=Pairs.: batches are not made of batch_si"):
        trainer.fit(Scheduled(), data)


def test_reading_ahead_of_decisions() -> None:
    schedule = BatchSchedule(NoiseScale(max=16, start=4, every=8, delay=1))
    trainer = make_trainer({}, callbacks=[schedule])
    with pytest.raises(ConfigError, match="2 batches may have been drawn"):
        trainer.fit(Scheduled(), loader())


def by_noise(
    layout: Mapping[str, Any], devices: int, path: str, resume: bool, workers: int
) -> tuple[dict[str, Tensor], list[int], list[tuple[int, int]]]:
    """Train with sizes that follow the noise; save after 21 steps, or begin there."""
    module, seen = Scheduled(), Seen()
    noise = NoiseScale(max=16, start=4, every=8, delay=6)
    schedule = BatchSchedule(noise, lr="linear")
    callbacks = [schedule, seen] if resume else [schedule, seen, StopAfter(21, path)]
    if not path:
        callbacks = [schedule, seen]
    trainer = make_trainer(layout, devices, max_epochs=5, callbacks=callbacks)
    data = DataLoader(samples(COUNT), shuffle=True, num_workers=workers)
    trainer.fit(module, data, ckpt_path=path if resume else None, weights_only=False)
    return weights(module), seen.sizes, schedule.batch_sizes.steps


def test_sizes_that_follow_the_noise(pool: WorkerPool, tmp_path: Path) -> None:
    [(expected, sizes, steps)] = pool.run(1, by_noise, {}, 1, "", False, 0)
    assert [size for _, size in steps] == [4, 8, 16]
    assert steps[1][0] == (16 + 6) * 4  # decided after 16 steps, and saved before it held
    assert set(sizes) >= {4, 8, 16}
    path = str(tmp_path / "noise.ckpt")
    before = pool.run(2, by_noise, {"zero": 3}, 2, path, False, 1)
    assert [2 * size for size in before[0][1]] == sizes[:21]
    [(held, after, again)] = pool.run(1, by_noise, {}, 1, path, True, 0)
    assert again == steps
    assert after == sizes[21:]
    assert_same(held, expected)


def test_epochs_that_end_early() -> None:
    seen = Seen()
    schedule = BatchSchedule(STEPS)
    trainer = make_trainer(
        {}, max_epochs=3, limit_train_batches=2, callbacks=[schedule, seen], log_every_n_steps=1
    )
    trainer.fit(Scheduled(), DataLoader(samples(COUNT), num_workers=2))
    assert seen.sizes == [4, 4, 4, 4, 4, 8]  # what workers have read ahead is not consumed
    assert trainer.callback_metrics["data/global_batch_size"] == 8


def test_rates_are_the_schedulers_between_steps() -> None:
    seen = Seen()
    callbacks = [BatchSchedule([(0, 4), (8, 16)], lr="linear"), seen]
    trainer = make_trainer({}, callbacks=callbacks)
    trainer.fit(Scheduled(), DataLoader(samples(40)))
    assert seen.sizes == [4, 4, 16, 16]
    assert seen.rates == pytest.approx([0.01 * 0.9 ** (step + 1) for step in range(4)])
    assert trainer.callback_metrics["optim/lr_scale"] == 4


class Warming(Scheduled):
    """Sets its learning rate amid the step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.5


def test_rates_that_would_lack_the_factor_are_refused() -> None:
    trainer = make_trainer({}, callbacks=[BatchSchedule(STEPS, lr="linear")])
    with pytest.raises(ConfigError, match="set to 0.5 amid an optimizer step"):
        trainer.fit(Warming(), loader())


def test_a_schedule_is_not_read_for_iterable_datasets() -> None:
    trainer = make_trainer({}, callbacks=[BatchSchedule([(0, 4)])])
    with pytest.raises(ConfigError, match="Stream: an iterable dataset is divided by its own"):
        trainer.fit(Scheduled(), DataLoader(Stream(), batch_size=4))


def test_several_loaders() -> None:
    trainer = make_trainer({}, callbacks=[BatchSchedule([(0, 4)])])
    with pytest.raises(ConfigError, match="several training loaders"):
        trainer.fit(Scheduled(), [loader(), loader()])


@pytest.mark.parametrize("callbacks", [[BatchSchedule([(0, 4)])], []])
def test_unequal_parts_have_one_size(callbacks: list[pl.Callback]) -> None:
    strategy = {"batch_shares": [2, 1]} | ({} if callbacks else {"microbatch_size": "auto"})
    trainer = make_trainer(strategy, 2, callbacks=callbacks)
    with pytest.raises(ConfigError, match="only one of them may size what a rank runs"):
        trainer.fit(Scheduled(), loader())
