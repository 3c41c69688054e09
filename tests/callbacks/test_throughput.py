import itertools
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger

from lightning_megatron.callbacks.throughput import TokenThroughput, count_tokens
from lightning_megatron.errors import ConfigError


class Recorder:
    def __init__(self) -> None:
        self.logged: list[float] = []

    def log(self, name: str, value: float, **kwargs: Any) -> None:
        assert name == "perf/tokens_per_s"
        self.logged.append(value)


def run(
    seconds: list[float], sampler: dict[str, int] | None, window: int, world_size: int = 8
) -> list[float]:
    """Rates logged when batches of 10 tokens end at these times."""
    clock = iter(seconds)
    callback = TokenThroughput(window)
    callback._clock = lambda: next(clock)
    trainer: Any = SimpleNamespace(world_size=world_size, strategy=SimpleNamespace())
    if sampler is not None:
        trainer.strategy.distributed_sampler_kwargs = sampler
    module: Any = Recorder()
    callback.on_train_start(trainer, module)
    for i in range(len(seconds)):
        callback.on_train_batch_end(trainer, module, None, torch.zeros(2, 5, dtype=torch.int64), i)
    return module.logged


def test_rate_counts_data_parallel_ranks_only() -> None:
    sampler = {"num_replicas": 2, "rank": 0}
    assert run([0.0, 1.0, 3.0], sampler, window=20) == pytest.approx([20.0, 40.0 / 3])


def test_rate_without_a_sampler_hint_counts_all_ranks() -> None:
    assert run([0.0, 1.0], None, window=20) == pytest.approx([80.0])


def test_rate_is_over_the_window() -> None:
    assert run([0.0, 10.0, 11.0, 12.0], {"num_replicas": 1}, window=2) == pytest.approx(
        [1.0, 20.0 / 11, 10.0]
    )


def test_validation_does_not_count() -> None:
    times = itertools.count()
    callback = TokenThroughput()
    callback._clock = lambda: float(next(times))
    trainer: Any = SimpleNamespace(world_size=1, strategy=SimpleNamespace())
    module: Any = Recorder()
    batch = torch.zeros(10, dtype=torch.int64)
    callback.on_train_batch_end(trainer, module, None, batch, 0)  # 0 s
    callback.on_validation_start(trainer, module)  # 1 s
    callback.on_validation_end(trainer, module)  # 2 s
    callback.on_train_batch_end(trainer, module, None, batch, 1)  # 3 s, of which 1 s validation
    assert module.logged == pytest.approx([5.0])


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"tokens": torch.zeros(4, 8, dtype=torch.int64), "labels": torch.zeros(4, 8)}, 32),
        ((torch.zeros(4, 8), torch.zeros(4, 6, dtype=torch.int32)), 24),
        ([torch.zeros(3, 8), torch.tensor(1)], 3),
        ("text", 0),
    ],
)
def test_tokens_of_a_batch(batch: Any, tokens: int) -> None:
    assert count_tokens(batch) == tokens


def test_reaches_bar_and_logger(tmp_path: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=4,
        limit_val_batches=1,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[TokenThroughput()],
        logger=CSVLogger(tmp_path),
    )
    trainer.fit(BoringModel())
    assert trainer.progress_bar_metrics["perf/tokens_per_s"] > 0
    assert trainer.logged_metrics["perf/tokens_per_s"] > 0


def test_window_must_hold_a_batch() -> None:
    with pytest.raises(ConfigError, match="window=0"):
        TokenThroughput(window=0)
