"""Trainings that are started on two machines, rightly and wrongly.

What is wrong is said on every machine, before ``init_timeout_s``, which here is later than the end
of the test.
"""

import ipaddress
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.machines import Machines, needs_machines

pytestmark = [needs_machines, pytest.mark.thorough, pytest.mark.timeout(1800)]

FIRST = "10.77.0.1"
WRONG = 2
"""Exit code after a `ConfigError`."""


class Ended(NamedTuple):
    """How the processes of a case ended, by machine."""

    codes: list[int]
    texts: list[str]

    def said(self, sentence: str) -> "Ended":
        """Fails unless all machines end with ``sentence``."""
        assert self.codes == [WRONG] * len(self.codes), self
        assert all(sentence in text for text in self.texts), self
        assert not any("Traceback" in text for text in self.texts), self
        return self


def meet(*node_ranks: int, address: str = FIRST, port: int = 29500) -> list[dict[str, str]]:
    """Variables of each machine."""
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    return [{"NODE_RANK": str(rank), **meeting} for rank in node_ranks]


def start(machines: Machines, **cases: dict[str, Any]) -> dict[str, Ended]:
    """Run cases one after the other, each on all machines."""
    folder = machines.folder / "cases"
    folder.mkdir()
    given = json.dumps(
        {
            "folder": str(folder),
            "nodes": len(machines),
            "cases": [{"name": name, **case} for name, case in cases.items()],
        }
    )
    command = [sys.executable, "-m", "tests.machines.starting"]
    runs = [machine.start([*command, str(machine.index), given]) for machine in machines]
    lines = [[json.loads(line) for line in told(run)] for run in runs]
    return {
        name: Ended(
            codes=[one["code"] for one in by_machine],
            texts=[one["output"] for one in by_machine],
        )
        for name, *by_machine in zip(cases, *lines, strict=True)
    }


def told(run: Any) -> list[str]:
    code, output = run.wait(1200)
    assert code == 0, output
    return [line for line in output.splitlines() if line.startswith('{"case"')]


def check_trained(ended: Ended, network: str = "10.77.0.") -> None:
    """Both did, and were reached on the network between them and nowhere else."""
    assert ended.codes == [0, 0], ended
    for number, text in enumerate(ended.texts):
        assert "trained to step 2" in text
        [line] = [line for line in text.splitlines() if line.startswith("listens")]
        addresses = {address for address, _ in json.loads(line.partition(" ")[2])}
        assert f"{network}{number + 1}" in addresses
        assert not [a for a in addresses if ipaddress.ip_address(a).is_unspecified], addresses


def test_names_that_lead_nowhere_and_mistakes(tmp_path: Path) -> None:
    """Names as Debian has them, and what must not be waited for or trained with."""
    private, shared = tmp_path / "private", tmp_path / "shared"
    with Machines(2, tmp_path, hosts="debian", private=[private]) as machines:
        ended = start(
            machines,
            trains={"env": meet(0, 1, address="node0"), "dirpath": str(shared)},
            out_of_range={"env": meet(0, 5, port=29501)},
            options={
                "env": meet(0, 1, port=29502),
                "layout": [{"zero": 1}, {"zero": 2}],
                "trainer": [{}, {"max_steps": 3}],
            },
            unshared={"env": meet(0, 1, port=29503), "dirpath": str(private)},
        )
    check_trained(ended["trains"])
    assert [path.suffix for path in shared.iterdir()] == [".ckpt"]
    ended["unshared"].said(
        f"ModelCheckpoint saves to {private}: rank 1 (node1) do not see there what rank 0 (node0)"
    )
    ended["out_of_range"].said("NODE_RANK=5 on node1, Trainer(num_nodes=2)")
    ended["options"].said(
        "different options: zero.stage=2, max_steps=3 on rank 1 (node1), zero.stage=1, "
        "max_steps=2 on rank 0 (node0)"
    )


