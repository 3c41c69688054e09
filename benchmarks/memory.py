"""Bytes of parameters, gradients and optimizer state per rank, against the formula and DDP's peak.

With ``P`` bytes of parameters, AdamW's two moments and ``d`` data-parallel ranks, a rank holds
between steps::

    zero 0      P + P + 2P
    zero 1, 2   P + (P + 2P) / d
    zero 3      (P + P + 2P) / d

and while backward runs, besides that, full gradients (zero 1: all, zero 2: of a bucket) or the full
parameters and gradients of a unit (zero 3). The first table counts what the tensors occupy after a
step. The second compares peaks of resident memory with those of ``DistributedDataParallel`` under
Lightning, each in processes of its own: what is sharded (``2P (d - 1) / d`` of state) should be
missing from the peak.

    python -m benchmarks.memory
"""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.harness import Model, arguments, fit, report
from lightning_megatron import MegatronStrategy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool
from lightning_megatron.zero.gradients import local

WORLD = 4
CONFIG = TransformerConfig(hidden_size=128, num_layers=4, num_heads=4)
LARGE = TransformerConfig(hidden_size=1024, num_layers=4, num_heads=8)
"""Some 200 MB of parameters: peaks of a process are known to a few MB."""


def job(zero: int) -> dict[str, int]:
    """Bytes at rest on this rank, by kind."""
    module = Model(CONFIG)
    strategy = MegatronStrategy(zero=zero)
    fit(module, strategy, 2, 2, 16)
    held = [local(p) for p in module.parameters()]
    gradients = strategy.parallel.gradients.local_gradients()
    states = [
        local(value)
        for state in strategy.optimizers[0].state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    return {
        name: sum(t.numel() * t.element_size() for t in tensors)
        for name, tensors in (("parameters", held), ("gradients", gradients), ("states", states))
    }


def peak_job(zero: int | None) -> int:
    """Growth of resident memory from before the model to the peak of three steps, in bytes."""
    gc.collect()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    make: Callable[[], Any] = pl.strategies.DDPStrategy
    if zero is not None:
        make = partial(MegatronStrategy, zero=zero)
    fit(Model(LARGE), make(), 3, 1, 16)
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def peaks(output: Path) -> None:
    """The second table."""
    whole = 4 * sum(p.numel() for p in Model(LARGE).parameters())
    found: dict[str, int] = {}
    for name, zero in (("DDP", None), ("zero 0", 0), ("zero 1", 1), ("zero 2", 2), ("zero 3", 3)):
        with WorkerPool(2, timeout=300) as pool:
            found[name] = max(pool.run(2, peak_job, zero))
    rows = []
    for name, peak in found.items():
        sharded = {"DDP": 0, "zero 0": 0, "zero 3": 2 * whole}.get(name, whole)
        target = found["DDP"] - sharded
        rows.append(
            {
                "strategy": name,
                "peak (MB)": round(peak / 1e6),
                "DDP's minus the sharded part (MB)": round(target / 1e6),
                "ratio": round(peak / target, 3),
                "target": 1.0,
            }
        )
    title = f"Peak of resident memory, dp=2, float32, AdamW, {whole / 1e6:.0f} MB of parameters"
    report("memory_peak", title, rows, output)


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=1, steps=2)
    whole = 4 * sum(p.numel() for p in Model(CONFIG).parameters())
    rows = []
    with WorkerPool(WORLD, timeout=300) as pool:
        for zero in range(4):
            by_rank = pool.run(WORLD, job, zero)
            for kind, factor, from_stage in (
                *(("parameters", 1, 3), ("gradients", 1, 1)),
                ("states", 2, 1),
            ):
                largest = max(rank[kind] for rank in by_rank)
                ranks = WORLD if zero >= from_stage else 1
                formula = factor * whole / ranks
                rows.append(
                    {
                        "zero": zero,
                        "kind": kind,
                        "bytes on the fullest rank": largest,
                        "formula": round(formula),
                        "ratio": round(largest / formula, 3),
                        "target": "0.95 to 1.05",
                    }
                )
    report("memory", f"Bytes at rest per rank, dp={WORLD}, float32, AdamW", rows, options.output)
    peaks(options.output)


if __name__ == "__main__":
    main()
