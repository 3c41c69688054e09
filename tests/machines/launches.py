"""Starts `tests.machines.job` on machines, and reads what it leaves behind."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.machines.machine import Machine, Machines, Run

PORT = 29511


def lightning(machines: Machines, **options: Any) -> list[Run]:
    """Lightning's own launch, one process a device: a run for each machine."""
    options = {"nodes": len(machines), **options}
    return [
        machine.start(
            [sys.executable, "-m", "tests.machines.job", json.dumps(options)],
            env={
                "MASTER_ADDR": machines[0].address,
                "MASTER_PORT": str(PORT),
                "NODE_RANK": str(machine.index),
            },
        )
        for machine in machines
    ]


STORE = (
    "import time; from torch.distributed import TCPStore; "
    "store = TCPStore('0.0.0.0', 29400, is_master=True, wait_for_workers=False); time.sleep(1e9)"
)
"""A program that holds torchrun's store on a machine of its own, as in `FaultTolerance`."""


def torchrun(
    machines: list[Machine], nodes: str, endpoint: str, *more: str, **options: Any
) -> list[Run]:
    """torchrun with a rendezvous at ``endpoint``, on each machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
    command += [f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=one"]
    command += [f"--rdzv-endpoint={endpoint}", *more]
    job = ["-m", "tests.machines.job", json.dumps(options)]
    return [
        machine.start(
            [*command, f"--local-addr={machine.address}", *job],
            env={"GLOO_SOCKET_IFNAME": "eth0"},
        )
        for machine in machines
    ]


def steps(run: Run) -> list[tuple[int, int, float]]:
    """World size, step and time of what the run's first rank has done."""
    found = re.findall(r"rank \d+ of (\d+), step (\d+) done at ([\d.]+)", run.output)
    return [(int(world), int(step), float(at)) for world, step, at in found]


def attempts(folder: Path) -> str:
    """What the records of the attempts say."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("attempts/*.json")))
