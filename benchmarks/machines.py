"""Faults of machines and cables: seconds until they are noticed, and until the next new step.

    python -m benchmarks.machines               # about 25 minutes, mostly waiting
    python -m benchmarks.machines --only torchrun

Two machines made of namespaces (`tests.machines`; root is needed) train with a checkpoint each
step, ``HangDetector(limit=15)`` and 0.2 s a step. In the eighth step something happens to the
second one. *noticed* is when the block of `HangDetector` appears on the machine that is left,
*ended* when all ranks there have ended, *new step* the first step that had not been done before;
all in seconds after the fault. A limit of 15 s is part of each. *lost* counts steps that were done
again.

torchrun: ``--nnodes 1:2 --max-restarts 3``, c10d, either with a ``--rdzv-conf`` that waits for less
or with torchrun's defaults (``last_call_timeout=30``).
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import parser, report
from tests.machines import Machine, Machines, Run
from tests.machines.launches import STORE, lightning, steps, torchrun

STEPS, STRUCK = 60, 8
OPTIONS: dict[str, Any] = {"pace": 0.2, "every": 1, "detector": {"limit": 15}}
SOON = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5"
DEFAULT = "torchrun's defaults"
Row = dict[str, Any]
Fate = Callable[[Machine], None]


def power_off(machine: Machine) -> None:
    machine.power_off()


def cut(machine: Machine) -> None:
    machine.cut()


def lose_packets(machine: Machine) -> None:
    machine.cut(silently=True)


def stop(machine: Machine) -> None:
    machine.signal_all(signal.SIGSTOP)


FATES: dict[str, Fate] = {
    "power off": power_off,
    "cable pulled": cut,
    "switch loses all packets": lose_packets,
    "SIGSTOP of all processes": stop,
}
HANGS = {
    "its only rank is stopped": "stop",
    "its only rank hangs": "sleep",
    "its only rank holds Python's lock": "lock",
}
LINKS = {"cable out for 5 s": 5.0, "cable out for 60 s": 60.0}


def row(fault: str, launch: str, **found: Any) -> Row:
    names = ("noticed", "ended", "new step", "lost", "restarts")
    told = {n: f"{v:.1f}" if isinstance(v, float) else v for n, v in found.items()}
    return {"fault": fault, "launch": launch, **{name: told.get(name, "") for name in names}}


def noticed(folder: Path, first_rank: int, since: float) -> float:
    """When the node of a rank has reported."""
    (path,) = (folder / "hangs").glob(f"attempt_0-node_of_rank_{first_rank}-step_*.json")
    return float(json.loads(path.read_text())["t"]) - since


def first_new(run: Run, since: float, before: int) -> tuple[float, int]:
    """Seconds until a step beyond ``before`` was done, and how many were done again."""
    later = [(step, at) for _, step, at in steps(run) if at > since]
    again = sum(step <= before for step, _ in later)
    return next(at for step, at in later if step > before) - since, again


def under_lightning(fault: str, fate: Fate | None, hang: str | None) -> Row:
    """The run ends, as nobody restarts it."""
    with tempfile.TemporaryDirectory() as name, Machines(2, Path(name)) as machines:
        options = OPTIONS | ({"fault": [1, STRUCK, hang]} if hang else {})
        stays, goes = lightning(machines, **options)
        if fate is not None:
            goes.wait_for(f"step {STRUCK} done", 120)
            at, clock = time.time(), time.monotonic()
            fate(goes.machine)
        else:
            goes.wait_for("fault at", 120)
            at = float(goes.output.rpartition("fault at ")[2].split()[0])
            clock = time.monotonic() - (time.time() - at)
        code, text = stays.wait(120)
        assert code == 86, text
        ended = stays.ended_at - clock
        return row(fault, "Lightning", noticed=noticed(Path(name), 0, at), ended=ended)


def under_torchrun(fault: str, fate: Fate, conf: str, elsewhere: bool) -> Row:
    """The run goes on with the machine that is left."""
    with tempfile.TemporaryDirectory() as name, Machines(3, Path(name)) as machines:
        more = [] if conf == DEFAULT else [f"--rdzv-conf={conf}"]
        if elsewhere:
            machines[2].start([sys.executable, "-c", STORE])
        endpoint = f"{machines[2 if elsewhere else 0].address}:29400"
        nodes = [machines[0], machines[1]]
        runs = torchrun(nodes, "1:2", endpoint, *more, steps=STEPS, **OPTIONS)
        for run in runs:
            run.wait_for("step 1 done", 150)
        stays, goes = runs
        if elsewhere and "rank 0 of" in stays.output:
            stays, goes = goes, stays  # the first rank's machine goes
        goes.wait_for(f"step {STRUCK} done", 120)
        at = time.time()
        fate(goes.machine)
        code, text = stays.wait(200)
        assert code == 0, text
        before = max(step for world, step, _ in steps(stays) if world == 2)
        new, lost = first_new(stays, at, before)
        rank = 1 if elsewhere else 0
        launch = "torchrun" if conf == DEFAULT else "torchrun, last_call_timeout=5"
        return row(
            fault,
            launch + (", store elsewhere" if elsewhere else ""),
            **{"noticed": noticed(Path(name), rank, at), "new step": new},
            lost=lost,
            restarts=1,
        )


def with_link(fault: str, seconds: float, launch: str) -> Row:
    """The cable is put back, and the run goes on."""
    with tempfile.TemporaryDirectory() as name, Machines(2, Path(name)) as machines:
        detector = {"limit": 15} if seconds < 15 else {}
        options = {"steps": 10**6, **OPTIONS, "every": 0, "detector": detector}
        if launch == "Lightning":
            runs = lightning(machines, **options)
        else:
            endpoint = f"{machines[0].address}:29400"
            runs = torchrun(list(machines), "1:2", endpoint, **options)
        runs[1].wait_for(f"step {STRUCK} done", 150)
        at = time.time()
        machines[1].cut()
        time.sleep(seconds)
        before = [steps(run)[-1][1] for run in runs]
        machines[1].mend()
        runs[1].wait_for(f"step {before[1] + 20} done", 240)
        time.sleep(30)  # in which agents may think better of it
        assert not (Path(name) / "hangs").exists()
        assert all(run.code is None for run in runs), [run.output[-3000:] for run in runs]
        new, lost = first_new(runs[1], at, before[1])
        restarts = sum(run.output.count("processes connected") for run in runs[:1]) - 1
        return row(fault, launch, **{"new step": new}, lost=lost, restarts=restarts)


def cases() -> dict[str, Callable[[], Row]]:
    """By name."""
    found: dict[str, Callable[[], Row]] = {}
    for fault, fate in FATES.items():
        found[f"Lightning, {fault}"] = partial(under_lightning, fault, fate, None)
    for fault, kind in HANGS.items():
        found[f"Lightning, {fault}"] = partial(under_lightning, fault, None, kind)
    for fault in ("power off", "cable pulled", "SIGSTOP of all processes"):
        for conf in (SOON, DEFAULT):
            name = f"torchrun, {fault}, {conf}"
            found[name] = partial(under_torchrun, fault, FATES[fault], conf, False)
    found["torchrun, store elsewhere"] = partial(
        under_torchrun, "power off of rank 0's machine", power_off, SOON, True
    )
    for launch in ("Lightning", "torchrun"):
        for fault, seconds in LINKS.items():
            found[f"{launch}, {fault}"] = partial(with_link, fault, seconds, launch)
    return found


def main() -> None:
    options = parser(__doc__, steps=STEPS)
    options.add_argument("--only", default="", help="cases whose names contain this")
    given = options.parse_args()
    rows = []
    for name, case in cases().items():
        if given.only in name:
            try:
                rows.append(case())
            except (AssertionError, TimeoutError, ValueError, StopIteration) as error:
                rows.append(row(name, "", noticed=f"{type(error).__name__}"))
                print(error, file=sys.stderr)
            print(rows[-1], flush=True)
    title = "A machine or its cable fails: seconds from the fault (`python -m benchmarks.machines`)"
    report("machines", title, rows, given.output)


if __name__ == "__main__":
    main()
