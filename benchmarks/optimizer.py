"""An optimizer step on what a rank owns, against the same optimizer on as many plain parameters.

200 small parameters, two processes. What is timed is the precision plugin's step, from gradients to
updated values: under ZeRO 1 on rows of plain parameters, under ZeRO 3 on the shards of DTensors;
and the step of a plain torch optimizer on parameters of the same size. The variants take turns,
step by step; times are those that the thread spent on the processor, as these steps talk to nobody.

    python -m benchmarks.optimizer [--rounds 300]
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from benchmarks.harness import arguments, ratio, report, take_turns
from lightning_megatron import MegatronStrategy
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


class Timing(pl.Callback):
    """Times optimizers after the first batch, in the midst of a run."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.found: dict[str, dict[str, list[float]]] = {}

    def on_train_batch_end(self, trainer: Any, module: pl.LightningModule, *_: Any) -> None:
        strategy = trainer.strategy
        roles = strategy.gradients.roles
        plain = [nn.Parameter(role.values.detach().clone()) for role in roles]
        for role, p in zip(roles, plain, strict=True):
            p.grad = torch.full_like(p, 0.01)
            if role.rows is None:
                role.parameter.grad = torch.full_like(role.parameter, 0.01)
            else:
                role.rows.gradient = torch.full_like(p, 0.01)
        for name, make in OPTIMIZERS.items():
            ours, theirs = make([role.parameter for role in roles]), make(plain)
            variants: dict[str, Callable[[], Any]] = {
                "plain": theirs.step,
                "ours": lambda ours=ours: strategy.precision_plugin.step(ours),
            }
            self.found[name] = take_turns(variants, self._rounds, time.thread_time)


def job(zero: int, numel: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every step, by optimizer and variant."""
    timing = Timing(rounds)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegatronStrategy(zero=zero),
        max_steps=1,
        callbacks=[timing],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Many(numel), torch.utils.data.DataLoader(torch.zeros(8, 1)))
    return timing.found


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=300, steps=1)
    rows = []
    with WorkerPool(2, timeout=600) as pool:
        for zero in (1, 3):
            for numel in (128, 8192):
                times = pool.run(2, job, zero, numel, options.rounds)[0]
                for name, found in times.items():
                    middle = {variant: statistics.median(t) for variant, t in found.items()}
                    rows.append(
                        {
                            "zero": zero,
                            "optimizer": name,
                            "elements of a part": numel // 2,
                            **{f"{v} (ms)": round(1e3 * t, 3) for v, t in middle.items()},
                            "ours / plain": ratio(found["ours"], found["plain"]),
                            "target": TARGET,
                        }
                    )
    report("optimizer", f"Optimizer step on {COUNT} parameters, dp=2", rows, options.output)


if __name__ == "__main__":
    main()
