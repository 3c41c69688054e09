"""Numbers of every rank: brought together by one collective, and kept for Prometheus.

Loggers take one number a name, so what every rank has of its own goes there as lowest, mean and
highest, with the rank of the highest: `gather_stats`. Prometheus knows labels: there each rank
keeps its number, ``lightning_megatron_mem_rss_bytes{rank="3"}``. Callbacks that have gathered such
numbers also put them into `RankMetrics`; numbers that change between two steps that log, or while a
rank hangs, are added there as a source that the reader calls.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy

from lightning_megatron._torch.devices import is_cuda

Values = Mapping[tuple[str, ...], float]
"""Numbers by the labels' values."""


class RankStats(NamedTuple):
    """One number over all ranks."""

    lowest: float
    mean: float
    highest: float
    highest_rank: int
    """First rank that has the highest; a NaN counts as the highest."""
    values: tuple[float, ...]
    """The number of each rank."""


def number_device(trainer: pl.Trainer) -> torch.device:
    """Device of tensors for the default process group: a GPU, or the host."""
    device = trainer.strategy.root_device
    return device if is_cuda(device) else torch.device("cpu")


def gather_stats(values: Mapping[str, float], device: torch.device) -> dict[str, RankStats]:
    """Gather numbers of all ranks; collective where there are several.

    Args:
        values: numbers of this rank; all ranks give the same names.
        device: device of tensors for the default process group.
    """
    mine = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    ranks = [mine]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(ranks, mine)
    columns = zip(*torch.stack(ranks).tolist(), strict=True)
    return {name: _stats(column) for name, column in zip(values, columns, strict=True)}


def _stats(column: tuple[float, ...]) -> RankStats:
    highest = max(column, key=lambda value: math.inf if math.isnan(value) else value)
    mean = sum(column) / len(column)
    return RankStats(min(column), mean, highest, column.index(highest), column)


class LabelledMetric(NamedTuple):
    """One metric with labels."""

    name: str
    """Name as a logger would have it, ``mem/rss_gib``."""
    labels: tuple[str, ...]
    """Names of the labels."""
    values: Values


class RankMetrics:
    """Metrics with labels, for the ranks of one strategy.

    Any thread may read them: a metric is replaced as a whole.
    """

    def __init__(self) -> None:
        self._metrics: dict[str, LabelledMetric] = {}
        self._sources: dict[str, Callable[[], Iterable[LabelledMetric]]] = {}

    def put(self, name: str, by_rank: Sequence[float]) -> None:
        """Set a metric with the label ``rank``."""
        values: Values = {(str(rank),): float(value) for rank, value in enumerate(by_rank)}
        self.put_metric(LabelledMetric(name, ("rank",), values))

    def put_metric(self, metric: LabelledMetric) -> None:
        """Set a metric with any labels."""
        self._metrics[metric.name] = metric

    def set_source(self, key: str, source: Callable[[], Iterable[LabelledMetric]] | None) -> None:
        """Set or, by None, remove a function that the reader calls in its own thread."""
        if source is None:
            self._sources.pop(key, None)
        else:
            self._sources[key] = source

    def metrics(self) -> list[LabelledMetric]:
        """All present metrics, those of the sources included."""
        found = list(self._metrics.values())
        for source in list(self._sources.values()):
            found += source()
        return found


_RANK_METRICS: WeakKeyDictionary[Strategy, RankMetrics] = WeakKeyDictionary()


def rank_metrics_of(trainer: pl.Trainer) -> RankMetrics:
    """The `RankMetrics` of the Trainer's strategy, whichever it is."""
    return _RANK_METRICS.setdefault(trainer.strategy, RankMetrics())
