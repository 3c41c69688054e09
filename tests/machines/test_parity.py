"""Two machines of two ranks give one process's numbers."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatron.testing import WorkerPool
from tests.machines import Machines, needs_machines
from tests.machines.strangers import LAYOUTS, train
from tests.parity.strangers import STRANGERS
from tests.parity.table import TABLE

pytestmark = [needs_machines, pytest.mark.thorough, pytest.mark.timeout(1800)]

NAMES = [
    name
    for name in STRANGERS
    if not (TABLE[f"strangers/{name}"].refused or TABLE[f"strangers/{name}"].aside)
]


def alone(names: list[str]) -> dict[str, Any]:
    """What plain Lightning gives in one process."""
    return {name: train("auto", name) for name in names}


def test_strangers_on_two_machines(pool: WorkerPool, tmp_path: Path) -> None:
    [expected] = pool.run(1, alone, NAMES)
    out = tmp_path / "found.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    with Machines(2, tmp_path) as machines:
        command += [f"--master-addr={machines[0].address}", "--master-port=29521"]
        job = ["-m", "tests.machines.strangers", str(out), *NAMES]
        runs = [m.start([*command, f"--node-rank={m.index}", *job]) for m in machines]
        for run in runs:
            code, text = run.wait()
            assert code == 0, text
    found = torch.load(out, weights_only=False)
    assert len(found) == len(LAYOUTS) * len(NAMES)
    for (layout, name), (weights, notes, logged) in found.items():
        by_one = expected[name]
        assert weights.keys() == by_one[0].keys(), (layout, name)
        for key, value in weights.items():
            assert (value - by_one[0][key]).abs().max() < 1e-10, (layout, name, key)
        assert notes == pytest.approx(by_one[1], abs=1e-10), (layout, name)
        assert logged == pytest.approx(by_one[2], abs=1e-10), (layout, name)
