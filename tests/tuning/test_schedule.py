"""``schedule="auto"`` measures, chooses, and trains on with the same numbers."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import PipelineConfig
from lightning_megatron.testing import WorkerError, WorkerPool
from lightning_megatron.tuning.schedule import AutoSchedule
from tests.strategy.small import (
    Small,
    assert_same,
    dp_of,
    loader,
    make_trainer,
    merged,
    samples,
    tuner_of,
    weights,
)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.002)
        return gradient


class SlowLinear(nn.Sequential):
    """Takes long enough for its times to be told from noise."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(_Slow.apply(x))
        return out


class Slow(Small):
    def __init__(self) -> None:
        super().__init__()
        for index, layer in enumerate(self.net.layers):
            self.net.layers[index] = SlowLinear(*layer)


def auto_job(layout: Mapping[str, Any] | None, devices: int) -> dict[str, Any]:
    trainer, module = make_trainer(layout, devices), Slow()
    trainer.fit(module, loader(samples(64), dp=dp_of(devices, layout or {})))
    auto = tuner_of(trainer.strategy, AutoSchedule) if layout else None
    return {"weights": weights(module), "chosen": auto.chosen if auto else None}


@pytest.mark.parametrize(
    ("more", "devices", "choices"),
    [
        ({}, 2, {"zbv", "v-half", "v-min", "dualpipev"}),
        (
            {"stages_per_rank": 1},
            4,
            {"1f1b", "gpipe", "zb-h1", "zb-h2"},
        ),
        (
            {"activation_gib": 1.0},
            2,
            {"zbv", "v-half", "v-min", "dualpipev"},
        ),
    ],
    ids=["V", "one stage, dp=2", "limited"],
)
def test_a_schedule_is_chosen_and_the_numbers_stay(
    pool: WorkerPool, more: dict[str, Any], devices: int, choices: set[str]
) -> None:
    [plain] = pool.run(1, auto_job, None, 1)
    config = PipelineConfig(degree=2, schedule="auto", **more)
    layout = {"pp": config, "num_microbatches": 4}
    ranks = pool.run(devices, auto_job, layout, devices)
    assert_same(merged([rank["weights"] for rank in ranks]), plain["weights"])
    [chosen] = {rank["chosen"] for rank in ranks}
    assert chosen in choices


def test_too_little_memory_is_said_with_what_would_do(pool: WorkerPool) -> None:
    config = PipelineConfig(degree=2, schedule="auto", activation_gib=1e-9)
    layout = {"pp": config, "num_microbatches": 4}
    with pytest.raises(
        WorkerError, match=r"ConfigError.*pp\.schedule='auto', activation_gib=1e-09.*nearest valid"
    ):
        pool.run(2, auto_job, layout, 2)
