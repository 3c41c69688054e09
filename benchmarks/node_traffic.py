"""Bytes that a node sends to another in a step: by formula, by the metric, and on the interface.

Four processes train a small transformer on two machines made of namespaces (`tests.machines`), two
on each. Per node and step, in MiB, the mean of both nodes:

* *formula*: what the collectives, or messages, have to send; ``W`` are the bytes of the weights,
  ``A`` those of the activations of a batch between two stages;
* *metric*: ``comm/inter_node_mib`` of `CommunicationMonitor`, all axes, times the ranks of a node;
* *interface*: what ``eth0`` has sent, headers and acknowledgements included. gloo's reduce-scatter
  is an all-reduce, which sends twice what the formula says.

Needs root, `ip` and `unshare`; without them it says so, and measures nothing.

    python -m benchmarks.node_traffic [--steps 10]
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.harness import Model, Tokens, parser, report
from lightning_megatron import CommunicationMonitor, MegatronStrategy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.parallel.plan import PipelineConfig
from lightning_megatron.zero.data_parallel import ShardingConfig

NODES, PER_NODE = 2, 2
CONFIG = TransformerConfig(hidden_size=256, num_layers=4, num_heads=8)
BATCH, LENGTH = 8, 128
MIB = 1 << 20
ACTIVATIONS = BATCH * LENGTH * CONFIG.hidden_size * 4 / MIB
"""MiB of a batch between two stages."""
WARMUP = 2
_LIMIT_S = 300.0


@dataclass(frozen=True)
class Variant:
    """A layout and what it has to send."""

    layout: dict[str, Any]
    words: str
    """The formula."""
    formula: Callable[[float], float]
    """MiB that a node sends, from MiB of weights."""
    dp: int = field(default=4)


VARIANTS = {
    "zero 0, flat": Variant({"zero": 0}, "all-reduce by a ring, 2 W 3/4", lambda w: 1.5 * w),
    "zero 1, flat": Variant(
        {"zero": 1},
        "reduce-scatter and all-gather by a ring, 3/4 W each",
        lambda w: 1.5 * w,
    ),
    "zero 3, flat": Variant(
        {"zero": 3},
        "reduce-scatter and two all-gathers by a ring, 3/4 W each",
        lambda w: 2.25 * w,
    ),
    "zero 1, HSDP": Variant(
        {"zero": ShardingConfig(stage=1, dp_replicate=2)},
        "all-reduce of W/2 by each rank, W",
        lambda w: w,
    ),
    "zero 3, HSDP": Variant(
        {"zero": ShardingConfig(stage=3, dp_replicate=2)},
        "all-reduce of W/2 by each rank, W",
        lambda w: w,
    ),
    "pp 2 across, tp 2 inside, whole": Variant(
        {"pp": PipelineConfig(degree=2, scatter_gather=False), "tp": 2},
        "activations, by each tp rank, 2 A",
        lambda _: 2 * ACTIVATIONS,
        dp=1,
    ),
    "pp 2 across, tp 2 inside, in parts": Variant(
        {"pp": 2, "tp": 2},
        "activations, once, A",
        lambda _: ACTIVATIONS,
        dp=1,
    ),
}


class Interface(pl.Callback):
    """Reads what the network card has sent, when all ranks have ended a step."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done = steps, 0
        self.bytes_per_step = 0.0
        self._begin = 0

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._done += 1
        if self._done == WARMUP:
            dist.barrier()
            self._begin = sent_bytes()
        elif self._done == WARMUP + self._steps:
            dist.barrier()
            self.bytes_per_step = (sent_bytes() - self._begin) / self._steps


