"""A rank that makes others wait is named, with the section, in two windows."""

import time
from typing import Any

import pytest
import torch

from lightning_megatron import ConfigError, SlowRankDetector
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, loader, make_trainer, samples

STEP_S, MORE_S = 0.04, 0.06
"""A tenth of the step's work is more than a busy machine takes from its shorter sections."""

WINDOW = 8


class OneIsSlow(Small):
    """Rank 1 takes longer in one section, by sleeping or by computing."""

    def __init__(self, section: str, how: str) -> None:
        super().__init__()
        self.section, self.how = section, how

    def lose_time(self, section: str) -> None:
        if section != self.section or self.trainer.global_rank != 1:
            return
        if self.how == "sleep":
            time.sleep(MORE_S)
            return
        end = time.monotonic() + MORE_S
        while time.monotonic() < end:
            torch.ones(50).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(STEP_S)
        self.lose_time("forward")
        loss = self.loss(batch)
        loss.register_hook(lambda _: self.lose_time("backward"))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.lose_time("data")


def find_slow(layout: dict[str, Any], section: str, how: str, windows: int) -> Any:
    detector = SlowRankDetector(window=WINDOW)
    trainer = make_trainer(layout, 2, callbacks=[detector])
    batches = 1 + windows * WINDOW
    trainer.fit(OneIsSlow(section, how), loader(samples(8 * batches), dp=2 // layout.get("tp", 1)))
    logged = {k: float(v) for k, v in trainer.callback_metrics.items() if "straggler" in k}
    return [(s.rank, s.section) for s in detector.slow], logged


@pytest.mark.parametrize(
    ("zero", "section", "how"),
    [(1, "forward", "sleep"), (0, "backward", "spin"), (3, "data", "sleep"), (2, "none", "")],
)
def test_the_slow_rank_is_found_in_two_windows(
    pool: WorkerPool, zero: int, section: str, how: str
) -> None:
    expected = [] if section == "none" else [(1, section)]
    for found, logged in pool.run(2, find_slow, {"zero": zero}, section, how, 2):
        assert found == expected
        assert logged["straggler/score_max"] == 1.0
        assert not expected or logged["straggler/score_min"] < 0.7


@pytest.mark.parametrize("options", [{"window": 1}, {"threshold": 0.0}, {"threshold": 1.0}])
def test_wrong_arguments_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="nearest valid"):
        SlowRankDetector(**options)


def test_other_strategies_are_refused() -> None:
    trainer = make_trainer(None, callbacks=[SlowRankDetector()], max_steps=1)
    with pytest.raises(ConfigError, match="SlowRankDetector under SingleDeviceStrategy"):
        trainer.fit(Small(), loader())
