"""A series of mutations: its record, the trials that fill it in, and what it comes to."""

import collections
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.mutations.choice import Suite
from benchmarks.mutations.draw import PACKAGE, Mutation, apply
from benchmarks.mutations.lane import Lane, in_a_fork, watch_over_children
from benchmarks.mutations.trial import Trial

KILLED = ("killed", "killed (hung)", "killed (crashed)")
GONE = "no longer there"


@dataclass
class Series:
    """Mutations, what became of them, and the file that says so."""

    record: Path
    data: dict[str, Any]

    def write(self) -> None:
        self.record.parent.mkdir(parents=True, exist_ok=True)
        draft = self.record.with_suffix(".part")
        draft.write_text(json.dumps(self.data, indent=1) + "\n")
        draft.replace(self.record)

    def run(self, root: Path, jobs: int) -> None:
        """Try all that have no result yet, ``jobs`` of them at a time."""
        suite = Suite(root)
        ahead = [i for i, row in enumerate(self.data["mutations"]) if "result" not in row]
        running: dict[int, tuple[int, Lane, Path]] = {}
        with tempfile.TemporaryDirectory(prefix="mutations-") as name:
            free = [Lane(Path(name, str(job)), root, self.data["hang"]) for job in range(jobs)]
            while ahead or running:
                while ahead and free:
                    index, lane = ahead.pop(0), free.pop()
                    answer = Path(name, f"{index}.json")
                    child = in_a_fork(partial(self._try, index, suite, lane, answer))
                    running[child] = (index, lane, answer)
                child, _ = os.wait()
                index, lane, answer = running.pop(child)
                free.append(lane)
                self._take(index, answer)

    def _try(self, index: int, suite: Suite, lane: Lane, answer: Path) -> int:
        """Try one mutation in this process."""
        watch_over_children()
        row = self.data["mutations"][index]
        mutation = Mutation(**{one.name: row[one.name] for one in fields(Mutation)})
        file, controls = lane.root / mutation.path, dict(self.data["controls"])
        source = apply(file.read_text(), mutation) if file.exists() else None
        result: dict[str, Any] = {"outcome": GONE}
        if source is not None:
            killer = row.get("earlier", {}).get("by")
            first = suite.killer(killer) if killer else []
            trial = Trial(lane, mutation.path, source, self.data["budget"], controls)
            result = trial.run(first + suite.steps(mutation.path))
        answer.write_text(json.dumps({"result": result, "controls": controls}))
        return 0

    def _take(self, index: int, answer: Path) -> None:
        row = self.data["mutations"][index]
        if not answer.exists():
            print(f"{index}: no answer; --resume tries it again", flush=True)
            return
        found = json.loads(answer.read_text())
        row["result"] = found["result"]
        self.data["controls"] |= found["controls"]
        self.write()
        print(line(index, row), flush=True)


def line(index: int, row: dict[str, Any]) -> str:
    """A mutation and what became of it."""
    result = row.get("result", {})
    text = f"{index:3} {row['path'].removeprefix(PACKAGE + '/')}:{row['line']} {row['kind']}: "
    text += f"`{_cut(row['before'])}` -> `{_cut(row['after'])}`"
    text += f" | {result.get('outcome', 'not tried')}"
    return text + (f" by {result['by']}" if result.get("by") else "")


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def lost(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Numbers of those that an earlier series killed and this one did not."""
    return [
        index
        for index, row in enumerate(rows)
        if _outcome(row, "earlier") in KILLED and _outcome(row) not in (*KILLED, GONE, "")
    ]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Counts by kind and by outcome."""
    outcomes = collections.Counter(_outcome(row) or "not tried" for row in rows)
    lines = [f"{len(rows)} mutations: " + ", ".join(f"{n} {o}" for o, n in outcomes.items())]
    groups: dict[str, list[bool]] = collections.defaultdict(list)
    for title in ("kind", "folder"):
        for row in rows:
            name = row["kind"] if title == "kind" else row["path"].split("/")[1]
            groups[f"{title} {name}"].append(_outcome(row) in KILLED)
    lines += [f"  {group}: {sum(of)} of {len(of)} killed" for group, of in groups.items()]
    return "\n".join(lines)


def _outcome(row: dict[str, Any], key: str = "result") -> str:
    return str(row.get(key, {}).get("outcome", ""))