def test_more_mistakes(tmp_path: Path) -> None:
    slurm = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "node[0-1]",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_LOCALID": "0",
    }
    by_slurm = [{**slurm, "SLURM_NODEID": str(n), "SLURM_PROCID": str(n)} for n in range(2)]
    with Machines(2, tmp_path) as machines:
        ended = start(
            machines,
            trains={"env": meet(0, 1)},
            twice_0={"env": meet(0, 0, port=29501)},
            elsewhere={"env": meet(0, 1, address="10.77.0.2", port=29502)},
            missing={"env": [{"NODE_RANK": "0"}, {"NODE_RANK": "1"}]},
            nodes={"env": meet(0, 1, port=29503), "trainer": [{}, {"num_nodes": 3}]},
            interface={
                "env": meet(0, 1, port=29504),
                "connection": [{}, {"bind": "eth99"}],
            },
            closed={
                "env": [{**one, "GLOO_SOCKET_IFNAME": "lo"} for one in meet(0, 1, port=29505)],
                "connection": {"timeout_s": 10},
            },
            first_node={
                "env": meet(0, 1, port=29506),
                "connection": [{"bind": "eth98"}, {}],
            },
            same_mistake={"env": meet(0, 1, port=29507), "layout": {"zero": 7}},
            slurm={"env": by_slurm},
            slurm_nodes={"env": by_slurm, "trainer": {"num_nodes": 1}},
            slurm_tasks={"env": by_slurm, "trainer": {"devices": 2}},
        )
    check_trained(ended["trains"])
    ended["twice_0"].said("MASTER_ADDR=10.77.0.1: rank 0 would meet the others there, but it runs")
    ended["elsewhere"].said("MASTER_ADDR=10.77.0.2")
    assert "runs on node0, which has no such" in ended["elsewhere"].texts[0]
    assert "is node1 itself, which is node 1 of the run" in ended["elsewhere"].texts[1]
    ended["missing"].said("MASTER_ADDR and MASTER_PORT not set on node")
    ended["nodes"].said("num_nodes=3 on rank 1 (node1), num_nodes=2 on rank 0 (node0)")
    ended["interface"].said("connection.bind='eth99': this machine has")
    ended["first_node"].said("connection.bind='eth98': this machine has")
    ended["same_mistake"].said("zero=7")
    ended["closed"].said("gloo cannot connect them with each other: rank ")
    check_trained(ended["slurm"])
    ended["slurm_nodes"].said("SLURM_NNODES=2, Trainer(num_nodes=1)")
    ended["slurm_tasks"].said("SLURM_NTASKS=2, Trainer(num_nodes=2, devices=2)")
    assert not any("MASTER_ADDR" in text for text in ended["slurm_nodes"].texts)


def test_a_checkpoint_saved_by_hand_where_machines_share_nothing(tmp_path: Path) -> None:
    private = tmp_path / "private"
    with Machines(2, tmp_path, private=[private]) as machines:
        [ended] = start(
            machines, by_hand={"env": meet(0, 1), "by_hand": str(private / "own.ckpt")}
        ).values()
    for text in ended.texts:
        assert "it was deleted meanwhile, or not all machines share it" in text


def test_hosts_without_names(tmp_path: Path) -> None:
    with Machines(2, tmp_path, hosts="none") as machines:
        ended = start(
            machines,
            trains={"env": meet(0, 1)},
            named={"env": meet(0, 1, address="node0", port=29501)},
        )
    check_trained(ended["trains"])
    ended["named"].said("MASTER_ADDR=node0")


@pytest.mark.parametrize("node_ranks", [(0, 1, 1), (0, 0, 1)])
def test_a_node_rank_twice(tmp_path: Path, node_ranks: tuple[int, ...]) -> None:
    with Machines(3, tmp_path) as machines:
        env = meet(*node_ranks)
        [ended] = start(machines, twice={"env": env, "trainer": {"num_nodes": 3}}).values()
    sentence = "two processes have the rank 1" if node_ranks[1] else "another NODE_RANK than 0"
    ended.said(sentence)


@pytest.mark.parametrize("hosts", ["debian", "none"])
def test_torchrun(tmp_path: Path, hosts: Any) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += [f"--master-addr={FIRST}", "--master-port=29500"]
    program = ["-m", "tests.machines.starting", "train", "{}"]
    with Machines(2, tmp_path, hosts=hosts) as machines:
        runs = [
            machine.start([*command, f"--node-rank={machine.index}", *program])
            for machine in machines
        ]
        ended = [run.wait() for run in runs]
    codes, texts = zip(*ended, strict=True)
    check_trained(Ended(list(codes), list(texts)))


def test_machines_without_ipv4(tmp_path: Path) -> None:
    with Machines(2, tmp_path, hosts="none") as machines:
        for machine in machines:
            own = f"fd77::{machine.index + 1}/64"
            machine.run(["ip", "addr", "flush", "dev", "eth0"])
            machine.run(["ip", "-6", "addr", "add", own, "dev", "eth0", "nodad"])
        ended = start(machines, trains={"env": meet(0, 1, address="fd77::1")})["trains"]
    check_trained(ended, "fd77::")
