"""Evidence of a hang: the last collectives and the stacks of the ranks of a node.

A rank that can still run Python writes both when its page orders it (`watchdog`). The stacks of
other ranks are requested by a signal (`stack_dump`).

This file runs in a process without torch, see `node_monitor`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_megatron.fault_tolerance.hangs import stack_dump as stacks
from lightning_megatron.fault_tolerance.hangs.diagnosis import RankView
from lightning_megatron.fault_tolerance.hangs.flight_recorder import (
    Collective,
    Missing,
    first_missing,
    strayed,
)
from lightning_megatron.fault_tolerance.hangs.heartbeat import (
    TELL,
    Beat,
    Page,
    stack_file,
    trace_file,
)
from lightning_megatron.fault_tolerance.hangs.stack_dump import Frame

_ANSWER_S = 1.0
"""Seconds in which a rank must write its stacks and collectives."""
_SIGNAL_S = 0.3
"""Seconds in which stacks requested by a signal must be written."""
_OF_RANK = " of rank "


@dataclass
class Evidence:
    """Answers of the ranks."""

    collectives: dict[int, list[Collective]]
    groups: dict[str, list[int]]
    texts: dict[int, str]
    frames: dict[int, list[Frame]]
    mute: int = 0
    """Number of ranks without an answer in time."""
    astray: set[int] = field(default_factory=set)
    """Ranks in a collective that breaks the order of their earlier steps."""

    @property
    def missing(self) -> Missing | None:
        """Collective in which ranks wait, if the flight recorders show one."""
        return first_missing(self.collectives, self.groups, self.astray)

    def packed(self) -> dict[str, Any]:
        """Everything but the texts, for JSON."""
        return {
            "collectives": {r: [asdict(c) for c in cs] for r, cs in self.collectives.items()},
            "groups": self.groups,
            "frames": {r: [asdict(f) for f in fs] for r, fs in self.frames.items()},
            "mute": self.mute,
            "astray": sorted(self.astray),
        }

    def add(self, packed: Mapping[str, Any]) -> None:
        """Add the `packed` evidence of another node."""
        collectives = {
            int(rank): [Collective(**entry) for entry in entries]
            for rank, entries in packed["collectives"].items()
        }
        self.take(collectives, packed["groups"])
        for rank, entries in packed["frames"].items():
            self.frames[int(rank)] = [Frame(**entry) for entry in entries]
        self.mute += int(packed["mute"])
        self.astray.update(packed["astray"])

    def take(
        self, collectives: Mapping[int, list[Collective]], groups: Mapping[str, list[int]]
    ) -> None:
        """Add collectives and groups of some ranks.

        torch gives the groups that different ranks make at the same point the same name. A group
        with other ranks than the known group of that name gets another name here.
        """
        names = {}
        for name, ranks in groups.items():
            short = name.partition(_OF_RANK)[0]
            both = (short, f"{short}{_OF_RANK}{ranks[0]}")
            known = [known for known in both if self.groups.get(known) == ranks]
            names[name] = known[0] if known else both[short in self.groups]
            self.groups[names[name]] = ranks
        for rank, entries in collectives.items():
            self.collectives[rank] = [
                replace(entry, group=names.get(entry.group, entry.group)) for entry in entries
            ]


def collect(
    directory: Path, order: int, views: Sequence[RankView], page_of: Callable[[int], Page]
) -> Evidence:
    """Order the ranks to write their evidence, and request the stacks of the others by signal.

    Args:
        directory: directory of the node's ranks.
        order: a new number for the order.
        views: the ranks.
        page_of: returns the page of a rank.
    """
    here = [v for v in views if not v.beat.left and not v.gone and not v.process.stopped]
    sizes = {v.rank: stacks.size_of(stack_file(directory, v.rank)) for v in here}
    for view in here:
        page_of(view.rank).give(order, TELL)
    evidence = Evidence({v.rank: _of_sample(v.beat) for v in views}, {}, {}, {})
    deadline = time.monotonic() + _ANSWER_S
    mute = [v for v in here if not _read_trace(directory, order, v, deadline, evidence)]
    evidence.mute = len(mute)
    for view in mute:
        stacks.ask(view.member.pid)
    deadline = max(deadline, time.monotonic() + _SIGNAL_S)
    for view in here:
        file = stack_file(directory, view.rank)
        text = stacks.read_since(file, sizes[view.rank], deadline)
        evidence.texts[view.rank] = text
        evidence.frames[view.rank] = stacks.frames_of(text, view.member.thread)
    return evidence


def _read_trace(
    directory: Path, order: int, view: RankView, deadline: float, evidence: Evidence
) -> bool:
    """Add the rank's answer; returns whether there was one."""
    file = trace_file(directory, view.rank, order)
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if not file.exists():
        return False
    answer = json.loads(file.read_text())
    file.unlink()
    found = {view.rank: [Collective(**c) for c in answer["collectives"]]}
    evidence.take(found, answer["groups"])
    if strayed(answer["begun"]):
        evidence.astray.add(view.rank)
    return True


def _of_sample(beat: Beat) -> list[Collective]:
    return [
        Collective(group, begun, "collective", "", 0, begun == completed)
        for group, (begun, completed) in beat.collectives.items()
    ]
