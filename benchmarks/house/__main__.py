"""The command line, and the record as a page and as JSON."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks.house
from benchmarks.house.mechanisms import Figure, mechanisms
from benchmarks.house.size import Lines, lines_by_folder, sizes
from benchmarks.house.source import PACKAGE, Source
from benchmarks.house.strategy import strategy_figures

HERE = Path(__file__).resolve().parents[2]
SHOWN = 12
"""Names that a row of the page lists; the JSON has all."""
NOTES = (
    "Classes are followed through imports to torch's. Whose object a `__class__` is set of, syntax "
    "does not tell: all places count. Attributes of others' objects are those set by "
    "`vars(x)[...]`, `x.__dict__[...]`, `setattr(x, ...)`, or under the name of a method of torch "
    "or Lightning, where `x` is not `self`: objects of the package count, other ways do not. Ways "
    "to meet and indexes are found by name. Modes on torch's stack are noted in hooks of three "
    "modules: one mentions no weights, one may look at them in hooks, one mentions them in its "
    "step; a mode of other options is not seen. Tables are containers of modules with ten "
    "functions of torch, or names of such. The traced step is one iteration of Lightning's loop "
    "under tp=2 and pp=2 with 8 microbatches, as calls of Python functions in the main thread. A "
    "return is a series of calls in a file that had been left before."
)


def ask(module: str, root: Path, *options: str) -> Iterator[str]:
    """Lines that a module of this package prints in a process that imports ``root``'s package."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / PACKAGE).symlink_to(root / PACKAGE)
        environment = os.environ | {
            "PYTHONPATH": f"{folder}{os.pathsep}{HERE}",
            "OMP_NUM_THREADS": "1",
        }
        call = [sys.executable, "-m", f"benchmarks.house.{module}", *options]
        with subprocess.Popen(
            call, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            yield from process.stdout
        if process.returncode:
            raise SystemExit(f"{' '.join(call)} ended with {process.returncode}")


def step_figures(found: Mapping[str, Any]) -> list[Figure]:
    """Figures of the traced step, and of modes and tables that running code shows."""
    modes = [f"{name} ({', '.join(hooks)})" for name, hooks in found["modes"].items()]
    figures = [
        Figure("modes on torch's stack in user code, traced", tuple(modes)),
        Figure("tables of torch functions", tuple(found["tables"]["tables"])),
        Figure("frames above training_step", tuple(found["frames"])),
    ]
    for rank in ("first", "last"):
        for what, number in found[rank].items():
            figures.append(Figure(f"{what}, {rank} rank", number=number))
    return figures


def record(root: Path, *, step: bool) -> dict[str, Any]:
    """All figures of a checkout."""
    source = Source(root)
    figures = mechanisms(source)
    unlooked: list[str] = []
    if step:
        traced = json.loads(list(ask("step", root))[-1])
        figures += step_figures(traced)
        unlooked = traced["tables"]["failed"]
    figures += [*strategy_figures(source), *sizes(source)]
    return {
        "commit": commit_of(root),
        "figures": {
            f.what: {"value": f.value, "unit": f.unit, "where": list(f.where)} for f in figures
        },
        "folders": {name: vars(lines) for name, lines in lines_by_folder(source).items()},
        "not imported for the tables": unlooked,
    }


def commit_of(root: Path) -> str:
    """Short name of the commit of a checkout, with a mark where the package differs from it."""
    git = ["git", "-C", str(root)]

    def said(*call: str) -> str:
        done = subprocess.run([*git, *call], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    name = said("rev-parse", "--short", "HEAD") or "no-commit"
    return f"{name}-changed" if said("status", "--porcelain", "--", PACKAGE, "tests") else name


def page(found: Mapping[str, Any], earlier: Mapping[str, Any] | None = None) -> str:
    """The record as Markdown; with an earlier one, what is new and what is gone."""
    title = f"# The house at {found['commit']}"
    text = "\n\n".join((title, table(found, earlier), NOTES, folders(found))) + "\n"
    if found["not imported for the tables"]:
        text += f"\nNot looked at for tables: {', '.join(found['not imported for the tables'])}.\n"
    if "watchers" in found:
        text += f"\n## Watchers\n\n{found['watchers']['about']}\n\n{watchers(found)}\n"
    return text


def table(found: Mapping[str, Any], earlier: Mapping[str, Any] | None) -> str:
    """One row for each figure."""
    before = {} if earlier is None else earlier["figures"]
    header, rule = ["figure", found["commit"], "which"], ["---", "---:", "---"]
    if earlier is not None:
        header = ["figure", earlier["commit"], found["commit"], "new", "gone"]
        rule = ["---", "---:", "---:", "---", "---"]
    lines = [_row(header), _row(rule)]
    for what, figure in found["figures"].items():
        cells = [what, _number(figure)]
        if earlier is None:
            cells.append(_listed(figure["where"]))
        else:
            old = before.get(what)
            cells.insert(1, "" if old is None else _number(old))
            ours, theirs = Counter(figure["where"]), Counter(old["where"] if old else ())
            cells += [_listed([*(a - b).elements()]) for a, b in ((ours, theirs), (theirs, ours))]
        lines.append(_row(cells))
    return "\n".join(lines)


def folders(found: Mapping[str, Any]) -> str:
    """Lines by folder."""
    total = Lines()
    lines = [_row(["folder", "files", "lines", "code", "docstring", "blank, comment"])]
    lines.append(_row(["---", *["---:"] * 5]))
    for name, numbers in found["folders"].items():
        each = Lines(**numbers)
        total += each
        lines.append(_lines(name, each))
    return "\n".join([*lines, _lines("**all**", total)])


def _lines(name: str, each: Lines) -> str:
    numbers = (each.files, each.all, each.code, each.docstring, each.other)
    return _row([name, *(f"{number:,}" for number in numbers)])


def watchers(found: Mapping[str, Any]) -> str:
    """Rows of the measurement."""
    rows = found["watchers"]["rows"]
    header = list(max(rows, key=len))
    lines = [_row(header), _row(["---"] * len(header))]
    return "\n".join([*lines, *(_row([str(row.get(key, "")) for key in header]) for row in rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(figure: Mapping[str, Any]) -> str:
    return f"{figure['value']:,}{figure['unit']}"


def _listed(where: Sequence[str]) -> str:
    more = f", and {len(where) - SHOWN} more" if len(where) > SHOWN else ""
    return ", ".join(where[:SHOWN]) + more


def measure(root: Path, rounds: int, case: str) -> dict[str, Any]:
    """What the watchers cost, with the state of the machine."""
    from benchmarks.house.watchers import NOT_SWITCHED  # imports torch

    load, options = [os.getloadavg()[0]], ("--rounds", str(rounds), "--case", case)
    rows = [json.loads(line) for line in ask("watchers", root, *options)]
    load.append(os.getloadavg()[0])
    about = (
        f"Step with the watcher to the step without it, in the same run, {rounds} rounds; median "
        "+- standard error of the median (middle half). Wall time is that of the slowest rank, "
        f"processor time that of all. {NOT_SWITCHED} {platform.machine()}, {os.cpu_count()} cores, "
        f"load average {load[0]:.1f} before and {load[1]:.1f} after the measurement, which itself "
        f"adds up to 2 (above that, read processor time: wall time is the others'); "
        f"Python {platform.python_version()}, gloo, one thread a process."
    )
    return {"about": about, "rows": rows}


def main() -> None:
    """Count, trace, measure where it is asked for, print, and keep."""
    about = (benchmarks.house.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.house", description=about)
    parser.add_argument("--root", type=Path, default=HERE, help="checkout to look at")
    parser.add_argument("--against", type=Path, metavar="RECORD", help="JSON of an earlier call")
    parser.add_argument("--no-step", action="store_true", help="count in the source alone")
    parser.add_argument("--watchers", action="store_true", help="measure what they cost in a step")
    parser.add_argument("--rounds", type=int, default=150, help="of the watchers")
    parser.add_argument("--case", default="", help="only cases of the watchers with this in them")
    parser.add_argument("--output", type=Path, help="folder for house-COMMIT.md and .json")
    given = parser.parse_args()
    root = given.root.resolve()
    found = record(root, step=not given.no_step)
    if given.watchers:
        found["watchers"] = measure(root, given.rounds, given.case)
    earlier = json.loads(given.against.read_text()) if given.against else None
    print(page(found, earlier))
    if given.output:
        stem = given.output / f"house-{found['commit']}"
        stem.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
        stem.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
