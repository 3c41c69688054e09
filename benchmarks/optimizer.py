"""An optimizer step on shards, against the same optimizer on plain parameters of the shards' size.

200 small parameters, two processes, ZeRO 1: what is timed is the precision plugin's step, from the
gradients of the DTensor parameters to the updated shards, and beside it the step of a plain torch
optimizer, and the step through DTensor dispatch. The variants take turns, step by step; times are
those that the thread spent on the processor, as a step on shards talks to nobody.

    python -m benchmarks.optimizer [--rounds 300]
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.harness import arguments, ratio, report, take_turns
from lightning_megatron import MegatronStrategy
from lightning_megatron.parallel.gradients import local
from lightning_megatron.testing import WorkerPool

COUNT, TARGET = 200, 1.2
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
}


class Many(pl.LightningModule):
    """Many small parameters, all of which the loss depends on."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.members = nn.ParameterList(torch.randn(2, numel // 2) for _ in range(COUNT))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return torch.stack([p.square().mean() for p in self.members]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def job(numel: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every step, by optimizer and variant."""
    module, strategy = Many(numel), MegatronStrategy()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(8, 1)))
    sharded = list(module.parameters())
    assert all(isinstance(p, DTensor) for p in sharded)
    for p in sharded:
        p.grad = torch.full_like(p, 0.01)
    plain = [nn.Parameter(local(p).detach().clone()) for p in sharded]
    for p in plain:
        p.grad = torch.full_like(p, 0.01)
    found = {}
    for name, make in OPTIMIZERS.items():
        ours, theirs, dispatched = make(sharded), make(plain), make(sharded)
        variants: dict[str, Callable[[], Any]] = {
            "plain": theirs.step,
            "shards": lambda ours=ours: strategy.precision_plugin.step(ours),
        }
        found[name] = take_turns(variants, rounds, time.thread_time)
        found[name] |= take_turns(
            {"DTensor": dispatched.step}, max(rounds // 10, 3), time.thread_time
        )
    return found


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=300, steps=1)
    rows = []
    with WorkerPool(2, timeout=600) as pool:
        for numel in (128, 8192):
            times = pool.run(2, job, numel, options.rounds)[0]
            for name, found in times.items():
                middle = {variant: statistics.median(t) for variant, t in found.items()}
                rows.append(
                    {
                        "optimizer": name,
                        "elements of a shard": numel // 2,
                        **{f"{variant} (ms)": round(1e3 * t, 3) for variant, t in middle.items()},
                        "shards / plain": ratio(found["shards"], found["plain"]),
                        "target": TARGET,
                        "DTensor / plain": round(middle["DTensor"] / middle["plain"], 2),
                    }
                )
    title = f"Optimizer step on the shards of {COUNT} parameters, dp=2, zero=1"
    report("optimizer", title, rows, options.output)


if __name__ == "__main__":
    main()
