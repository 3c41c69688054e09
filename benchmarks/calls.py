"""Calls of Python functions in a training step, against the peers' of `benchmarks.data_parallel`.

A small step takes as long as its calls, most of all those made for each parameter. Their number is
the same on every machine and under any load; seconds are in `benchmarks.overhead` and
`benchmarks.data_parallel`. Every run is counted from the end of a batch to the end of a later one
on rank 0, so with reading the batches.

    python -m benchmarks.calls [--steps 10] [--names 30]

Of each run of ours the functions are printed that are called oftener than under its peer.
"""

import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.data_parallel import ShardedByUser
from benchmarks.harness import WARMUP, Model, Tokens, parser, report
from benchmarks.overhead import SIZES
from lightning_megatron import MegatronStrategy
from lightning_megatron.testing import WorkerPool

RUNS = {
    "one process": (1, "zero 1", "Lightning"),
    "zero 0": (2, "zero 0", "DDP"),
    "zero 1": (2, "zero 1", "DDP"),
    "zero 2": (2, "zero 2", "DDP"),
    "zero 3": (2, "zero 3", "FSDP2"),
}
"""Processes, ours and the peer."""


class Counted(pl.Callback):
    """Counts the calls of the steps after some others.

    Args:
        steps: how many are counted.
    """

    def __init__(self, steps: int) -> None:
        self._last = WARMUP + steps
        self.calls: Counter[str] = Counter()
        """Of each function, by file and name."""

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == WARMUP:
            sys.setprofile(self._note)
        elif trainer.global_step == self._last:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            code = frame.f_code
            self.calls[f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"] += 1


def strategy_of(name: str) -> Any:
    """The strategy of this name in `RUNS`."""
    strategies = pl.strategies
    if name == "FSDP2":
        return strategies.ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    if name == "DDP":
        return strategies.DDPStrategy()
    if name == "Lightning":
        return strategies.SingleDeviceStrategy("cpu")
    return MegatronStrategy(zero=int(name[-1]))  # type: ignore[arg-type]


def job(name: str, steps: int) -> dict[str, float]:
    """Calls of each function in a step of the small model on this rank."""
    config, batch_size, length = SIZES["small"]
    counted, world = Counted(steps), int(os.environ.get("WORLD_SIZE", "1"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy_of(name),
        max_steps=WARMUP + steps + 1,
        callbacks=[counted],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Tokens(batch_size * (WARMUP + steps + 1) * world, length, config.vocab_size)
    module = (ShardedByUser if name == "FSDP2" else Model)(config)
    trainer.fit(module, DataLoader(data, batch_size=batch_size))
    return {function: calls / steps for function, calls in counted.calls.items()}


def compare(pool: WorkerPool, run: str, steps: int) -> tuple[dict[str, Any], dict[str, float]]:
    """A row of the table, and by how much a function is called oftener than under the peer."""
    world, ours, peer = RUNS[run]
    mine, theirs = (pool.run(world, job, name, steps)[0] for name in (ours, peer))
    more = {function: calls - theirs.get(function, 0.0) for function, calls in mine.items()}
    row = {
        "run": run,
        "peer": peer,
        "calls": round(sum(mine.values())),
        "calls of the peer": round(sum(theirs.values())),
    }
    return row, more


def main() -> None:
    """Run and report."""
    made = parser(__doc__, steps=10)
    made.add_argument("--names", type=int, default=0, help="functions that are printed of each run")
    given = made.parse_args()
    rows = []
    for run, (world, _, _) in RUNS.items():
        with WorkerPool(world, timeout=600) as pool:
            row, more = compare(pool, run, given.steps)
        rows.append(row)
        for function, calls in Counter(more).most_common(given.names):
            print(f"{run}: {calls:8.1f} {function}")
    report("calls", "Calls of Python functions in a step of the small model", rows, given.output)


if __name__ == "__main__":
    main()
