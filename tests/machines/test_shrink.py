"""Under torchrun a run goes on with the nodes that are left, from its latest checkpoint."""

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.machines import Machine, Machines, Run, needs_machines
from tests.machines.launches import STORE, lightning, steps, torchrun

pytestmark = [needs_machines, pytest.mark.thorough, pytest.mark.timeout(1800)]

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
            code, text = run.wait()
            assert code == 0, text
    found: dict[str, torch.Tensor] = torch.load(folder / "weights.pt")
    return found


@pytest.mark.parametrize("fate", FATES)
def test_the_node_that_is_left_goes_on(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor], fate: str
) -> None:
    with Machines(2, tmp_path) as machines:
        endpoint = f"{machines[0].address}:29400"
        stays, goes = torchrun(list(machines), "1:2", endpoint, SOON, **OPTIONS)
        lose(goes, stays, FATES[fate])
    look(tmp_path, stays, undisturbed)


def test_a_store_elsewhere_outlives_every_node(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Rank 0's node goes; the store is on a machine of its own."""
    with Machines(3, tmp_path) as machines:
        machines[2].start([sys.executable, "-c", STORE])
        nodes = [machines[0], machines[1]]
        runs = torchrun(nodes, "1:2", f"{machines[2].address}:29400", SOON, **OPTIONS)
        for run in runs:
            run.wait_for("step 1 done")
        goes, stays = runs if "rank 0 of" in runs[0].output else reversed(runs)
        lose(goes, stays, FATES["powered off"])
    look(tmp_path, stays, undisturbed)


def lose(goes: Run, stays: Run, fate: Callable[[Machine], None]) -> None:
    """Let a machine vanish in the eighth step, and the run end without it."""
    for run in (goes, stays):
        run.wait_for("step 8 done")
    fate(goes.machine)
    code, text = stays.wait()
    assert code == 0, text
    name = goes.machine.name
    assert re.search(rf"=== {name} \(rank \d\) has been silent since step", text), text
    assert "want of memory" not in text


def look(folder: Path, stays: Run, undisturbed: dict[str, torch.Tensor]) -> None:
    """Nothing is lost but the step that was going on, and the weights are as they should be."""
    together = [done for done in steps(stays) if done[0] == 2]
    alone = [done for done in steps(stays) if done[0] == 1]
    assert together[-1][1] - 1 <= alone[0][1] - 1 <= together[-1][1]
    assert [step for _, step, _ in alone] == list(range(alone[0][1], STEPS + 1))
    weights = torch.load(folder / "weights.pt")
    for name, expected in undisturbed.items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-11, atol=1e-13)
