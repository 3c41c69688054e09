"""Where the time of the suite goes: ``python -m benchmarks.durations build/tests.xml``.

`make test` leaves a record of every case in that file; this prints seconds by folder, the files and
the cases that took most, and what has grown since the record that is checked in. ``--keep`` makes
today's the checked-in one, and puts the table of folders into CONTRIBUTING.md.

Wall seconds are those that a case waited, also for another's workers; processor seconds are those
of its own process, of the processes that it started and of the pool's workers, so that a busy
machine changes them little. A process that was begun ahead, as the jobs of `tests/launched`, counts
for the case during which it ended. The collection of tests, jobs that failed and what workers do
between jobs are part of no case.
"""

import argparse
import csv
import datetime
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "durations.csv"
PAGE = ROOT / "CONTRIBUTING.md"
_PLACE = re.compile(r"(<!-- durations -->\n).*?(<!-- end of durations -->)", re.DOTALL)


class Spent(NamedTuple):
    """What cases took together."""

    cases: int
    wall_s: float
    processor_s: float


class Case(NamedTuple):
    """What one case took."""

    file: str
    name: str
    wall_s: float
    processor_s: float


def read(report: Path) -> list[Case]:
    """Return the cases of a report in JUnit's format."""
    cases = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        told = {p.get("name"): p.get("value") for p in case.iter("property")}
        if "processor_s" in told:  # skipped ones have none
            file = _file_of(case.get("classname", ""))
            wall, used = float(case.get("time", 0)), float(told["processor_s"] or 0)
            cases.append(Case(file, case.get("name", ""), wall, used))
    return cases


def _file_of(module: str) -> str:
    """Return the path of a test's file; the module's name may end with that of a class."""
    parts = module.split(".")
    while len(parts) > 1 and not (ROOT / "/".join(parts)).with_suffix(".py").exists():
        parts.pop()
    return "/".join(parts) + ".py"


def folder_of(file: str) -> str:
    """Return the folder of tests that a file belongs to."""
    parts = Path(file).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def add_up(cases: Iterable[Case], key: Callable[[Case], str]) -> dict[str, Spent]:
    """Return what cases took by their key, most processor seconds first."""
    sums: dict[str, Spent] = {}
    for case in cases:
        old = sums.get(key(case), Spent(0, 0.0, 0.0))
        sums[key(case)] = Spent(
            old.cases + 1, old.wall_s + case.wall_s, old.processor_s + case.processor_s
        )
    return dict(sorted(sums.items(), key=lambda item: -item[1].processor_s))


def table(title: str, rows: dict[str, Spent]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {title} | cases | processor s | wall s |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {s.cases} | {s.processor_s:.1f} | {s.wall_s:.1f} |" for name, s in rows.items()
    ]
    return "\n".join(lines)


def growth(before: dict[str, Spent], now: dict[str, Spent], least_s: float) -> list[str]:
    """Return a sentence for each file that takes longer than it did, the largest growth first."""
    grown = []
    for file, spent in now.items():
        old = before.get(file, Spent(0, 0.0, 0.0))
        if (more := spent.processor_s - old.processor_s) >= least_s:
            grown.append((more, f"{file}: {old.processor_s:.1f} s, now {spent.processor_s:.1f} s"))
    return [text for _, text in sorted(grown, reverse=True)]


def load(path: Path) -> dict[str, Spent]:
    """Return the kept record, by file."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        row["file"]: Spent(int(row["cases"]), float(row["wall_s"]), float(row["processor_s"]))
        for row in rows
    }


def keep(by_file: dict[str, Spent], path: Path) -> None:
    """Write a record, one line a file of tests, in the order of their names."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("file", "cases", "wall_s", "processor_s"))
        for name, spent in sorted(by_file.items()):
            writer.writerow((name, spent.cases, f"{spent.wall_s:.1f}", f"{spent.processor_s:.1f}"))


def main(arguments: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("report", type=Path, help="the file of `pytest --junitxml`")
    parser.add_argument("--cases", type=int, default=30, help="cases to list")
    parser.add_argument("--keep", action="store_true", help="check this record in")
    options = parser.parse_args(arguments)
    cases = read(options.report)
    by_folder = add_up(cases, lambda case: folder_of(case.file))
    by_file = add_up(cases, lambda case: case.file)
    folders = table("folder", {**by_folder, "**all**": _all(by_folder)})
    longest = sorted(cases, key=lambda case: -case.processor_s)[: options.cases]
    print(folders, "", table("file", dict(list(by_file.items())[:20])), "", sep="\n")
    print(table("case", add_up(longest, lambda case: f"{case.file}::{case.name}")))
    if KEPT.exists() and (grown := growth(load(KEPT), by_file, least_s=2.0)):
        print("\nlonger than the checked-in record, by 2 s and more:", *grown, sep="\n")
    if options.keep:
        keep(by_file, KEPT)
        head = f"Measured on {datetime.date.today():%Y-%m-%d}, on two cores:\n\n"
        text = _PLACE.sub(rf"\g<1>{head}{folders}\n\g<2>", PAGE.read_text())
        PAGE.write_text(text)


def _all(rows: dict[str, Spent]) -> Spent:
    cases, wall, used = zip(*rows.values(), strict=True)
    return Spent(sum(cases), sum(wall), sum(used))


if __name__ == "__main__":
    main()
