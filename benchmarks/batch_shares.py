"""Unequal parts of the batch: samples per second with a rank that is half as fast.

    python -m benchmarks.batch_shares [--ranks 2] [--steps 120]      # about 2 minutes

A sample takes a rank 5 ms, and the last rank 10 ms: the time of ``--slowdown`` 2. The ranks sleep
that long, half of it in the forward and half in the backward, as a processor that ranks share
would decide who is slow. Everything else of a step is real: the loader, ZeRO 1 over gloo, what is
measured and exchanged. Kinds of parts take turns, round after round. A rate is the median over the
steps after ``--warmup``, which is time for two plans; the ratio is to equal parts. With ``r`` ranks
of which one takes ``s`` times as long, the best parts give ``(s * (r - 1) + 1) / r`` times the
samples per second of equal ones: 1.5 for two ranks and twice the time.
"""

import os
import statistics
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.harness import StepTimer, parser, report
from lightning_megatron import MeasuredShares, MegatronStrategy
from lightning_megatron.testing import WorkerPool

WIDTH, BATCH, SAMPLE_S, EVERY = 64, 12, 0.005, 20


class Model(pl.LightningModule):
    """A small network, whose samples take a given time.

    Args:
        slowdown: how many times as long they take on the last rank.
    """

    def __init__(self, slowdown: float) -> None:
        super().__init__()
        self.net, self.slowdown = nn.Linear(WIDTH, WIDTH), slowdown

    def _work(self, samples: int) -> None:
        last = self.trainer.global_rank == self.trainer.world_size - 1
        time.sleep(samples * SAMPLE_S / 2 * (self.slowdown if last else 1.0))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        [x] = batch
        self._work(len(x))
        out = self.net(x)
        out.register_hook(lambda _: self._work(len(x)))
        return torch.mean(out.square())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def job(shares: Any, steps: int, warmup: int, slowdown: float) -> dict[str, Any]:
    """Train; the samples per second of the job, and the parts at the end."""
    timer = StepTimer()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        strategy=MegatronStrategy(batch_shares=shares),
        accelerator="cpu",
        devices=ranks,
        max_steps=steps,
        callbacks=[timer],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.zeros(BATCH * ranks * steps, WIDTH))
    trainer.fit(Model(slowdown), DataLoader(data, batch_size=BATCH))
    planned: Any = trainer.strategy.data.shares.planned  # type: ignore[attr-defined]
    seconds = statistics.median(timer.seconds[warmup:])
    return {"samples_per_s": BATCH * ranks / seconds, "parts": planned or shares or "equal"}


def main() -> None:
    """Run and report."""
    made = parser(__doc__, steps=120)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--warmup", type=int, default=60)
    made.add_argument("--slowdown", type=float, default=2.0)
    options = made.parse_args()
    ranks, slowdown = options.ranks, options.slowdown
    kinds: dict[str, Any] = {
        "equal": None,
        "given": [slowdown] * (ranks - 1) + [1.0],
        "measured": MeasuredShares(every=EVERY),
    }
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with WorkerPool(ranks, timeout=900) as pool:
        for _ in range(options.rounds):
            for kind, shares in kinds.items():
                [one, *_] = pool.run(ranks, job, shares, options.steps, options.warmup, slowdown)
                found[kind].append(one)
                print(kind, one, flush=True)
    rows = [
        {
            "ranks": ranks,
            "slowdown of the last": slowdown,
            "batch_shares": kind,
            "parts at the end": str(runs[-1]["parts"]),
            "samples/s": round(statistics.median(run["samples_per_s"] for run in runs), 1),
            "times equal parts": round(
                statistics.median(
                    run["samples_per_s"] / equal["samples_per_s"]
                    for run, equal in zip(runs, found["equal"], strict=True)
                ),
                3,
            ),
        }
        for kind, runs in found.items()
    ]
    report("batch_shares", "Unequal parts of the batch, by shares", rows, options.output)


if __name__ == "__main__":
    main()
