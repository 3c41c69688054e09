"""Data parallelism in two processes against DDP, raw and under Lightning, and against FSDP2.

All runs take turns step by step (`benchmarks.turns`). Ratios are medians over rounds of the slower
rank's step, by the wall clock and by the processor time of a rank, both ranks' mean.

ZeRO 0, 1 and 2 against ``DDPStrategy`` (target: at most 1.00 for the medium and wide model, 1.05
for the small one) and against a plain loop around ``DistributedDataParallel`` (1.02, small 1.05);
ZeRO 3 against ``ModelParallelStrategy`` with FSDP2 applied to every block and the root, as
Lightning's documentation shows it (target: at most 1.0). Where the package ``deepspeed`` is
installed (on CPUs with ``DS_ACCELERATOR=cpu``), ZeRO 1 and 2 also against its ZeRO 1 (below 1.0).

    python -m benchmarks.data_parallel [--rounds 100] [--sizes small medium wide]
"""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import Model, parser, ratio_and_error, report
from benchmarks.turns import Turn, runs_in_turns
from lightning_megatron import MegatronStrategy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.testing import WorkerPool

WORLD = 2
SIZES = {
    "small": (TransformerConfig(hidden_size=64, num_layers=4, num_heads=4), 4, 32),
    "medium": (TransformerConfig(hidden_size=256, num_layers=4, num_heads=8), 4, 64),
    "wide": (TransformerConfig(hidden_size=512, num_layers=2, num_heads=8), 4, 64),
}
"""Model, batch size of a rank and sequence length."""
OURS = ("zero 0", "zero 1", "zero 2")
PEERS = {"Lightning DDP": 1.00, "raw DDP": 1.02}
"""Targets for the ratio; 1.05 for the small model."""

Step = dict[str, dict[str, list[float]]]


class ShardedByUser(Model):
    """The peer's way: the user applies FSDP2 in ``configure_model``."""

    @override
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.trunk.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.trunk, mesh=mesh)


def trained(module: pl.LightningModule, strategy: Callable[[], Any], turn: Turn) -> None:
    """Train for as long as there are turns."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        strategy=strategy(),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(turn, batch_size=None))


def raw_ddp(module: Model, turn: Turn) -> None:
    """A loop of one's own."""
    wrapped = DistributedDataParallel(module.trunk)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for tokens, targets in turn:
        optimizer.zero_grad()
        module.loss(wrapped(tokens), targets).backward()
        optimizer.step()


def deepspeed_zero_1(module: Model, turn: Turn) -> None:
    """A loop around DeepSpeed's engine, with torch's optimizer."""
    import deepspeed

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=module.trunk, optimizer=optimizer, config=config)
    for tokens, targets in turn:
        engine.backward(module.loss(engine(tokens), targets))
        engine.step()


def job(size: str, rounds: int) -> Step:
    """Seconds of all runs on this rank."""
    config, batch_size, length = SIZES[size]
    tokens = torch.randint(256, (batch_size, length + 1))
    fsdp2 = partial(
        pl.strategies.ModelParallelStrategy, data_parallel_size=WORLD, tensor_parallel_size=1
    )
    runs: dict[str, Callable[[Turn], None]] = {
        f"zero {zero}": partial(trained, Model(config), partial(MegatronStrategy, zero=zero))
        for zero in (0, 1, 2, 3)
    }
    runs["Lightning DDP"] = partial(trained, Model(config), pl.strategies.DDPStrategy)
    runs["FSDP2"] = partial(trained, ShardedByUser(config), fsdp2)
    runs["raw DDP"] = partial(raw_ddp, Model(config))
    if find_spec("deepspeed"):
        runs["DeepSpeed ZeRO 1"] = partial(deepspeed_zero_1, Model(config))
    return runs_in_turns(runs, (tokens[:, :-1], tokens[:, 1:]), rounds)


def compare(size: str, by_rank: Sequence[Step]) -> list[dict[str, Any]]:
    """A row for each of ours and each peer of it."""
    names = by_rank[0].keys()
    ranks = range(len(by_rank))

    def steps(name: str, clock: str) -> list[tuple[float, ...]]:
        return list(zip(*(by_rank[r][name][clock] for r in ranks), strict=True))

    wall = {name: [max(times) for times in steps(name, "wall")] for name in names}
    processor = {
        name: [sum(times) / len(times) for times in steps(name, "processor")] for name in names
    }

    def row(ours: str, peer: str, target: float) -> dict[str, Any]:
        middle = sorted(wall[peer])[len(wall[peer]) // 2]
        return {
            "model": size,
            "ours": ours,
            "peer": peer,
            "peer (ms)": round(1e3 * middle, 2),
            "ratio, wall": ratio_and_error(wall[ours], wall[peer]),
            "ratio, processor": ratio_and_error(processor[ours], processor[peer]),
            "target": 1.05 if size == "small" and peer != "FSDP2" else target,
        }

    pairs = [row(ours, peer, target) for ours in OURS for peer, target in PEERS.items()]
    if "DeepSpeed ZeRO 1" in names:
        pairs += [row(ours, "DeepSpeed ZeRO 1", 1.0) for ours in OURS[1:]]
    return [*pairs, row("zero 3", "FSDP2", 1.0)]


def options() -> argparse.Namespace:
    """What the command line says."""
    made = parser(__doc__, steps=1)
    made.add_argument("--rounds", type=int, default=100, help="steps of every run")
    made.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    return made.parse_args()


def main() -> None:
    """Run and report."""
    given = options()
    rows = []
    for size in given.sizes:
        with WorkerPool(WORLD, timeout=1800) as pool:
            rows += compare(size, pool.run(WORLD, job, size, given.rounds))
        report("data_parallel", f"Step time with dp={WORLD}", rows, given.output)


if __name__ == "__main__":
    main()
