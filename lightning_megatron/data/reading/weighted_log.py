"""What ``self.log(..., sync_dist=True)`` means where ranks have different numbers of samples.

Lightning's mean over ranks weighs each rank alike. A single process would log the mean over all
samples of the batch. So a mean that is to be synchronised is formed here, and Lightning is given
the result, with the ``batch_size`` of the global batch: in the steps and over the epoch it is what
one process logs. A rank counts with the ``batch_size`` that the user gives (a number of tokens,
say), else with its samples: in the hooks of a batch those of the batch, outside of them those that
it has read in the epoch.

Sums, least and greatest values need no weight, but a rank that repeats a sample of another one
adds nothing to a sum. A `torchmetrics.MeanMetric` that counts means over different numbers of
samples alike is refused.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from lightning_megatron.data.reading.shares import Portion
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.mesh import Topology

_ARGUMENTS = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
_MEANS = ("mean", "avg", torch.mean)
_SUMS = ("sum", torch.sum, sum)


class WeighedLog:
    """Stands in for ``module.log`` while a run trains.

    Args:
        module: the user's.
        trainer: that trains it.
        topology: who reads what.
        coming: gives the parts of the batches that have been drawn and not begun.
    """

    def __init__(
        self,
        module: LightningModule,
        trainer: Trainer,
        topology: Topology,
        coming: Callable[[], deque[Portion]],
    ) -> None:
        self._module = module
        self._trainer = trainer
        self._axis = topology.batch
        self._device = topology.device
        self._coming = coming
        self._plain: Callable[..., None] = module.log
        self._portion: Portion | None = None
        self._began = -1
        self._epoch = -1
        self._read = self._of_all = 0
        self._counted: dict[int, float] = {}

    def install(self) -> Callable[[], None]:
        """Replace ``module.log``; returns a function that undoes it."""
        vars(self._module)["log"] = self.log

        def undo() -> None:
            vars(self._module).pop("log", None)

        return undo

    def begin_batch(self, portion: Portion) -> None:
        """The strategy's part of a batch begins."""
        trainer = self._trainer
        self._portion = portion
        self._began = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if trainer.current_epoch != self._epoch:
            self._epoch = trainer.current_epoch
            self._read = self._of_all = 0
        self._read += portion.samples
        self._of_all += portion.total

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log; takes what ``LightningModule.log`` takes."""
        options |= dict(zip(_ARGUMENTS, args, strict=False))
        if self._trainer.training:
            reduce_fx = options.get("reduce_fx", "mean")
            batch = self.batch()
            if isinstance(value, Metric):
                self._check(name, value, batch)
            elif reduce_fx in _SUMS and batch is not None and not batch.counts:
                value = value * 0
            elif reduce_fx in _MEANS and _synchronises(options):
                value = self._mean(value, batch, options)
        self._plain(name, value, **options)

    def batch(self) -> Portion | None:
        """Part of the batch in whose hooks this is called; None outside of them."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        if progress.ready == progress.completed:
            return None
        if progress.ready != self._began:  # before the strategy's own hook
            coming = self._coming()
            return coming[0] if coming else None
        return self._portion

    def _mean(self, value: Any, batch: Portion | None, options: dict[str, Any]) -> Tensor:
        given = options.get("batch_size")
        wide = torch.as_tensor(value, device=self._device).detach().to(torch.float64).squeeze()
        dtype = value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()
        if not dtype.is_floating_point:
            dtype = torch.get_default_dtype()
        if given is None:
            total = self._sum(wide * self._weight(batch) if self._weight(batch) else wide * 0)
            if batch is not None:
                options["batch_size"] = batch.total
            return total.to(dtype)
        size = torch.as_tensor(given, device=self._device).to(torch.float64).squeeze()
        if batch is not None and not batch.counts:
            size = size * 0
        # The mean over no token is not a number, and counts as little.
        part = torch.where(size > 0, wide * size, 0.0)
        total, sizes = self._sum(torch.stack([part, size]))
        options["batch_size"] = sizes.to(torch.int64)
        mean: Tensor = total / sizes
        return mean.to(dtype)

    def _weight(self, batch: Portion | None) -> float:
        """Share of this rank in a mean over samples."""
        if batch is not None:
            return batch.samples / batch.total
        return self._read / self._of_all if self._of_all else 1 / self._axis.size

    def _sum(self, values: Tensor) -> Tensor:
        if self._axis.group is not None:
            dist.all_reduce(values, group=self._axis.group)
        return values

    def _check(self, name: str, metric: Metric, batch: Portion | None) -> None:
        """Refuse a metric in which batches of different sizes count alike."""
        if not isinstance(metric, MeanMetric) or batch is None or not batch.counts:
            return
        if id(metric) in self._counted:  # a look at the device; once is enough
            return
        counted = float(torch.as_tensor(metric.weight).sum())
        self._counted[id(metric)] = counted
        if counted < batch.samples:
            raise ConfigError(
                f"batch_shares, self.log({name!r}, <MeanMetric>): it counted {counted:g} values "
                f"for a batch of {batch.samples} samples on this rank; means over different "
                f"numbers of samples would count alike; nearest valid: metric.update(value, "
                f"weight=<samples>), or self.log({name!r}, value, sync_dist=True)"
            )


def _synchronises(options: dict[str, Any]) -> bool:
    """Whether a value is to be synchronised over the ranks that read different samples."""
    return bool(options.get("sync_dist")) and options.get("sync_dist_group") is None
