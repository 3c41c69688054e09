"""Padding, lengths of samples, and the wait for data, over all ranks.

=========================  =========================================================================
``data/wait_s``            seconds a batch waits for data, on the rank that waits longest
``data/padding_fraction``  share of the tokens of a batch that are padding
``data/length_mean``       tokens of a sample that are no padding, on average
``data/length_max``        the most of them
``data/tokens_per_batch``  tokens of a global batch that are no padding
=========================  =========================================================================

of the batches since the last time, for one small collective. All but the first need batches that
say how long their samples are: `Pad` puts ``lengths`` into them. The sums stay on the device
until they are logged. The wait is the time between the end of a batch and the start of the next,
without validation and, under `MegatronStrategy`, saving; that of the first batch of a run, whose
workers start, does not count. `ThroughputMonitor` has the wait of its own rank.
"""

import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.data.reading.collate import LENGTHS
from lightning_megatron.errors import raise_if_any, whole_numbers
from lightning_megatron.monitoring.rank_stats import gather_stats, number_device
from lightning_megatron.monitoring.throughput import data_parallel_size, seconds_saving


class DataMonitor(pl.Callback):
    """Logs the share of padding, the lengths of samples, and the longest wait for data.

    Args:
        every: batches between two values; the first come after two batches.

    Raises:
        ConfigError: ``every`` is smaller than one batch.
    """

    def __init__(self, every: int = 50) -> None:
        raise_if_any(whole_numbers(1, every=every))
        self._every = every
        self._clock = time.perf_counter
        self._batches = self._since = 0
        self._waited = self._validated = self._paused_at = self._ended_at = 0.0
        self._sums: Tensor | None = None
        self._longest: Tensor | None = None
        self._padded = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = 0
        self._validated = 0.0
        self._begin()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._batches:
            self._waited += self._now(trainer) - self._ended_at

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._batches += 1
        self._since += self._batches > 1
        self._count(batch)
        if self._batches == 2 or (self._batches > 2 and self._batches % self._every == 0):
            pl_module.log_dict(self._values(trainer), batch_size=1)
            self._begin()
        self._ended_at = self._now(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused_at = self._clock()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated += self._clock() - self._paused_at

    def _begin(self) -> None:
        self._since = self._padded = 0
        self._waited = 0.0
        self._sums = self._longest = None

    def _now(self, trainer: pl.Trainer) -> float:
        """Time without that of validation and saving."""
        return self._clock() - self._validated - seconds_saving(trainer)

    def _count(self, batch: Any) -> None:
        lengths = batch.get(LENGTHS) if isinstance(batch, Mapping) else None
        if not isinstance(lengths, Tensor):
            return
        rows = (v for v in batch.values() if isinstance(v, Tensor) and v.ndim > 1)
        padded = next((v.shape[1] for v in rows if len(v) == len(lengths)), None)
        if padded is None:
            return
        self._padded += len(lengths) * padded
        sums = torch.stack([lengths.sum(), torch.full_like(lengths[0], len(lengths))])
        self._sums = sums if self._sums is None else self._sums + sums
        longest = lengths.max()
        self._longest = longest if self._longest is None else self._longest.maximum(longest)

    def _values(self, trainer: pl.Trainer) -> dict[str, float]:
        tokens, samples = (0, 0) if self._sums is None else self._sums.tolist()
        mine = {
            "wait": self._waited / self._since,
            "padded": float(self._padded),
            "tokens": float(tokens),
            "samples": float(samples),
            "longest": 0.0 if self._longest is None else float(self._longest),
        }
        found = gather_stats(mine, number_device(trainer))
        values = {"data/wait_s": found["wait"].highest}
        padded, tokens = found["padded"].mean, found["tokens"].mean
        if padded:
            batches = self._batches if self._batches <= 2 else self._since
            values |= {
                "data/padding_fraction": 1 - tokens / padded,
                "data/length_mean": tokens / found["samples"].mean,
                "data/length_max": found["longest"].highest,
                "data/tokens_per_batch": tokens * data_parallel_size(trainer) / batches,
            }
        return values
