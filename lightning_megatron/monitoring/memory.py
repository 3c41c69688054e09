"""Memory of the ranks, and its contents when it runs out.

Every `every` batches, of the rank that has most of it (one small collective):

===============================  ===================================================================
``mem/peak_allocated_gib``       most that tensors took on a device since the last time
``mem/peak_reserved_gib``        the same of what the allocator held
``mem/peak_allocated_fraction``  the first, as a share of the device
``mem/alloc_retries``            how often the allocator freed its cache to go on, all ranks, total
``mem/ooms``                     how often it could not go on, all ranks, total
``mem/rss_gib``                  memory of the host that a process takes now (Linux)
``mem/peak_rss_gib``             most that it ever took
``mem/worst_rank``               the rank with the highest peak (of a device, else of the host)
===============================  ===================================================================

The figures of devices are there on GPUs only, and the counters of the allocator cost no
synchronisation. When memory runs out, on a device or a host, the rank writes what it knows to
``DIRECTORY/memory/rank_00000.txt`` before it ends: the allocator's summary and the largest tensors
that are alive; with ``record=True`` also the history of allocations, for torch's memory viewer.
"""

import gc
import logging
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_megatron._torch.devices import device_module, is_cuda
from lightning_megatron._torch.kernels import dump_allocations, record_allocations
from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.rank_stats import gather_stats, number_device, rank_metrics_of

logger = logging.getLogger(__name__)

GIB = 1 << 30
_PAGE = resource.getpagesize()
_STATM = Path("/proc/self/statm")
_LARGEST = 40


class MemoryMonitor(pl.Callback):
    """Logs peak memory over ranks, and keeps evidence when memory runs out.

    Args:
        every: batches between two values.
        directory: where evidence goes; None: the Trainer's ``default_root_dir``.
        record: keep the history of the device's allocations (some 1 % of time, GPUs only).

    Raises:
        ConfigError: ``every`` is smaller than one batch.
    """

    def __init__(self, every: int = 50, directory: str | None = None, record: bool = False) -> None:
        if every < 1:
            raise ConfigError(f"every={every}: must be at least 1; nearest valid: every=1")
        self._every = every
        self._directory = directory
        self._record = record
        self._batches = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._batches = 0
        if self._record and is_cuda(trainer.strategy.root_device):
            record_allocations(True)

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
        if self._batches != 1 and self._batches % self._every:
            return
        pl_module.log_dict(_over_ranks(trainer), batch_size=1)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._record and is_cuda(trainer.strategy.root_device):
            record_allocations(False)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if not ran_out_of_memory(exception):
            return
        folder = Path(self._directory or trainer.default_root_dir) / "memory"
        file = folder / f"rank_{trainer.global_rank:05d}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file.write_text(evidence(exception, trainer.strategy.root_device))
            if self._record and is_cuda(trainer.strategy.root_device):
                dump_allocations(str(file.with_suffix(".pickle")))
        except OSError as error:
            logger.warning("rank %d ran out of memory; no evidence: %s", trainer.global_rank, error)
            return
        logger.error(
            "rank %d ran out of memory; what was in it is in %s", trainer.global_rank, file
        )


def ran_out_of_memory(exception: BaseException) -> bool:
    """Whether an exception says that memory ran out, of a device or of the host."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(exception)
    return isinstance(exception, RuntimeError) and (
        "DefaultCPUAllocator" in text or "out of memory" in text
    )


def evidence(exception: BaseException, device: torch.device) -> str:
    """Text about the memory of this process, for people."""
    lines = [f"{type(exception).__name__}: {exception}", ""]
    host = _host()
    lines += [f"host: {name} {value:.3f}" for name, value in host.items()]
    if is_cuda(device):
        lines += ["", device_module(device).memory_summary(device)]
    lines += ["", "tensors alive, largest first (GiB, count, type, shape, device):"]
    alive = Counter(
        (t.numel() * t.element_size(), str(t.dtype), tuple(t.shape), str(t.device))
        for t in _tensors()
    )
    largest = sorted(alive.items(), key=lambda item: -item[0][0] * item[1])[:_LARGEST]
    lines += [
        f"{size * count / GIB:10.4f} {count:6d}  {dtype}  {list(shape)}  {where}"
        for (size, dtype, shape, where), count in largest
    ]
    return "\n".join(lines) + "\n"


def _tensors() -> list[Tensor]:
    # By type, not by isinstance, which would look at properties of everything alive.
    # Those of a compiler stand for others, and have sizes that are no numbers.
    kinds = (Tensor, nn.Parameter, DTensor)
    return [x for x in gc.get_objects() if type(x) in kinds and x.device.type != "meta"]


def _over_ranks(trainer: pl.Trainer) -> dict[str, float]:
    device, peaks, totals = trainer.strategy.root_device, _host(), {}
    if is_cuda(device):
        statistics = device_module(device).memory_stats(device)
        whole = device_module(device).get_device_properties(device).total_memory
        allocated = statistics.get("allocated_bytes.all.peak", 0)
        peaks |= {
            "mem/peak_allocated_gib": allocated / GIB,
            "mem/peak_reserved_gib": statistics.get("reserved_bytes.all.peak", 0) / GIB,
            "mem/peak_allocated_fraction": allocated / whole,
        }
        totals = {
            "mem/alloc_retries": float(statistics.get("num_alloc_retries", 0)),
            "mem/ooms": float(statistics.get("num_ooms", 0)),
        }
        device_module(device).reset_peak_memory_stats(device)
    found = gather_stats(peaks | totals, number_device(trainer))
    for name, of_ranks in found.items():
        rank_metrics_of(trainer).put(name, of_ranks.values)
    worst = found.get("mem/peak_allocated_gib", found["mem/peak_rss_gib"]).highest_rank
    return {
        **{name: found[name].highest for name in peaks},
        **{name: sum(found[name].values) for name in totals},
        "mem/worst_rank": float(worst),
    }


def _host() -> dict[str, float]:
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"mem/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
    if _STATM.exists():
        found["mem/rss_gib"] = int(_STATM.read_text().split()[1]) * _PAGE / GIB
    return found
