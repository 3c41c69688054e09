"""Bytes of parameters, gradients and optimizer state per rank, against the formula.

With ``P`` bytes of parameters, AdamW's two moments and ``d`` data-parallel ranks, a rank holds
between steps::

    zero 0      P + P + 2P
    zero 1, 2   (P + P + 2P) / d      (gathered parameters exist during the step only)
    zero 3      (P + P + 2P) / d

and while backward runs, besides that, full parameters (zero 0 to 2) and full gradients (zero 0 and
1) of its units. This benchmark counts what the tensors at rest occupy, after a step.

    python -m benchmarks.memory
"""

import torch

from benchmarks.harness import Model, arguments, fit, report
from lightning_megatron import MegatronStrategy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.parallel.gradients import local
from lightning_megatron.testing import WorkerPool

WORLD = 4
CONFIG = TransformerConfig(hidden_size=128, num_layers=4, num_heads=4)


def job(zero: int, tp: int) -> dict[str, int]:
    """Bytes at rest on this rank, by kind."""
    module = Model(CONFIG)
    strategy = MegatronStrategy(zero=zero, tp=tp)
    fit(module, strategy, 2, 2, 16)
    held = [local(p) for p in module.parameters()]
    gradients = [local(p.grad) for p in module.parameters() if p.grad is not None]
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


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=1, steps=2)
    whole = 4 * sum(p.numel() for p in Model(CONFIG).parameters())
    rows = []
    with WorkerPool(WORLD, timeout=300) as pool:
        for zero in range(4):
            by_rank = pool.run(WORLD, job, zero, 1)
            ranks = 1 if zero == 0 else WORLD
            for kind, factor in (("parameters", 1), ("gradients", 1), ("states", 2)):
                largest = max(rank[kind] for rank in by_rank)
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


if __name__ == "__main__":
    main()
