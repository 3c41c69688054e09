"""A rank that makes others wait is named, with the section, in two windows."""

from typing import Any

import pytest

from lightning_megatron import ConfigError, SlowRankDetector
from lightning_megatron.run_log.sections import SectionClock
from lightning_megatron.testing import WorkerPool
from tests.monitoring.test_sections import Time
from tests.strategy.small import Small, loader, make_trainer, samples

WINDOW = 3


class Waiting(Time):
    """Time that passes where a test says so, and for long in every wait for another rank."""

    clock: SectionClock | None = None
    waits = False

    def __call__(self) -> float:
        waited, self.waits = self.waits, self.clock is not None and self.clock.waits > 0
        if waited and not self.waits:
            self.now += 100.0
        return super().__call__()


class OneIsSlow(Small):
    """Rank 1 takes longer in one section."""

    def __init__(self, section: str, time: Time) -> None:
        super().__init__()
        self.section, self.time = section, time

    def lose_time(self, section: str) -> None:
        if section == self.section and self.trainer.global_rank == 1:
            self.time.now += 3.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.time.now += 2.0
        self.lose_time("forward")
        loss = self.loss(batch)
        loss.register_hook(lambda _: self.lose_time("backward"))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.lose_time("data")


def find_slow(layout: dict[str, Any], section: str) -> Any:
    detector, time = SlowRankDetector(window=WINDOW), Waiting()
    trainer = make_trainer(layout, 2, callbacks=[detector])
    trainer.strategy.clock = time.clock = SectionClock(time)
    trainer.fit(OneIsSlow(section, time), loader(samples(8 * (1 + 2 * WINDOW)), dp=2))
    logged = {k: float(v) for k, v in trainer.callback_metrics.items() if "straggler" in k}
    return [(s.rank, s.section) for s in detector.slow], logged


@pytest.mark.parametrize(
    ("zero", "section"), [(1, "forward"), (0, "backward"), (3, "data"), (2, "none")]
)
def test_the_slow_rank_is_found_in_two_windows(pool: WorkerPool, zero: int, section: str) -> None:
    expected = [] if section == "none" else [(1, section)]
    for found, logged in pool.run(2, find_slow, {"zero": zero}, section):
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
