"""What watching and guarding a run costs, while nothing goes wrong.

Same module, data and layout; with no callbacks, with ``Monitor()``, with ``FaultTolerance()`` and
with both (target: at most 1.02 of the median step).

    python -m benchmarks.suite_overhead [--rounds 6] [--steps 60]
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from benchmarks.harness import (
    WARMUP,
    Model,
    StepTimer,
    Tokens,
    arguments,
    interleave,
    report,
    slowest,
)
from lightning_megatron import FaultTolerance, MegatronStrategy, Monitor
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

CONFIG = TransformerConfig(hidden_size=256, num_layers=4, num_heads=8)
BATCH_SIZE, LENGTH = 4, 64
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp=2": (2, {"tp": 2}),
    "dp=2, zero 1": (2, {"zero": 1}),
    "pp=2": (2, {"pp": 2}),
}
TARGET = 1.02


def timed(layout: Mapping[str, Any], callbacks: Sequence[pl.Callback], steps: int) -> list[float]:
    """Seconds of every counted step."""
    timer = StepTimer()
    strategy = MegatronStrategy(**layout)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices="auto" if not layout else 2,
            strategy=strategy,
            max_steps=steps,
            callbacks=[*callbacks, timer],
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = Tokens(BATCH_SIZE * (steps + 1) * trainer.world_size, LENGTH, 256)
        trainer.fit(Model(CONFIG), DataLoader(data, batch_size=BATCH_SIZE))
    return timer.seconds[WARMUP:]


def job(layout: Mapping[str, Any], rounds: int, steps: int) -> dict[str, float]:
    """Times of all variants, in one worker."""
    made: dict[str, Callable[[], list[pl.Callback]]] = {
        "nothing": list,
        "Monitor": lambda: [Monitor()],
        "FaultTolerance": lambda: [FaultTolerance()],
        "both": lambda: [FaultTolerance(), Monitor()],
    }
    return interleave(
        {name: lambda make=make: timed(layout, make(), steps) for name, make in made.items()},
        rounds,
    )


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=6, steps=60)
    rows = []
    with WorkerPool(2, timeout=900) as pool:
        for name, (ranks, layout) in LAYOUTS.items():
            times = slowest(pool.run(ranks, job, layout, options.rounds, options.steps))
            without = times.pop("nothing")
            rows.append(
                {
                    "layout": name,
                    "nothing (ms)": round(1e3 * without, 2),
                    **{f"{n} / nothing": round(t / without, 3) for n, t in times.items()},
                    "target": TARGET,
                }
            )
    report("suite_overhead", "Step time with the suite on and off", rows, options.output)


if __name__ == "__main__":
    main()
