"""What saving a checkpoint costs training, in two processes.

A small transformer with AdamW is trained under FSDP2 (``zero=3``; the peer is Lightning's
``ModelParallelStrategy``, which writes a sharded checkpoint too) and saved every tenth step, the
one before being deleted. *Stall* is the time that one call of ``trainer.save_checkpoint`` takes,
from the second save on, as the first allocates (target: asynchronous at most 10 % of synchronous).
*Cost* is what saving adds to the mean step, stalls included (target: at most 3.5 % when
asynchronous); *drain* is how long the end of training waits for the last save.

    python -m benchmarks.checkpoint [--rounds 2] [--steps 45]
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.data_parallel import ShardedByUser
from benchmarks.harness import WARMUP, Model, Tokens, arguments, report
from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint.asynchronous import CheckpointConfig
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

WORLD = 2
INTERVAL = 10
CONFIG = TransformerConfig(hidden_size=384, num_layers=4, num_heads=6)
BATCH_SIZE, LENGTH = 4, 256
"""Of one rank."""


@dataclass
class Times:
    """Seconds of one or more runs."""

    stalls: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    drains: list[float] = field(default_factory=list)
    size: int = 0


class Saves(pl.Callback):
    """Saves every tenth step, deletes the one before, and keeps the time."""

    def __init__(self, directory: Path | None) -> None:
        self.directory, self.times = directory, Times()
        self._previous: Path | None = None
        self._start = self._end = 0.0
        self._count = 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = batch_idx + 1
        if self.directory is not None and step % INTERVAL == 0:
            path = self.directory / f"{step}.ckpt"
            start = time.perf_counter()
            trainer.save_checkpoint(path)
            if step > INTERVAL:
                self.times.stalls.append(time.perf_counter() - start)
            if self._previous is not None:
                trainer.strategy.remove_checkpoint(self._previous)
            self._previous = path
        # Whole intervals: after warming up, from one save to the last.
        now = time.perf_counter()
        if step == INTERVAL:
            self._start = now
        if step % INTERVAL == 0:
            self._end, self._count = now, step - INTERVAL

    @override
    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.times.steps.append((self._end - self._start) / self._count)
        start = time.perf_counter()
        trainer.strategy.on_train_end()
        self.times.drains.append(time.perf_counter() - start)
        if self._previous is not None:
            files = (f for f in self._previous.rglob("*") if f.is_file())
            self.times.size = sum(f.stat().st_size for f in files)


def run(kind: type[Model], strategy: Any, steps: int, directory: Path | None) -> Times:
    callback = Saves(directory)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_steps=steps,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Tokens(BATCH_SIZE * steps * WORLD, LENGTH, 256)
    trainer.fit(kind(CONFIG), DataLoader(data, batch_size=BATCH_SIZE))
    return callback.times


def job(rounds: int, steps: int, directory: Path) -> dict[str, Times]:
    """Times of all variants on this rank, taking turns."""
    peer = partial(
        pl.strategies.ModelParallelStrategy, data_parallel_size=WORLD, tensor_parallel_size=1
    )

    def ours(mode: str) -> Any:
        return MegatronStrategy(zero=3, checkpoint=CheckpointConfig(mode=mode))  # type: ignore[arg-type]

    variants: Mapping[str, Callable[[Path], Times]] = {
        "ours, no saves": lambda _: run(Model, ours("sync"), steps, None),
        "ours, sync": lambda path: run(Model, ours("sync"), steps, path),
        "ours, async": lambda path: run(Model, ours("async"), steps, path),
        "Lightning, no saves": lambda _: run(ShardedByUser, peer(), steps, None),
        "Lightning": lambda path: run(ShardedByUser, peer(), steps, path),
    }
    total = {name: Times() for name in variants}
    for turn in range(rounds):
        for name, variant in variants.items():
            times = variant(directory / f"{name}-{turn}")
            total[name].stalls += times.stalls
            total[name].steps += times.steps
            total[name].drains += times.drains
            total[name].size = times.size
            dist.barrier()
    return total


def rows_of(by_rank: Sequence[Mapping[str, Times]]) -> list[dict[str, Any]]:
    """One row for each way of saving; times of the slowest rank."""

    def slowest(name: str, kind: str) -> float:
        values: list[list[float]] = [asdict(times[name])[kind] for times in by_rank]
        return max(statistics.median(of_rank) for of_rank in values)

    sync = slowest("ours, sync", "stalls")
    rows = []
    for name in ("ours, sync", "ours, async", "Lightning"):
        without = slowest(f"{name.split(',')[0]}, no saves", "steps")
        stall, step = slowest(name, "stalls"), slowest(name, "steps")
        rows.append(
            {
                "saving": name,
                "MB": round(by_rank[0][name].size / 1e6, 1),
                "stall (ms)": round(1e3 * stall, 1),
                "stall / ours, sync": round(stall / sync, 3),
                "stall / Lightning": round(stall / slowest("Lightning", "stalls"), 3),
                "step (ms)": round(1e3 * step, 1),
                "step without saves (ms)": round(1e3 * without, 1),
                "cost (%)": round(100 * (step / without - 1), 1),
                "drain (ms)": round(1e3 * slowest(name, "drains"), 1),
            }
        )
    return rows


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=2, steps=45)
    assert options.steps > WARMUP + 2 * INTERVAL
    with tempfile.TemporaryDirectory() as directory, WorkerPool(WORLD, timeout=1200) as pool:
        by_rank = pool.run(WORLD, job, options.rounds, options.steps, Path(directory))
    title = f"One checkpoint every {INTERVAL} steps, {WORLD} processes, FSDP2"
    report("checkpoint", title, rows_of(by_rank), options.output)


if __name__ == "__main__":
    main()
