"""Data parallelism in two processes against Lightning's own strategies.

ZeRO 0 and 1 against ``DDPStrategy`` (target: at most 1.05), ZeRO 3 against
``ModelParallelStrategy`` with FSDP2 applied to every block and the root, as Lightning's
documentation shows it (target: at most 1.0).

    python -m benchmarks.data_parallel [--rounds 6] [--steps 40]
"""

from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

from benchmarks.harness import Model, arguments, fit, interleave, report, slowest
from lightning_megatron import MegatronStrategy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

WORLD = 2
SIZES = {
    "small": (TransformerConfig(hidden_size=64, num_layers=4, num_heads=4), 4, 32),
    "medium": (TransformerConfig(hidden_size=256, num_layers=4, num_heads=8), 4, 64),
}
"""Model, batch size of a rank and sequence length."""
PAIRS = (("zero 0", "ddp", 1.05), ("zero 1", "ddp", 1.05), ("zero 3", "fsdp2", 1.0))
"""Ours, the peer, and the target for the ratio."""


class ShardedByUser(Model):
    """The peer's way: the user applies FSDP2 in ``configure_model``."""

    @override
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.trunk.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.trunk, mesh=mesh)


def job(size: str, rounds: int, steps: int) -> dict[str, float]:
    """Times of all variants on this rank."""
    config, batch_size, length = SIZES[size]

    def run(kind: type[Model], strategy: Any) -> list[float]:
        return fit(kind(config), strategy(), steps, batch_size, length)

    peer = partial(
        pl.strategies.ModelParallelStrategy, data_parallel_size=WORLD, tensor_parallel_size=1
    )
    variants = {
        "ddp": lambda: run(Model, pl.strategies.DDPStrategy),
        "zero 0": lambda: run(Model, partial(MegatronStrategy, zero=0)),
        "zero 1": lambda: run(Model, partial(MegatronStrategy, zero=1)),
        "fsdp2": lambda: run(ShardedByUser, peer),
        "zero 3": lambda: run(Model, partial(MegatronStrategy, zero=3)),
    }
    return interleave(variants, rounds)


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=6, steps=40)
    rows = []
    with WorkerPool(WORLD, timeout=900) as pool:
        for size in SIZES:
            times = slowest(pool.run(WORLD, job, size, options.rounds, options.steps))
            rows += [
                {
                    "model": size,
                    "ours": ours,
                    "ours (ms)": round(1e3 * times[ours], 2),
                    "peer": peer,
                    "peer (ms)": round(1e3 * times[peer], 2),
                    "ratio": round(times[ours] / times[peer], 3),
                    "target": target,
                }
                for ours, peer, target in PAIRS
            ]
    report("data_parallel", f"Step time with dp={WORLD}", rows, options.output)


if __name__ == "__main__":
    main()
