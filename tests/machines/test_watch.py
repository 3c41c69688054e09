"""Nodes that vanish, hang or are cut off are named, and nobody is blamed for a pause."""

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.machines import Machine, Machines, Run, needs_machines
from tests.machines.launches import attempts, lightning, steps
from tests.machines.machine import PATIENCE_S

pytestmark = [needs_machines, pytest.mark.thorough, pytest.mark.timeout(1800)]

EXIT_CODE = 86
KILLED = "want of memory"


def begin(machines: Machines, limit: float, **options: Any) -> list[Run]:
    """A run that has done five steps."""
    detector = {"limit": 15, "node_limit": limit}
    runs = lightning(machines, **{"detector": detector, "every": 1, **options})
    for run in runs:
        run.wait_for("step 5 done")
    return runs


def ends(runs: list[Run], killed: Run | None = None) -> list[str]:
    """Outputs of runs that end because of a hang, but for one that cannot end by itself."""
    found = [run.wait() for run in runs]
    codes = [-signal.SIGKILL if run is killed else EXIT_CODE for run in runs]
    assert [code for code, _ in found] == codes, found
    return [output for _, output in found]


def test_both_ends_of_a_cut_cable_name_the_other(tmp_path: Path) -> None:
    with Machines(2, tmp_path) as machines:
        runs = begin(machines, 5, every=0)
        begun = time.monotonic()
        machines[1].cut()
        first, second = ends(runs)
        assert max(run.ended_at for run in runs) - begun > 4
    assert re.search(r"=== node1 \(rank 1\) has been silent since step \d+ ===", first)
    assert re.search(r"=== node0 \(rank 0\) has been silent since step \d+ ===", second)
    assert "or the connection of node1 itself is broken" in second
    for rank in (0, 1):
        (path,) = (tmp_path / "hangs").glob(f"attempt_0-node_of_rank_{rank}-step_*.json")
        report = json.loads(path.read_text())
        assert [c["rank"] for c in report["culprits"]] == [1 - rank]
        assert report["waiting"] == [rank]
        assert "in wait" in path.with_suffix(".txt").read_text()


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("who", [0, 1])
def test_three_nodes_name_the_one_that_is_gone(tmp_path: Path, who: int, silently: bool) -> None:
    with Machines(3, tmp_path) as machines:
        runs = begin(machines, 6)
        machines[who].cut(silently=silently)
        texts = ends(runs)
    for index in {0, 1, 2} - {who}:
        assert f"node{who} (rank {who}) has been silent since step" in texts[index]
    assert KILLED not in "".join(texts) + attempts(tmp_path)
    if who:
        assert f"node{who} (rank {who}) has been silent" in attempts(tmp_path)


FATES: dict[str, Callable[[Machine], None]] = {
    "off": lambda machine: machine.power_off(),
    "stopped": lambda machine: machine.signal_all(signal.SIGSTOP),
}


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("fate", FATES)
def test_a_node_without_a_last_word(tmp_path: Path, fate: str, who: int) -> None:
    with Machines(2, tmp_path) as machines:
        runs = begin(machines, 6, devices=2)
        FATES[fate](machines[who])
        (text,) = ends([runs[1 - who]])
        ranks = ("0, 1", "2, 3")[who]
        assert f"node{who} (ranks {ranks}) has been silent since step" in text
        assert f"(host node{who}, pid" in text
        assert KILLED not in text + attempts(tmp_path)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("sleep", "hangs in data"),
        ("lock", "hangs in data"),
        ("stop", "stopped by a signal"),
        ("skip", "waiting for it: rank"),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_hang_on_one_node_is_named_on_the_other(
    tmp_path: Path, kind: str, says: str, devices: int
) -> None:
    last = 2 * devices - 1
    with Machines(2, tmp_path) as machines:
        runs = begin(machines, 30, devices=devices, fault=[last, 8, kind], detector={"limit": 5})
        unable = devices == 1 and kind in ("lock", "stop")
        texts = ends(runs, runs[1] if unable else None)
    for text in texts:
        assert f"=== rank {last} (node1) hangs in" in text
        assert "root cause" not in text
        assert says in text
    assert KILLED not in "".join(texts) + attempts(tmp_path)
    assert f"rank {last} hung in" in attempts(tmp_path)


