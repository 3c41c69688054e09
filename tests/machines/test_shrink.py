"""Under torchrun a run goes on with the nodes that are left, from its latest checkpoint."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.machines import Machine, Machines, needs_machines
from tests.machines.launches import lightning, steps, torchrun

pytestmark = [needs_machines, pytest.mark.thorough]

STEPS, LIMIT_S = 40, 15
OPTIONS: dict[str, Any] = {"steps": STEPS, "pace": 0.2, "every": 1, "detector": {"limit": LIMIT_S}}
SOON = "--rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5"
FATES: dict[str, Callable[[Machine], None]] = {
    "powered off": lambda machine: machine.power_off(),
    "cut off for good": lambda machine: machine.cut(),
    "stopped as a whole": lambda machine: machine.signal_all(signal.SIGSTOP),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a run without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Machines(2, folder) as machines:
        for run in lightning(machines, steps=STEPS, pace=0):
            code, text = run.wait(120)
            assert code == 0, text
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
    return found


@pytest.mark.parametrize("fate", FATES)
def test_the_node_that_is_left_goes_on(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], fate: str
) -> None:
    with Machines(2, tmp_path) as machines:
        endpoint = f"{machines[0].address}:29400"
        stays, _ = torchrun(machines, "1:2", endpoint, SOON, **OPTIONS)
        stays.wait_for("step 8 done", 120)
        at = time.time()
        FATES[fate](machines[1])
        code, text = stays.wait(120)
        assert code == 0, text
    assert "node1 (rank 1) has been silent since step" in text
    assert "want of memory" not in text
    together = [done for done in steps(stays) if done[0] == 2]
    alone = [done for done in steps(stays) if done[0] == 1]
    # Nothing is lost but the step that was going on.
    assert together[-1][1] - 1 <= alone[0][1] - 1 <= together[-1][1]
    assert [step for _, step, _ in alone] == list(range(alone[0][1], STEPS + 1))
    (noticed,) = [
        json.loads(path.read_text())["t"] for path in (tmp_path / "hangs").glob("*_0-step*.json")
    ]
    print(f"{fate}: noticed after {noticed - at:.1f} s, first step after {alone[0][2] - at:.1f} s")
    assert noticed - at < 2 * LIMIT_S + 15
    weights = torch.load(tmp_path / "weights.pt")
    for name, expected in undisturbed.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-11, atol=1e-13)