def sent_bytes(interface: str = "eth0") -> int:
    """Bytes that a network interface of this namespace has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise RuntimeError(f"no interface {interface}")


def train(variant: Variant, steps: int) -> dict[str, float]:
    """MiB per step that this rank's node, or this rank, has sent."""
    monitor, interface = CommunicationMonitor(every=WARMUP + steps), Interface(steps)
    module = Model(CONFIG)
    weights = sum(p.numel() * p.element_size() for p in module.parameters()) / MIB
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=PER_NODE,
        num_nodes=NODES,
        strategy=MegatronStrategy(**variant.layout),
        max_steps=WARMUP + steps,
        callbacks=[monitor, interface],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = Tokens(BATCH * (WARMUP + steps), LENGTH, CONFIG.vocab_size)
    trainer.fit(module, DataLoader(data, batch_size=BATCH // variant.dp))
    metric = sum(v for k, v in monitor.latest.items() if k.startswith("comm/inter_node_mib/"))
    return {
        "weights": weights,
        "metric": PER_NODE * float(metric),
        "interface": interface.bytes_per_step / MIB,
    }


def work(steps: int) -> None:
    """One rank of all variants, one after the other."""
    torch.set_num_threads(1)
    for name, variant in VARIANTS.items():
        found = train(variant, steps)
        print("FOUND " + json.dumps({"variant": name, **found}), flush=True)


def launch(steps: int, only: str) -> list[dict[str, Any]]:
    """Run the ranks on machines of their own; what they found."""
    from tests.machines import Machines

    with Machines(NODES, limit_s=_LIMIT_S) as machines:
        runs = []
        for rank in range(NODES * PER_NODE):
            node, local = divmod(rank, PER_NODE)
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "GROUP_RANK": str(node),
                "GROUP_WORLD_SIZE": str(NODES),
                "WORLD_SIZE": str(NODES * PER_NODE),
                "LOCAL_WORLD_SIZE": str(PER_NODE),
                "MASTER_ADDR": machines[0].address,
                "MASTER_PORT": "29511",
                "TORCHELASTIC_RUN_ID": "node-traffic",
            }
            command = [sys.executable, "-m", "benchmarks.node_traffic", "--rank"]
            command += ["--steps", str(steps), "--only", only]
            runs.append(machines[node].start(command, env=env, cwd=Path.cwd()))
        deadline = time.monotonic() + _LIMIT_S
        while any(run.code is None for run in runs) and not any(run.code for run in runs):
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(run.output[-3000:] for run in runs))
            time.sleep(0.1)
        found = []
        for rank, run in enumerate(runs):
            if run.code:
                raise RuntimeError(f"rank {rank} ended with {run.code}:\n{run.output[-5000:]}")
        for rank, run in enumerate(runs):
            output = run.output
            if rank % PER_NODE == 0:
                lines = [line for line in output.splitlines() if line.startswith("FOUND ")]
                found += [json.loads(line.removeprefix("FOUND ")) for line in lines]
    return found


def row(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """A line of the table, from what the first rank of every node has found."""
    mine = [one for one in found if one["variant"] == name]
    mean = {key: sum(one[key] for one in mine) / len(mine) for key in mine[0] if key != "variant"}
    variant = VARIANTS[name]
    formula = variant.formula(mean["weights"])
    unit, of = ("W", mean["weights"]) if variant.dp > 1 else ("A", ACTIVATIONS)
    return {
        "layout": name,
        "has to be sent": variant.words,
        "formula": f"{formula:.2f}",
        "metric": f"{mean['metric']:.2f}",
        "interface": f"{mean['interface']:.2f}",
        "interface / formula": f"{mean['interface'] / formula:.2f}",
        "interface in units": f"{mean['interface'] / of:.2f} {unit}",
    }


def main() -> None:
    """Measure and write the table."""
    made = parser(__doc__, steps=10)
    made.add_argument("--only", default="", help="part of the names of variants")
    made.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = made.parse_args()
    for name in [name for name in VARIANTS if options.only not in name]:
        del VARIANTS[name]
    if options.rank:
        work(options.steps)
        return
    from tests.machines.machine import missing

    if missing():
        print(f"nothing was measured: this machine lacks {missing()}")
        return
    found = launch(options.steps, options.only)
    title = f"MiB a step from node to node, {NODES} nodes of {PER_NODE} ranks"
    report("node_traffic", title, [row(name, found) for name in VARIANTS], options.output)


if __name__ == "__main__":
    main()
