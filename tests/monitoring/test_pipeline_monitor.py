"""The bubble of a running pipeline is logged on every rank."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from lightning_megatron import PipelineMonitor
from lightning_megatron.errors import ConfigError
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import LAYOUTS, Small, dp_of, loader, make_trainer, run

KEYS = ("pp/bubble_fraction", "pp/bubble_fraction_ideal", "pp/imbalance")


class Validated(Small):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def monitored(layout: Mapping[str, Any], devices: int) -> tuple[dict[str, float], int, int]:
    """What was logged, and how many stages were measured."""
    monitor = PipelineMonitor(every=3)  # longer than an epoch
    short = {"limit_train_batches": 2, "max_epochs": 2}
    trainer = make_trainer(layout, devices, callbacks=[monitor], val_check_interval=1, **short)
    data = loader(dp=dp_of(devices, layout))
    trainer.fit(Validated(), data, data)
    logged = {key: float(trainer.callback_metrics[key]) for key in KEYS if monitor.latest}
    stages = len(monitor.latest.forward) if monitor.latest else 0
    return logged, stages, trainer.global_step


@pytest.mark.parametrize(("layout", "stages"), [("pp=2", 2), ("pp=2 zbv", 4)])
def test_the_bubble_is_logged_alike_on_every_rank(
    pool: WorkerPool, layout: str, stages: int
) -> None:
    first, second = run(pool, layout, monitored)
    assert first == second
    logged, measured, _ = first
    assert measured == stages
    assert 0 < logged["pp/bubble_fraction_ideal"] <= logged["pp/bubble_fraction"] + 1e-6 < 1
    assert 1 <= logged["pp/imbalance"] <= stages


def test_without_a_pipeline_nothing_is_logged(pool: WorkerPool) -> None:
    assert "dp=2" in LAYOUTS
    for logged, _, steps in run(pool, "dp=2", monitored):
        assert logged == {}
        assert steps == 4


def test_every_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        PipelineMonitor(every=0)
