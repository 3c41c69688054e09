"""Ranks that die where no other process of their machine sees it are named all the same."""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.machines import Machines, Run, needs_machines

pytestmark = [needs_machines, pytest.mark.thorough, pytest.mark.timeout(1800)]

GONE = "does not answer: it was killed, or its machine is off or cut off"


def begin(
    machines: Machines, devices: int = 1, *launcher: str, slow: int | None = None
) -> list[Run]:
    """A run in which all ranks have begun step 4."""
    runs = []
    for machine in machines:
        env = {
            "MASTER_ADDR": machines[0].address,
            "MASTER_PORT": "29517",
            "GLOO_SOCKET_IFNAME": "eth0",
            "DEPARTING": f"slow={slow}",
        }
        if not launcher:
            env["NODE_RANK"] = str(machine.index)
        where = [f"--node-rank={machine.index}"] if launcher else []
        job = ["-m", "tests.machines.departing", str(len(machines)), str(devices)]
        runs.append(machine.start([sys.executable, *launcher, *where, *job], env=env))
    for run in runs:
        run.wait_for("begins step 4")
    return runs


def causes(runs: list[Run]) -> list[str]:
    """What the runs say that the cause is; all of them fail."""
    ended = [run.wait() for run in runs]
    assert all(code for code, _ in ended)
    return re.findall(r"=== root cause: (.*) ===", "".join(text for _, text in ended))


def test_the_only_rank_of_a_node(tmp_path: Path) -> None:
    with Machines(2, tmp_path) as machines:
        runs = begin(machines)
        runs[1].signal(signal.SIGKILL)
        [cause] = causes(runs[:1])
        assert cause == f"rank 1 (node1, 10.77.0.2, process {runs[1].pid}) {GONE}"
        assert f"SECONDARY FAILURE (root cause: {cause})" in runs[0].output


def test_rank_0_which_holds_the_store(tmp_path: Path) -> None:
    with Machines(2, tmp_path) as machines:
        runs = begin(machines)
        runs[0].signal(signal.SIGKILL)
        [cause] = causes(runs[1:])
    assert cause.startswith(
        f"rank 0 (node0, process {runs[0].pid}) has gone, and with it the store"
    )


def test_nobody_is_blamed_for_noticing_late(tmp_path: Path) -> None:
    """Rank 1 is busy for ten seconds when rank 2 dies; when it looks, rank 0 has ended as well."""
    with Machines(4, tmp_path) as machines:
        runs = begin(machines, slow=1)
        for run in (runs[0], runs[3]):
            run.wait_for("begins step 5")
        runs[2].signal(signal.SIGKILL)
        found = causes([runs[0], runs[3], runs[1]])
    assert found[0] == f"rank 2 (node2, 10.77.0.3, process {runs[2].pid}) {GONE}"
    assert all("with it the store that would tell" in late for late in found[1:])


def test_all_processes_of_a_node(tmp_path: Path) -> None:
    with Machines(2, tmp_path) as machines:
        runs = begin(machines, 2)
        machines[1].signal_all(signal.SIGKILL)
        [cause] = causes(runs[:1])
    assert cause == (
        "node1 (10.77.0.2; ranks 2, 3) does not answer: its processes were killed, or it "
        "is off or cut off"
    )


def test_torchrun_repeats_it(tmp_path: Path) -> None:
    with Machines(2, tmp_path) as machines:
        launcher = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        launcher += ["--master-addr=10.77.0.1", "--master-port=29518"]
        runs = begin(machines, 1, *launcher)
        machines[1].signal_all(signal.SIGKILL)
        causes(runs[:1])
    said = rf"rank 1 \(node1, 10.77.0.2, process \d+\) {GONE}"
    assert re.search(said, runs[0].output.partition("Root Cause")[2])
