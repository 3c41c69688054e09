"""What the comparison of copies costs that every run makes (`strategy.replica_watch`).

A comparison is timed behind every step of a run, by the wall clock and by processor time, as its
ratio to that step; what a run of ``n`` steps pays follows from the number of its comparisons, those
before the first step, after steps 1, 2, 4 ..., and at the end:

    share(n) = (ceil(log2(n)) + 2) * ratio / n

(target: at most 0.1 % of a run of 10,000 steps).

    python -m benchmarks.replicas [--rounds 40] [--sizes small medium wide]
"""

import argparse
import math
import os
import statistics
import time
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.data_parallel import SIZES, WORLD
from benchmarks.harness import WARMUP, Model, Tokens, parser, report
from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
RUNS = (100, 1_000, 10_000)
"""Steps of runs whose share is computed."""
TARGET = 0.1
"""Percent of the longest of them."""


class Compares(pl.Callback):
    """Times steps, and one comparison behind each."""

    def __init__(self) -> None:
        self.ratios: dict[str, list[float]] = {name: [] for name in CLOCKS}
        self.seconds: list[float] = []
        self._began: dict[str, float] = {}

    @override
    def on_train_batch_start(self, *args: Any) -> None:
        self._began = {name: clock() for name, clock in CLOCKS.items()}

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        stepped = {name: clock() for name, clock in CLOCKS.items()}
        watch: Any = trainer.strategy.replicas  # type: ignore[attr-defined]
        watch.compare(trainer.global_step)
        for name, clock in CLOCKS.items():
            step = stepped[name] - self._began[name]
            self.ratios[name].append((clock() - stepped[name]) / step)
        self.seconds.append(stepped["wall"] - self._began["wall"])


def job(size: str, layout: dict[str, Any], rounds: int) -> tuple[dict[str, float], float]:
    """Median ratios of this rank, and its median step in seconds."""
    config, batch_size, length = SIZES[size]
    timer = Compares()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=MegatronStrategy(**layout),
        max_steps=rounds + WARMUP,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Tokens(batch_size * (rounds + WARMUP) * WORLD, length, 256)
    trainer.fit(Model(config), DataLoader(data, batch_size=batch_size))
    ratios = {name: statistics.median(found[WARMUP:]) for name, found in timer.ratios.items()}
    return ratios, statistics.median(timer.seconds[WARMUP:])


def share(steps: int, ratio: float) -> float:
    """Percent of the time of a run."""
    return 100 * (math.ceil(math.log2(steps)) + 2) * ratio / steps


def row(size: str, layout: str, ratios: dict[str, float], step: float) -> dict[str, Any]:
    """A row of the table."""
    worst = max(ratios.values())
    return {
        "model": size,
        "layout": layout,
        "step (ms)": round(1e3 * step, 2),
        **{f"comparison / step, {name}": round(ratio, 3) for name, ratio in ratios.items()},
        **{f"% of {steps} steps": round(share(steps, worst), 3) for steps in RUNS},
        "target, % of the longest": TARGET,
    }


def options() -> argparse.Namespace:
    """What the command line says."""
    made = parser(__doc__, steps=1)
    made.add_argument("--rounds", type=int, default=40, help="steps of every run")
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    return made.parse_args()


def main() -> None:
    """Run and report."""
    given = options()
    rows = []
    for size in given.sizes:
        for name, layout in {"zero 1": {"zero": 1}, "tp": {"tp": WORLD}}.items():
            with WorkerPool(WORLD, timeout=600) as pool:
                found = pool.run(WORLD, job, size, layout, given.rounds)
            ratios, step = max(found, key=lambda one: one[0]["wall"])
            rows.append(row(size, name, ratios, step))
    report("replicas", "Comparison of copies in every run", rows, given.output)


if __name__ == "__main__":
    main()