def test_a_hang_beside_rank_0_is_named_on_the_other_node(tmp_path: Path) -> None:
    with Machines(2, tmp_path) as machines:
        runs = begin(machines, 30, devices=2, fault=[1, 8, "stop"], detector={"limit": 5})
        texts = ends(runs)
    for text in texts:
        assert "=== rank 1 (node0) hangs in" in text
        assert "root cause" not in text
    assert KILLED not in "".join(texts) + attempts(tmp_path)


def go_on(runs: list[Run]) -> None:
    """Return when both runs have done further steps."""
    before, until = [len(steps(run)) for run in runs], time.monotonic() + PATIENCE_S
    while any(len(steps(run)) < n + 10 for run, n in zip(runs, before, strict=True)):
        for run in runs:
            assert run.code is None, run.output[-3000:]
        assert time.monotonic() < until, [run.output[-3000:] for run in runs]
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("down_s", "options", "silently"),
    [
        (5, {"limit": 15}, False),
        (5, {"limit": 15}, True),
        (60, {}, False),
        (60, {}, True),
    ],
)
def test_a_link_that_comes_back_costs_a_pause(
    tmp_path: Path, down_s: float, options: dict[str, Any], silently: bool
) -> None:
    with Machines(2, tmp_path) as machines:
        runs = begin(machines, 0, detector=options)
        machines[1].cut(silently=silently)
        time.sleep(down_s)
        machines[1].mend()
        go_on(runs)
        assert not (tmp_path / "hangs").exists()


def test_what_takes_long_and_ends_apart_raises_no_alarm(tmp_path: Path) -> None:
    """Validation of one rank, and its end when the others have left already."""
    with Machines(2, tmp_path) as machines:
        for who in (0, 1):
            detector = {"node_limit": 5}
            runs = lightning(machines, detector=detector, steps=6, slow=[who, 9])
            for run in runs:
                code, text = run.wait()
                assert code == 0, text
                assert "finished at step 6" in text
                assert "silent" not in text
        assert not (tmp_path / "hangs").exists()
        # The monitors end as well, and clean up.
        for machine in machines:
            look = "for i in $(seq 100); do [ $(ls /proc | grep -c '^[0-9]') -le 4 ] && exit; "
            machine.run(["bash", "-c", look + "sleep 0.2; done; exit 1"])
            assert machine.run(["ls", "/dev/shm"]) == ""


@pytest.mark.parametrize("what", ["ranks", "machines"])
def test_a_suspended_run_is_no_hang(tmp_path: Path, what: str) -> None:
    """All ranks of all nodes are stopped, with their monitors or without."""
    with Machines(2, tmp_path) as machines:
        runs = begin(machines, 6, detector={"limit": 5, "node_limit": 5})
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for run in runs:
                if what == "ranks":
                    run.signal(number)
                else:
                    run.machine.signal_all(number)
            time.sleep(12)
        go_on(runs)
        assert not (tmp_path / "hangs").exists()


def test_two_nodes_that_lose_each_other_but_reach_the_third(tmp_path: Path) -> None:
    with Machines(3, tmp_path) as machines:
        runs = begin(machines, 10, detector={"limit": 8})
        machines[1].lose(machines[2])
        texts = ends(runs)
    for text in texts:
        assert re.search(r"=== rank \d \(node\d\) hangs in .* at step \d+ ===", text)
        assert "two of these machines may have lost each other" in text


@pytest.mark.parametrize("hosts", ["debian", "none"])
def test_names_that_lead_nowhere_do_not_matter(tmp_path: Path, hosts: Any) -> None:
    with Machines(2, tmp_path, hosts=hosts) as machines:
        runs = begin(machines, 5)
        machines[1].cut()
        for number, text in enumerate(ends(runs)):
            other = 1 - number
            assert f"=== node{other} (rank {other}) has been silent since step" in text
