"""How a run survives ``kill -9``: ``python -m benchmarks.restarts [--quick]``.

Four processes train under torchrun; one of them is killed amid a step. Over three kinds of
rendezvous (static, c10d, --standalone) and the first, second and last rank, with tp=2 x dp=2 and
pp=2 x dp=2 in turn, it measures when torchrun's new workers are there (first step after the kill),
how many steps were lost (a checkpoint is saved every second step), whether the losses of the
whole run are those of an undisturbed one, to the bit, and whether the report names the rank.
The last line counts the runs that came to their end.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
LIMIT_S = 240
STEPS, KILLED_AT, WORLD = 10, 5, 4
LAYOUTS = {"tp2 dp2": {"tp": 2}, "pp2 dp2": {"pp": 2}}


def launcher(mode: str, port: int) -> list[str]:
    options = {
        "static": ["--nnodes=1", f"--master-port={port}"],
        "c10d": ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--nnodes=1"],
        "standalone": ["--standalone"],
    }[mode]
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={WORLD}"]
    return [*torchrun, "--max-restarts=2", *options]


def run(mode: str, layout: dict[str, Any], kills: list[list[int]], port: int) -> dict[str, Any]:
    options = {"layout": layout, "world": WORLD, "kills": kills, "steps": STEPS}
    command = [*launcher(mode, port), "-m", "tests.launched.training", json.dumps(options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begun = time.time()
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = 124
                os.killpg(process.pid, signal.SIGKILL)
        found = {
            name: [json.loads(line) for line in path.read_text().splitlines()]
            for name in ("losses", "kills")
            if (path := folder / f"{name}.jsonl").exists()
        }
        text = (folder / "output").read_text(errors="replace")
    return {"code": code, "begun": begun, "text": text, "losses": [], "kills": [], **found}


def summary(done: dict[str, Any], reference: dict[int, float], rank: int) -> dict[str, Any]:
    killed = done["kills"][0][2] if done["kills"] else None
    later = [line for line in done["losses"] if line[0] > 0]
    first = [line[3] for line in done["losses"] if line[0] == 0]
    return {
        "finished": done["code"] == 0,
        "start_s": round(first[0] - done["begun"], 1) if first else None,
        "recovery_s": round(later[0][3] - killed, 1) if later and killed else None,
        "steps_lost": KILLED_AT + 1 - later[0][1] if later else None,
        "same_losses": bool(later)
        and all(reference.get(step) == loss for _, step, loss, _ in done["losses"])
        and later[-1][1] == STEPS,
        "named": f"=== root cause: rank {rank} (" in done["text"],
    }


def measure(quick: bool, load: float) -> list[dict[str, Any]]:
    references = {}
    for name, layout in LAYOUTS.items():
        undisturbed = run("standalone", layout, [], 0)
        references[name] = {step: loss for _, step, loss, _ in undisturbed["losses"]}
    rows, port = [], 29600 + os.getpid() % 300
    for mode in ("static", "c10d", "standalone"):
        for rank in (0, 1, WORLD - 1):
            name = list(LAYOUTS)[len(rows) % 2]
            port += 1
            done = run(mode, LAYOUTS[name], [[rank, KILLED_AT]], port)
            row = {"rendezvous": mode, "layout": name, "rank": rank}
            rows.append({**row, **summary(done, references[name], rank)})
            print(json.dumps(rows[-1]), flush=True)
            if not rows[-1]["finished"]:
                print(done["text"][-3000:], file=sys.stderr)
            if quick:
                return rows
            keep(rows, load)
    return rows


def table(rows: list[dict[str, Any]], load: float) -> str:
    titles = list(rows[0])
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    lines += ["| " + " | ".join(str(row[title]) for title in titles) + " |" for row in rows]
    good = sum(row["finished"] and row["same_losses"] for row in rows)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}"
    return "\n".join(
        [
            "# Restarts after kill -9",
            "",
            f"`python -m benchmarks.restarts`; {WORLD} processes, {machine}; load of the machine "
            f"when it began: {load:.1f}. `start_s` is from the command to the first step, "
            "`recovery_s` from the kill to the first new step.",
            "",
            *lines,
            "",
            f"{good} of {len(rows)} came to their end with the losses of the undisturbed run.",
            "",
        ]
    )


def keep(rows: list[dict[str, Any]], load: float) -> None:
    """What has been measured so far."""
    (RESULTS / "restarts.json").write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "restarts.md").write_text(table(rows, load))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one run, nothing is kept")
    quick = parser.parse_args().quick
    load = os.getloadavg()[0]
    rows = measure(quick, load)
    print(table(rows, load))


if __name__ == "__main__":
    main()
