"""Padding and lengths over all ranks, and the wait of the slowest."""

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megatron import ConfigError, DataMonitor, LanguageModel, Pad
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import dp_of, make_trainer

LENGTHS = [5, 3, 8, 2, 6, 6, 1, 4]
"""Global batches of 4, which one process pads to 8 and 6, two to (8, 4) and (6, 6)."""


def sentence(length: int) -> dict[str, Any]:
    return {"tokens": torch.ones(length, dtype=torch.int64)} | {"labels": torch.ones(length).long()}


def logged(layout: Mapping[str, Any], devices: int) -> dict[str, float]:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_layers": 2, "num_heads": 1, "max_seq_len": 8}
    module = LanguageModel(sizes)
    samples: Any = [sentence(length) for length in LENGTHS]
    loader = DataLoader(samples, 4 // dp_of(devices, layout), collate_fn=Pad(multiple=2))
    trainer = make_trainer(layout, devices, callbacks=[DataMonitor(every=5)], log_every_n_steps=1)
    trainer.fit(module, loader)
    return {n: float(v) for n, v in trainer.callback_metrics.items() if n.startswith("data/")}


@pytest.mark.parametrize(
    ("devices", "layout", "padded"),
    [(1, {}, 4 * 8 + 4 * 6), (2, {"zero": 1}, 2 * (8 + 4) + 2 * (6 + 6)), (2, {"pp": 2}, 56)],
    ids=str,
)
def test_padding_and_lengths_are_those_of_the_whole_batch(
    pool: WorkerPool, devices: int, layout: dict[str, Any], padded: int
) -> None:
    for found in pool.run(devices, logged, layout, devices):
        assert found.pop("data/wait_s") > 0
        assert found == pytest.approx(
            {
                "data/padding_fraction": 1 - 35 / padded,
                "data/length_mean": 35 / 8,
                "data/length_max": 8,
                "data/tokens_per_batch": 35 / 2,
            }
        )


class Recorder:
    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log_dict(self, values: Mapping[str, float], **_: Any) -> None:
        self.logged.append(dict(values))


def test_the_wait_is_that_between_batches_without_validation() -> None:
    """Batches take a second each, and the wait for the next is 0.5, 0.25 and 2 seconds."""
    moments = itertools.chain([1.0, 1.5, 2.5, 2.75, 3.75])
    monitor = DataMonitor(every=2)
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")), world_size=1
    )
    module: Any = Recorder()
    monitor.on_train_start(trainer, module)
    for number in range(2):
        monitor._clock = lambda: next(moments)
        monitor.on_train_batch_start(trainer, module, None, number)
        monitor.on_train_batch_end(trainer, module, None, None, number)
    assert module.logged == [{"data/wait_s": 0.5}]
    monitor.on_train_batch_start(trainer, module, None, 2)
    moments = itertools.chain([3.75, 10.0, 20.0, 22.0, 23.0])  # the end, validation, the next batch
    monitor.on_train_batch_end(trainer, module, None, None, 2)
    monitor.on_validation_start(trainer, module)
    monitor.on_validation_end(trainer, module)
    monitor.on_train_batch_start(trainer, module, None, 3)
    monitor.on_train_batch_end(trainer, module, None, None, 3)
    # 0.25 before the third batch; 22 - 3.75 - 10 of validation before the fourth.
    assert module.logged[1] == {"data/wait_s": pytest.approx((0.25 + 8.25) / 2)}


def test_values_come_every_so_many_batches() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        DataMonitor(every=0)
