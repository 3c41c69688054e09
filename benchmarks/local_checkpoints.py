"""What local checkpoints cost and save, against shared ones that are written in the background.

Four processes train linear layers with AdamW under ``zero=1``, as two machines with two processes
each: each machine's directory in memory is its own. A shared checkpoint (asynchronous, to the
disk) and a local one are made in turn, six steps apart, each when the one before it stands. *Stall*
is the time that training waits, *duration* that until it stands, the first of both left out; *sent*
is what goes from machine to machine for each. Then runs go on from what there is: with both
machines, with one that comes back empty, and from the shared checkpoint alone. *Restore* is from
the search to the last value in its place, all hashes compared, as the slowest rank saw it; the
median of the rounds.

    python -m benchmarks.local_checkpoints [--rounds 3] [--steps 60]
"""

import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.harness import arguments, report
from lightning_megatron import CheckpointConfig, LocalCheckpointConfig, MegatronStrategy
from lightning_megatron.checkpoint.directory.manifest import read_manifest
from lightning_megatron.testing import WorkerPool

WORLD, INTERVAL, WIDTH = 4, 12, 1024
LAYERS = (5, 11, 21)
"""Of 12 MiB each with the state of AdamW."""
NODES = (0, 0, 1, 1)


class Layers(pl.LightningModule):
    """Much state and little work."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.net(batch[0])
        return out.square().mean()

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Timed(MegatronStrategy):
    """Takes the time of a restore."""

    restore_s = 0.0

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._began = time.perf_counter()
        return super().load_checkpoint(*args, **kwargs)

    @override
    def load_model_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super().load_model_state_dict(*args, **kwargs)
        self.restore_s = time.perf_counter() - self._began


class Turns(pl.Callback):
    """Notes what saves take, lets each end before the next step, and ends the run at its crash."""

    def __init__(self, crash: int) -> None:
        self.crash = crash
        self.found: dict[str, list[dict[str, Any]]] = defaultdict(list)

    @override
    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        trainer.strategy.events.follow(lambda event: self.found[event["kind"]].append(event))

    @override
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.checkpoints.saver.drain()
        trainer.strategy.checkpoints.local.run.drain()
        if trainer.global_step >= self.crash:
            raise KeyError

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % INTERVAL == INTERVAL // 2:
            directory = Path(trainer.default_root_dir)
            trainer.save_checkpoint(directory / f"{trainer.global_step}.ckpt")
            previous = directory / f"{trainer.global_step - INTERVAL}.ckpt"
            if previous.exists():
                trainer.strategy.remove_checkpoint(previous)


def run(root: Path, layers: int, crash: int, *, local: bool = True) -> tuple[Turns, float]:
    """Train until the crash, from the newest checkpoint on; what was noted, and the restore."""
    rank = int(os.environ["RANK"])
    os.environ["NODE_DISK"] = str(root / f"node{NODES[rank]}")
    options = LocalCheckpointConfig(every_n_steps=INTERVAL, directory="$NODE_DISK")
    config = CheckpointConfig(mode="async", local=options)
    if not local:
        shutil.rmtree(root / f"node{NODES[rank]}", ignore_errors=True)
    strategy = Timed(zero=1, checkpoint=config)
    turns = Turns(crash)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy=strategy,
        max_epochs=-1,
        max_steps=10**6,
        callbacks=[turns],
        default_root_dir=os.environ["SHARED_DISK"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(64, WIDTH)), batch_size=2)
    try:
        trainer.fit(Layers(layers), loader, ckpt_path="auto")
    except KeyError:
        strategy.checkpoints.close()
    return turns, strategy.restore_s


def sent(root: Path) -> int:
    """Bytes of one local checkpoint that were copied from one machine to the other."""
    [path, *_] = sorted((root / "node0").glob("*/step=*.ckpt"), reverse=True)
    own = ("__", "manifest.")
    return sum(e.size for name, e in read_manifest(path).files.items() if name.startswith(own))


def job(rounds: int, steps: int, layers: int, memory: Path, disk: Path) -> dict[str, list[float]]:
    """Figures of one size on this rank."""
    found: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds):
        root = memory / f"{layers}-{turn}"
        os.environ["SHARED_DISK"] = str(disk / f"{layers}-{turn}")
        turns, _ = run(root, layers, steps)
        for kind, name in (("save", "shared"), ("local_save", "local")):
            own = turns.found[kind]
            for event in own[1:]:
                found[f"{name} stall"].append(event["stall"])
                found[f"{name} duration"].append(event["seconds"])
            found["bytes"].append(own[-1]["bytes"])
        found["sent"].append(sent(root))
        torch.distributed.barrier()
        found["both"].append(run(root, layers, steps)[1])
        if os.environ["RANK"] == "0":
            shutil.rmtree(root / "node1")
        torch.distributed.barrier()
        found["one"].append(run(root, layers, steps)[1])
        torch.distributed.barrier()
        found["shared"].append(run(root, layers, steps, local=False)[1])
    return dict(found)


def rows_of(layers: int, by_rank: Sequence[Mapping[str, list[float]]]) -> list[dict[str, Any]]:
    """One row for each way of saving and of restoring."""

    def slowest(name: str) -> float:
        return max(statistics.median(times[name]) for times in by_rank)

    size = round(by_rank[0]["bytes"][0] / 2**20)
    rows: list[dict[str, Any]] = []
    for name in ("shared", "local"):
        rows.append(
            {
                "MiB": size,
                "what": f"save, {name}",
                "stall (ms)": round(1e3 * slowest(f"{name} stall"), 1),
                "duration (ms)": round(1e3 * slowest(f"{name} duration")),
                "sent (MiB)": round(by_rank[0]["sent"][0] / 2**20) if name == "local" else 0,
            }
        )
    for name, what in (
        ("shared", "restore, shared"),
        ("both", "restore, local, both machines"),
        ("one", "restore, local, one came back empty"),
    ):
        rows.append(
            {
                "MiB": size,
                "what": what,
                "stall (ms)": "",
                "duration (ms)": round(1e3 * slowest(name)),
                "sent (MiB)": "",
            }
        )
    return rows


def main() -> None:
    """Run and report."""
    options = arguments(__doc__, rounds=3, steps=60)
    rows = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
        tempfile.TemporaryDirectory() as disk,
        WorkerPool(WORLD, timeout=1200) as pool,
    ):
        for layers in LAYERS:
            arguments_of = (options.rounds, options.steps, layers, Path(memory), Path(disk))
            rows += rows_of(layers, pool.run(WORLD, job, *arguments_of))
    title = f"Local checkpoints on two machines with {WORLD // 2} processes each, zero=1"
    report("local_checkpoints", title, rows, options.output)


if __name__ == "__main__":
    main()
