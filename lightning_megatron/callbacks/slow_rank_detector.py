"""Ranks that are slower than their peers, found by comparing the own work of each."""

from collections.abc import Callable
from statistics import median
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_megatron._torch.collectives import watch_waits
from lightning_megatron.errors import ConfigError
from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.slow_rank_comparison import (
    OwnWork,
    Score,
    SlowRanks,
    scores,
)
from lightning_megatron.monitoring.rank_stats import LabelledMetric, Values, rank_metrics_of
from lightning_megatron.services import MegatronServices, services_of

_WINDOWS = 2
_SHOWN = 3
_NEEDS = "it needs the sections of a step"


class SlowRankDetector(pl.Callback):
    """Names ranks that are slower than others with the same work, and the section of the step.

    After every window of batches each rank's own work (without waiting for others) is compared, by
    section: its score is the fastest rank's median over its own median, 1 at best. A score below
    ``threshold`` in two windows in a row is reported on stderr and by an event of kind
    ``slow_rank``. Logs ``straggler/score_min``, ``_median`` and ``_max`` once a window, over all
    ranks and sections, and the worst three as ``straggler/worst_1`` (2, 3) with
    ``straggler/worst_1_rank``; `PrometheusEndpoint` has all scores by rank and section. Ranks of
    different pipeline stages have different work and are not compared. On GPUs only the host's work
    is seen: data, and launching kernels. Works under `MegatronStrategy`.

    Args:
        window: batches between comparisons; each costs one gather of five numbers.
        threshold: score below which a rank is slow.

    Attributes:
        latest: scores of the last window, the worst first.
        slow: all scores that were reported.

    Raises:
        ConfigError: an argument is out of range, or the strategy is another.
    """

    def __init__(self, window: int = 50, threshold: float = 0.7) -> None:
        if window < 2:
            raise ConfigError(f"window={window}: must be at least 2; nearest valid: window=2")
        if not 0 < threshold < 1:
            raise ConfigError(
                f"threshold={threshold}: must lie between 0 and 1; nearest valid: threshold=0.7"
            )
        self._window = window
        self._slow_ranks = SlowRanks(threshold, _WINDOWS)
        self._work: OwnWork | None = None
        self._unwatch: Callable[[], None] | None = None
        self.latest: list[Score] = []
        self.slow: list[Score] = []

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        services_of(trainer, self, _NEEDS)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        if trainer.world_size == 1:
            return
        clock = services_of(trainer, self, _NEEDS).clock
        self._unwatch = watch_waits(clock.began_to_wait, clock.waited)
        self._work = OwnWork(clock)
        self._batches = 0

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        work = self._work
        if work is None:
            return
        self._batches += 1
        if self._batches == 1:  # includes work that happens once
            work.begin()
            return
        work.end()
        if len(work) == self._window:
            self._compare(trainer, pl_module, work.take())
            work.begin()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        self._work = None
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def _compare(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, mine: list[float]
    ) -> None:
        services = services_of(trainer, self, _NEEDS)
        stage = float(services.topology.pp.rank)
        *columns, stages = services.votes.exchange([*mine, stage])
        self.latest = scores(list(zip(*columns, strict=True)), stages)
        values = [score.score for score in self.latest]
        found = {"min": min(values), "median": median(values), "max": max(values)}
        logged = {f"straggler/score_{name}": value for name, value in found.items()}
        for place, score in enumerate(self.latest[:_SHOWN], start=1):
            logged[f"straggler/worst_{place}"] = score.score
            logged[f"straggler/worst_{place}_rank"] = float(score.rank)
        pl_module.log_dict(logged, batch_size=1)
        by_label: Values = {(str(score.rank), score.section): score.score for score in self.latest}
        rank_metrics_of(trainer).put_metric(
            LabelledMetric("straggler/score", ("rank", "section"), by_label)
        )
        slow = self._slow_ranks.add(self.latest)
        self.slow += slow
        if trainer.is_global_zero:
            for score in slow:
                self._report(services, score)

    def _report(self, services: MegatronServices, score: Score) -> None:
        worst = [str(other) for other in self.latest[:_SHOWN] if other.score < 1]
        announce(f"rank {score.rank} is slow in {score.section}", [str(score), "worst:", *worst])
        services.events.write(
            "slow_rank",
            rank_of_fault=score.rank,
            section=score.section,
            score=score.score,
            seconds=score.seconds,
            fastest=score.fastest,
        )
