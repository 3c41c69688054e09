"""What saving a checkpoint costs training, in two processes.

A small transformer with AdamW is trained under FSDP2 (``zero=3``; the peer is Lightning's
``ModelParallelStrategy``, which writes a sharded checkpoint too). Blocks of ten steps that begin
with a save and blocks that do not alternate in one run. *Stall* is the time that one call of
``trainer.save_checkpoint`` takes, from the second on, as the first allocates (target: asynchronous
at most 10 % of synchronous). *Cost* is by how much a block with a save takes longer than the mean
of its neighbours, the median of all such blocks (target: at most 3.5 % when asynchronous).
*Written* is what the last checkpoint has of its own: where only norms and biases are trained
(``frozen``), ``incremental=True`` links the rest from the one before.

    python -m benchmarks.checkpoint [--rounds 2] [--steps 91]
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
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.data_parallel import ShardedByUser
from benchmarks.harness import Model, Tokens, arguments, report
from lightning_megatron import MegatronStrategy
from lightning_megatron.checkpoint.config import CheckpointConfig
from lightning_megatron.checkpoint.directory.manifest import is_checkpoint, read_manifest
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

WORLD = 2
INTERVAL = 10
CONFIG = TransformerConfig(hidden_size=384, num_layers=4, num_heads=6)
BATCH_SIZE, LENGTH = 2, 128
"""Of one rank."""


@dataclass
class Times:
    """What one or more runs took."""

    stalls: list[float] = field(default_factory=list)
    """Seconds."""
    steps: list[float] = field(default_factory=list)
    """Mean seconds of the steps of a block without a save."""
    costs: list[float] = field(default_factory=list)
    """By how much blocks with a save took longer, relative."""
    size: int = 0
    """Bytes of a checkpoint."""
    written: int = 0
    """Bytes of it that were written."""


class Saves(pl.Callback):
    """Saves before every other block, deletes the checkpoint before, and keeps the time."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.stalls = directory, list[float]()
        self.blocks: list[float] = []
        self.previous: Path | None = None
        self._start = 0.0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % INTERVAL:
            return
        now = time.perf_counter()
        if batch_idx:
            self.blocks.append(now - self._start)
        self._start = now
        if batch_idx // INTERVAL % 2 == 0:
            return
        path = self.directory / f"{batch_idx}.ckpt"
        trainer.save_checkpoint(path)
        self.stalls.append(time.perf_counter() - now)
        if self.previous is not None:
            trainer.strategy.remove_checkpoint(self.previous)
        self.previous = path

    def times(self) -> Times:
        """The figures of the run; the first save and the blocks beside it do not count."""
        assert self.previous is not None
        costs = [
            2 * self.blocks[i] / (self.blocks[i - 1] + self.blocks[i + 1]) - 1
            for i in range(3, len(self.blocks) - 1, 2)
        ]
        files = (file for file in self.previous.rglob("*") if file.is_file())
        size = sum(file.stat().st_size for file in files)
        linked = 0
        if is_checkpoint(self.previous):
            manifest = read_manifest(self.previous)
            linked = manifest.size - manifest.own_size
        return Times(
            stalls=self.stalls[1:],
            steps=[seconds / INTERVAL for seconds in self.blocks[2::2]],
            costs=costs,
            size=size,
            written=size - linked,
        )


class Frozen(Model):
    """Trains norms and biases only."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.ndim == 1)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)


def run(kind: type[Model], strategy: Any, steps: int, directory: Path) -> Times:
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
    return callback.times()


def job(rounds: int, steps: int, directory: Path) -> dict[str, Times]:
    """Times of all variants on this rank, taking turns."""
    peer = partial(
        pl.strategies.ModelParallelStrategy, data_parallel_size=WORLD, tensor_parallel_size=1
    )

    def ours(**options: Any) -> Any:
        return MegatronStrategy(zero=3, checkpoint=CheckpointConfig(**options))

    variants: Mapping[str, Callable[[Path], Times]] = {
        "ours, sync": lambda path: run(Model, ours(mode="sync"), steps, path),
        "ours, async": lambda path: run(Model, ours(mode="async"), steps, path),
        "ours, frozen": lambda path: run(Frozen, ours(mode="sync"), steps, path),
        "ours, frozen, incremental": lambda path: run(
            Frozen, ours(mode="sync", incremental=True), steps, path
        ),
        "Lightning": lambda path: run(ShardedByUser, peer(), steps, path),
    }
    total = {name: Times() for name in variants}
    for turn in range(rounds):
        for name, variant in variants.items():
            times = variant(directory / f"{name}-{turn}")
            total[name].stalls += times.stalls
            total[name].steps += times.steps
            total[name].costs += times.costs
            total[name].size, total[name].written = times.size, times.written
            dist.barrier()
    return total


def rows_of(by_rank: Sequence[Mapping[str, Times]]) -> list[dict[str, Any]]:
    """One row for each way of saving; times of the slowest rank."""

    def slowest(name: str, kind: str) -> float:
        values: list[list[float]] = [asdict(times[name])[kind] for times in by_rank]
        return max(statistics.median(of_rank) for of_rank in values)

    sync, peer = slowest("ours, sync", "stalls"), slowest("Lightning", "stalls")
    return [
        {
            "saving": name,
            "MB": round(by_rank[0][name].size / 1e6, 1),
            "written (MB)": round(by_rank[0][name].written / 1e6, 1),
            "stall (ms)": round(1e3 * slowest(name, "stalls"), 1),
            "stall / ours, sync": round(slowest(name, "stalls") / sync, 3),
            "stall / Lightning": round(slowest(name, "stalls") / peer, 3),
            "step without a save (ms)": round(1e3 * slowest(name, "steps"), 1),
            "cost (%)": round(100 * slowest(name, "costs"), 1),
        }
        for name in by_rank[0]
    ]


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=2, steps=91)
    assert options.steps > 5 * INTERVAL  # the second save and its neighbours
    with tempfile.TemporaryDirectory() as directory, WorkerPool(WORLD, timeout=1200) as pool:
        by_rank = pool.run(WORLD, job, options.rounds, options.steps, Path(directory))
    title = f"One checkpoint every {INTERVAL} steps, {WORLD} processes, FSDP2"
    report("checkpoint", title, rows_of(by_rank), options.output)


if __name__ == "__main__":
    main()
