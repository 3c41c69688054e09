"""Slow ranks of every kind: in how many windows they are named, and who else is.

    python -m benchmarks.slow_rank [--ranks 2] [--windows 20]      # about 2 minutes

The last rank loses time in one way for a whole run. A window is right if its score lies below the
threshold in the section where it loses the time (target: 0.95 of the windows), and wrong if that of
anything else does (target: 0.01, in runs without a slow rank as well). What is announced takes two
windows in a row. A slow collective is one whose messages the rank is late to hand over: it loses
the time in the section that the collective is in.
"""

import os
import time
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks.harness import parser, report
from lightning_megatron import MegatronStrategy, SlowRankDetector
from lightning_megatron.testing import WorkerPool

WIDTH, BATCH, WINDOW, THRESHOLD = 64, 4, 20, 0.7
STEP_S, MORE_S = 0.012, 0.010
TWICE = "the same work twice"
KINDS: dict[str, str] = {
    "nothing": "",
    "+10 ms in the forward": "forward",
    TWICE: "forward",
    "+10 ms in the backward": "backward",
    "a slow loader": "data",
    "a slow collective": "backward",
}
"""What is done to the last rank, and where it loses the time."""


def spin(seconds: float) -> None:
    """Work of a given length, as far as this thread gets to do it."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.ones(500).sum()


class Slow(Dataset[Tensor]):
    """Samples, each of which takes a while."""

    def __init__(self, count: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self._seconds / BATCH)
        return torch.zeros(WIDTH)


class Model(pl.LightningModule):
    """Takes 12 ms a step, and on one rank something more.

    Asleep, as what the processor does beside would else decide who is slow; but for one kind.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = nn.Linear(WIDTH, WIDTH), kind

    @property
    def more(self) -> str:
        last = self.trainer.global_rank == self.trainer.world_size - 1
        return self.kind if last else ""

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._work()
        if self.more == "+10 ms in the forward":
            time.sleep(MORE_S)
        if self.more == TWICE:
            self._work()
        loss: Tensor = self.net(batch).square().mean()
        loss.register_hook(self._in_backward)  # type: ignore[no-untyped-call]
        return loss

    def _work(self) -> None:
        (spin if self.kind == TWICE else time.sleep)(STEP_S / 2)

    def _in_backward(self, gradient: Tensor) -> None:
        self._work()
        if self.more == "+10 ms in the backward":
            time.sleep(MORE_S)

    @override
    def on_after_backward(self) -> None:
        if self.more == "a slow collective":
            time.sleep(MORE_S)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Windows(pl.Callback):
    """What each window shows.

    Args:
        detector: who looks; stands before this in the Trainer's list.
        section: where the last rank loses time; empty for none.
    """

    def __init__(self, detector: SlowRankDetector, section: str) -> None:
        self._detector, self._section, self._seen = detector, section, detector.latest
        self.count = self.right = self.wrong = 0

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        latest = self._detector.latest
        if latest is self._seen:
            return
        self._seen = latest
        slow = {(s.rank, s.section) for s in latest if s.score < THRESHOLD}
        culprit = (trainer.world_size - 1, self._section)
        self.count += 1
        self.right += culprit in slow
        self.wrong += bool(slow - {culprit})


def job(kind: str, windows: int) -> Mapping[str, Any]:
    """Train with one kind of slowness; the same on every rank."""
    section = KINDS[kind]
    detector = SlowRankDetector(window=WINDOW, threshold=THRESHOLD)
    seen = Windows(detector, section)
    steps = 1 + windows * WINDOW
    trainer = pl.Trainer(
        strategy=MegatronStrategy(zero=0),
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=steps,
        callbacks=[detector, seen],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    slow = kind == "a slow loader" and trainer.global_rank == trainer.world_size - 1
    data = Slow(BATCH * steps * trainer.world_size, MORE_S if slow else 0.0)
    trainer.fit(Model(kind), DataLoader(data, batch_size=BATCH))
    announced = sorted({(s.rank, s.section) for s in detector.slow})
    return {
        "the last rank": kind,
        "named in": f"{seen.right} of {seen.count} windows" if section else "-",
        "others named in": f"{seen.wrong} of {seen.count}",
        "announced": ", ".join(f"rank {rank}: {where}" for rank, where in announced) or "nobody",
    }


def main() -> None:
    """Run and report."""
    made = parser(__doc__, steps=0)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--windows", type=int, default=20)
    options = made.parse_args()
    rows = []
    with WorkerPool(options.ranks, timeout=900) as pool:
        for kind in KINDS:
            windows = options.windows * (1 if KINDS[kind] else 3)
            rows.append({"ranks": options.ranks, **pool.run(options.ranks, job, kind, windows)[0]})
            print(rows[-1], flush=True)
    report("slow_rank", "Slow ranks, by windows of 20 steps", rows, options.output)


if __name__ == "__main__":
    main()
