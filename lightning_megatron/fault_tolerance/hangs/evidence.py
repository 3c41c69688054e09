"""What the ranks of a node show of themselves when one of them seems to hang.

A rank that can still run Python writes down the latest collectives of its groups and the stacks of
its threads when its page says so (`watchdog`); of any other the stacks come by a signal (`stacks`).

This file runs in a process without torch, see `node_monitor`.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_megatron.fault_tolerance.hangs import stack_dump as stacks
from lightning_megatron.fault_tolerance.hangs.diagnosis import View
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
"""How long a rank may take to show its stacks and collectives."""
_SIGNAL_S = 0.3
"""How long a signal may take to make it show its stacks."""
_OF_RANK = " of rank "


@dataclass
class Evidence:
    """What the ranks answered."""

    collectives: dict[int, list[Collective]]
    groups: dict[str, list[int]]
    texts: dict[int, str]
    frames: dict[int, list[Frame]]
    mute: int = 0
    """How many ranks gave no answer in time."""
    astray: set[int] = field(default_factory=set)
    """Ranks that are in a collective whose turn it was not."""

    @property
    def missing(self) -> Missing | None:
        """The collective that is waited in, if the flight recorders show one."""
        return first_missing(self.collectives, self.groups, self.astray)

    def packed(self) -> dict[str, Any]:
        """All but the texts, for JSON."""
        return {
            "collectives": {r: [asdict(c) for c in cs] for r, cs in self.collectives.items()},
            "groups": self.groups,
            "frames": {r: [asdict(f) for f in fs] for r, fs in self.frames.items()},
            "mute": self.mute,
            "astray": sorted(self.astray),
        }

    def add(self, packed: Mapping[str, Any]) -> None:
        """Take in what another node has `packed`."""
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
        """Take in what some ranks know of collectives and groups.

        torch gives groups the same name that different ranks make at the same point. Those that
        are not of the group that has the name already get another one here.
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
    directory: Path, order: int, views: Sequence[View], page_of: Callable[[int], Page]
) -> Evidence:
    """Have the ranks tell what they can, and look at the others by signal.

    Args:
        directory: of the node's ranks.
        order: number of the order to tell, new to them.
        views: the ranks.
        page_of: gives the page of a rank.
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
    directory: Path, order: int, view: View, deadline: float, evidence: Evidence
) -> bool:
    """Take the rank's answer; whether there was one."""
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
