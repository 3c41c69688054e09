"""A machine is lost with all that it had in memory, and the other goes on from its copies."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.machines import Machines, needs_machines
from tests.machines.machine import Run

pytestmark = [needs_machines, pytest.mark.thorough, pytest.mark.timeout(1800)]

STEPS = 12


def launch(machines: Machines, nodes: str, pace_s: float) -> list[Run]:
    """torchrun with its rendezvous on the first machine, on each."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
    command += [f"--nnodes={nodes}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=one"]
    command += [f"--rdzv-endpoint={machines[0].address}:29511", "--rdzv-conf=last_call_timeout=3"]
    job = ["-m", "tests.machines.local_job", str(STEPS), str(pace_s)]
    return [
        machine.start(
            [*command, f"--local-addr={machine.address}", *job],
            env={"GLOO_SOCKET_IFNAME": "eth0"},
        )
        for machine in machines
    ]


def test_a_machine_is_lost(tmp_path: Path) -> None:
    """No step is done again but the one in which it was lost."""
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    with Machines(1, whole) as machines:
        [run] = launch(machines, "1:1", 0.0)
        assert run.wait()[0] == 0, run.output[-5000:]
    with Machines(2, lost) as machines:
        first, second = launch(machines, "1:2", 0.5)
        first.wait_for("step 5 of 2 ranks")
        machines[1].close()
        code, output = first.wait()
    assert code == 0, output[-8000:]
    steps = [(int(step), int(ranks)) for step, ranks in re.findall(r"step (\d+) of (\d) r", output)]
    before = [step for step, ranks in steps if ranks == 2]
    after = [step for step, ranks in steps if ranks == 1]
    [(kept, where)] = re.findall(
        r"Going on from the local checkpoint of step (\d+) \((\S+)\)", output
    )
    assert where.startswith("/dev/shm/lightning_megatron-0/")  # as both see the same /tmp
    assert after == list(range(int(kept) + 1, STEPS + 1))
    assert before[-1] - int(kept) <= 1
    assert "finished, [] left" in output
    ours, theirs = (torch.load(folder / "weights.pt") for folder in (lost, whole))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-13)


PREPARE = """
import os, sys
import torch.distributed as dist
from lightning_megatron.checkpoint.directory.discovery import Places
from lightning_megatron.checkpoint.config import LocalCheckpointConfig
from lightning_megatron.checkpoint.local.run import LocalRun
from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import ConfigError

dist.init_process_group("gloo")
for directory in (None, sys.argv[1], sys.argv[2]):
    try:
        run = LocalRun(LocalCheckpointConfig(directory=directory), Places(), Peers(), Peers())
        print(run.nodes.of_rank, *run._bases)
    except ConfigError as error:
        print(error)
dist.destroy_process_group()
"""


def test_a_directory_that_all_machines_see_is_on_none(tmp_path: Path) -> None:
    """By default it is not used; where it was asked for, that is said.

    Kernels of machines differ by their boot id, those of namespaces do not; so each gets another.
    """
    shared, own = tmp_path / "shared", tmp_path / "own"
    with Machines(2, tmp_path / "machines", private=[own]) as machines:
        for machine in machines:
            (tmp_path / machine.name).write_text(f"boot of {machine.name}")
            boot_id = "/proc/sys/kernel/random/boot_id"
            machine.run(["mount", "--bind", str(tmp_path / machine.name), boot_id])
        runs = [
            machine.start(
                [sys.executable, "-c", PREPARE, str(shared), str(own)],
                env={
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "MASTER_ADDR": machines[0].address,
                    "MASTER_PORT": "29512",
                    "WORLD_SIZE": "2",
                    "RANK": str(machine.index),
                },
            )
            for machine in machines
        ]
        outputs = [run.wait() for run in runs]
    lines = [[line for line in o.splitlines() if "[c10d]" not in line] for _, o in outputs]
    assert lines[0] == lines[1]
    by_default, asked, fine = lines[0]
    assert by_default == "(0, 1) /dev/shm/lightning_megatron-0"
    assert asked == (
        f"checkpoint.local.directory={str(shared)!r}: several machines see the same {shared}, "
        "and each machine needs its own; nearest valid: directory='/local/disk', a disk of each "
        "machine"
    )
    assert fine == f"(0, 1) {own}"
