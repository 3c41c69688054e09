"""Overhead of the strategy when there is nothing to distribute.

One process: ``MegatronStrategy()`` against Lightning's own single-device strategy (target: at most
1.03) and against a raw torch loop, same module, data and optimizer.

    python -m benchmarks.overhead [--rounds 6] [--steps 60]
"""

import time

import lightning.pytorch as pl
import torch

from benchmarks.harness import WARMUP, Model, Tokens, arguments, fit, interleave, report
from lightning_megatron import MegatronStrategy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

SIZES = {
    "small": (TransformerConfig(hidden_size=64, num_layers=4, num_heads=4), 4, 32),
    "medium": (TransformerConfig(hidden_size=256, num_layers=4, num_heads=8), 4, 64),
}
"""Model, batch size and sequence length."""
TARGET = 1.03


def raw_loop(module: Model, steps: int, batch_size: int, length: int) -> list[float]:
    """What a user without Lightning would write."""
    optimizer = module.configure_optimizers()
    data = Tokens(batch_size * (steps + 1), length, 256)
    loader = iter(torch.utils.data.DataLoader(data, batch_size=batch_size))
    seconds, last = [], time.perf_counter()
    for step in range(steps):
        loss = module.training_step(next(loader), step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return seconds[WARMUP + 1 :]


def job(size: str, rounds: int, steps: int) -> dict[str, float]:
    """Times of all variants, in one worker."""
    config, batch_size, length = SIZES[size]
    single = pl.strategies.SingleDeviceStrategy
    variants = {
        "raw loop": lambda: raw_loop(Model(config), steps, batch_size, length),
        "lightning": lambda: fit(Model(config), single("cpu"), steps, batch_size, length),
        "megatron": lambda: fit(Model(config), MegatronStrategy(), steps, batch_size, length),
    }
    return interleave(variants, rounds)


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=6, steps=60)
    rows = []
    with WorkerPool(1, timeout=600) as pool:
        for size in SIZES:
            (times,) = pool.run(1, job, size, options.rounds, options.steps)
            rows.append(
                {
                    "model": size,
                    **{f"{name} (ms)": round(1e3 * t, 2) for name, t in times.items()},
                    "megatron / lightning": round(times["megatron"] / times["lightning"], 3),
                    "target": TARGET,
                    "megatron / raw": round(times["megatron"] / times["raw loop"], 3),
                }
            )
    title = "Step time with every degree 1, one process"
    report("overhead", title, rows, options.output)


if __name__ == "__main__":
    main()
