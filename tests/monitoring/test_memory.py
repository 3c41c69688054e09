"""Memory is logged over the ranks, and what was in it is kept when it runs out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatron import MemoryMonitor
from lightning_megatron.errors import ConfigError
from lightning_megatron.monitoring.memory import ran_out_of_memory
from lightning_megatron.monitoring.rank_stats import gather_stats
from lightning_megatron.testing import WorkerPool
from tests.strategy.small import Small, dp_of, loader, make_trainer


class Hoarder(Small):
    """The second data-parallel rank keeps 64 MiB; the batch after that asks for too much."""

    kept: Tensor | None = None
    greedy = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.kept is None and self.trainer.strategy.topology.batch.rank == 1:
            self.kept = torch.ones(4096, 4096)
        if self.greedy:
            torch.empty(1 << 50)
        return super().training_step(batch, batch_idx)


def watched(layout: Mapping[str, Any], devices: int) -> dict[str, float]:
    module = Hoarder()
    trainer = make_trainer(layout, devices, callbacks=[MemoryMonitor(every=1)])
    trainer.fit(module, loader(dp=dp_of(devices, layout)))
    own = gather_stats({"rss": 1.0 + trainer.global_rank}, torch.device("cpu"))["rss"]
    assert own == (1.0, 1.5, 2.0, 1, (1.0, 2.0))
    return {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("mem/")}


def test_every_rank_logs_the_highest(pool: WorkerPool) -> None:
    first, second = pool.run(2, watched, {"zero": 1}, 2)
    assert first == second
    assert set(first) == {"mem/rss_gib", "mem/peak_rss_gib", "mem/worst_rank"}
    assert 64 / 1024 < first["mem/rss_gib"] <= first["mem/peak_rss_gib"] * 1.01 < 8


def test_evidence_is_kept_when_memory_runs_out(tmp_path: Path) -> None:
    module = Hoarder()
    module.greedy, module.kept = True, torch.zeros(123, 457)
    trainer = make_trainer({}, callbacks=[MemoryMonitor(directory=str(tmp_path))])
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        trainer.fit(module, loader())
    text = (tmp_path / "memory" / "rank_00000.txt").read_text()
    assert "DefaultCPUAllocator" in text
    assert "mem/peak_rss_gib" in text
    assert "torch.float32  [123, 457]  cpu" in text


def test_other_errors_are_not_taken_for_it(tmp_path: Path) -> None:
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not ran_out_of_memory(ValueError("out of memory of what I ate"))
    monitor: Any = MemoryMonitor(directory=str(tmp_path))
    monitor.on_exception(None, None, ValueError("no"))
    assert list(tmp_path.iterdir()) == []


def test_every_is_checked() -> None:
    with pytest.raises(ConfigError, match="every=0"):
        MemoryMonitor(every=0)
