"""The command line."""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import benchmarks.mutations
from benchmarks.mutations.draw import draw
from benchmarks.mutations.lane import preload
from benchmarks.mutations.series import Series, line, lost, summary


def options() -> argparse.Namespace:
    """What the command line says."""
    here = Path(__file__).resolve().parents[2]
    about = (benchmarks.mutations.__doc__ or "").partition(":")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.mutations", description=about)
    parser.add_argument("--root", type=Path, default=here, help="checkout that is mutated")
    parser.add_argument("--number", type=int, default=80, help="mutations to draw")
    parser.add_argument("--seed", type=int, default=29)
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2), help="mutations at a time")
    parser.add_argument("--budget", type=float, default=150, help="processor seconds of each")
    parser.add_argument(
        "--hang", type=float, default=180, help="seconds of a test that mean a hang"
    )
    parser.add_argument("--output", type=Path, default=here / "benchmarks" / "results")
    parser.add_argument("--list", action="store_true", help="draw and print, without running tests")
    record = parser.add_mutually_exclusive_group()
    record.add_argument("--resume", type=Path, metavar="RECORD", help="go on with a series")
    record.add_argument("--again", type=Path, metavar="RECORD", help="its mutations, tried here")
    return parser.parse_args()


def commit_of(root: Path) -> str:
    """Short name of the commit of a checkout."""
    call = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(call, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "no-commit"


def series_of(given: argparse.Namespace, root: Path) -> Series:
    """The series that the command line asks for."""
    commit = commit_of(root)
    if given.resume:
        data = json.loads(given.resume.read_text())
        if data["commit"] != commit:
            raise SystemExit(f"the series was begun at {data['commit']}, and {root} is at {commit}")
        return Series(given.resume, data)
    data = {"commit": commit, "budget": given.budget, "hang": given.hang}
    if given.again:
        earlier = json.loads(given.again.read_text())
        data["again"] = earlier["commit"]
        rows = [dict(row) for row in earlier["mutations"]]
        for row in rows:
            row["earlier"] = row.pop("result", {})
    else:
        data["seed"] = given.seed
        rows = [asdict(one) for one in draw(root, given.number, given.seed)]
    data |= {"controls": {}, "mutations": rows}
    again = "-again" if given.again else ""
    return Series(given.output / f"mutations-{commit}{again}.json", data)


def main() -> int:
    """Run a series; 1 where a mutation that was killed survives now."""
    given = options()
    root = given.root.resolve()
    series = series_of(given, root)
    rows = series.data["mutations"]
    if given.list:
        print("\n".join(line(index, row) for index, row in enumerate(rows)))
        return 0
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    print(f"the record is {series.record}", flush=True)
    series.write()
    preload(root)
    series.run(root, given.jobs)
    print(summary(rows))
    for index in lost(rows):
        print(f"killed before, survives now: {line(index, rows[index])}")
        print(f"    it was killed by {rows[index]['earlier'].get('by')}")
    return int(bool(lost(rows)))


if __name__ == "__main__":
    sys.exit(main())
