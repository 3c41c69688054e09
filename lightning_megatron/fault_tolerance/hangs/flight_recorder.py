"""The latest collectives of every process group, from torch's flight recorders.

A recorder numbers the collectives of each group. All ranks of a group go through the same
numbers, so a rank whose highest number is below that of a collective which others have begun is
the one that they wait for, whatever it does instead.

The recorders outlive the groups. When a process destroys them and makes others, for another run,
these have the names of the old ones and are numbered from the beginning; the old ones may have come
further, and must not be taken for the new.

A rank that skips a collective waits in the next one, while its peers wait for it in that which it
skipped: each side waits for the other, since about the same moment. What tells them apart is what
came before. Training repeats itself, so the rank whose last collective is not what followed on the
same ones in earlier steps is the one that strayed.

This file runs in a process without torch, see `node_monitor`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_HISTORY, _CONTEXT = 600, 64
"""Collectives that are remembered, and compared."""


@dataclass(frozen=True)
class Collective:
    """A collective of one rank."""

    group: str
    number: int
    name: str
    shapes: str
    began: int
    """Wall clock, nanoseconds."""
    completed: bool
    axis: str = ""
    """Axis of the layout that the group belongs to, if it has a name."""

    def __str__(self) -> str:
        axis = f" ({self.axis})" if self.axis else ""
        return f"{self.name} {self.shapes}, number {self.number} of group {self.group}{axis}"


def latest(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Last collective of each group as JSON values.

    Args:
        trace: result of `_torch.flight_recorder`.
    """
    last: dict[str, dict[str, Any]] = {}
    for entry in trace.get("entries", ()):
        if entry.get("is_p2p"):
            continue
        group = _group(entry)
        number = int(entry.get("collective_seq_id", 0))
        began = int(entry.get("time_created_ns", 0))
        if group in last and last[group]["began"] > began:
            continue
        shapes = entry.get("input_sizes") or entry.get("output_sizes") or []
        last[group] = {
            "group": group,
            "number": number,
            "name": str(entry.get("profiling_name", "?")).rpartition(":")[2],
            "shapes": " ".join("x".join(map(str, shape)) or "scalar" for shape in shapes[:4]),
            "began": began,
            "completed": bool(entry.get("retired")) or entry.get("state") == "completed",
            "axis": _axis(entry),
        }
    return list(last.values())


def begun(trace: Mapping[str, Any]) -> list[str]:
    """Latest collectives of all groups in the order in which they began.

    Args:
        trace: result of `_torch.flight_recorder`.

    Returns:
        A text for each, equal for collectives of a kind. Collectives of an earlier run of the
        process are left out.
    """
    entries = [entry for entry in trace.get("entries", ()) if not entry.get("is_p2p")]
    entries.sort(key=lambda entry: int(entry.get("time_created_ns", 0)))
    newest = {_group(entry): entry.get("pg_id") for entry in entries}
    entries = [entry for entry in entries if entry.get("pg_id") == newest[_group(entry)]]
    return [_kind(entry) for entry in entries[-_HISTORY:]]


def _group(entry: Mapping[str, Any]) -> str:
    return str(entry.get("process_group", ["?"])[0])


def _axis(entry: Mapping[str, Any]) -> str:
    """Name of an axis from what its group was described by; those of meshes have a prefix."""
    described = str([*entry.get("process_group", ()), "", ""][1])
    return "" if described in ("undefined", "default_pg") else described.removeprefix("mesh_")


def _kind(entry: Mapping[str, Any]) -> str:
    name, sizes = entry.get("profiling_name"), entry.get("input_sizes")
    if "all_to_all" in str(name):  # how many tokens go to experts is another number in each step
        sizes = [list(shape)[1:] for shape in sizes or ()]
    return f"{_group(entry)} {name} {sizes}"


def strayed(kinds: Sequence[str]) -> bool:
    """Whether the last collective differs from the one that followed the same sequence before.

    Args:
        kinds: result of `begun`. The collectives before the last one are searched for the longest
            equal sequence (the latest of several); what followed it is expected now. False without
            an equal sequence.
    """
    last = len(kinds) - 1
    due, furthest = None, 0
    for place in range(1, last):
        agree = 0
        while agree < min(place, _CONTEXT) and kinds[place - 1 - agree] == kinds[last - 1 - agree]:
            agree += 1
        if agree and agree >= furthest:
            due, furthest = kinds[place], agree
    return due is not None and due != kinds[last]


def counts(status: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, list[int]]:
    """Collectives begun and completed by group, from the recorder's status of the groups.

    Args:
        status: ``pg_status`` of the recorder, by its own numbers of groups.
        names: names of the groups by these numbers.
    """
    found = {}
    for number, state in sorted(status.items(), key=lambda item: _made(item[0])):
        begun = int(state.get("last_enqueued_collective", -1))
        completed = int(state.get("last_completed_collective", -1))
        found[names.get(number, f"#{number}")] = [max(begun, 0), max(completed, 0)]
    return found


def _made(number: str) -> int:
    """Position of a group in the order of creation, which each recorder's number is."""
    place = number.rpartition(":")[2]
    return int(place) if place.isdecimal() else -1


def open_on_device(status: Mapping[str, Any], recorder: str) -> dict[str, tuple[int, int]]:
    """Collectives begun and completed by the groups of a device that have not completed all.

    Where two looks in a row find the same, the device waits for other ranks: the host enqueues
    its collectives and goes on, until it needs a number, at some place that nobody can see.

    Args:
        status: ``pg_status`` of the recorders, by their own numbers of groups.
        recorder: begin of the numbers of the device's groups.
    """
    found = {}
    for number, state in status.items():
        begun = int(state.get("last_enqueued_collective", -1))
        completed = int(state.get("last_completed_collective", -1))
        if number.startswith(recorder) and begun > max(completed, 0):
            found[number] = begun, completed
    return found


def group_names(trace: Mapping[str, Any]) -> dict[str, str]:
    """Names of groups by the recorder's own numbers."""
    return {
        str(entry["pg_id"]): str(entry["process_group"][0])
        for entry in trace.get("entries", ())
        if "pg_id" in entry and entry.get("process_group")
    }


@dataclass(frozen=True)
class Missing:
    """Collective that some ranks have begun and others have not."""

    collective: Collective
    begun_by: tuple[int, ...]
    ranks: tuple[int, ...]
    """Ranks that have not begun it."""


def first_missing(
    collectives: Mapping[int, Sequence[Collective]],
    groups: Mapping[str, Iterable[int]],
    astray: Collection[int] = (),
) -> Missing | None:
    """Collective in which ranks wait for others to begin it; of several, the one that was due.

    Args:
        collectives: last collective of each group, by rank; ranks without an answer are left out.
        groups: ranks of each group.
        astray: ranks in a collective that breaks the order of their earlier steps (`strayed`).
    """
    found: list[Missing] = []
    for group, ranks in groups.items():
        at = {
            rank: next((c for c in collectives[rank] if c.group == group), None)
            for rank in ranks
            if rank in collectives
        }
        highest = max((c.number for c in at.values() if c is not None), default=0)
        ahead = [c for c in at.values() if c is not None and c.number == highest]
        behind = tuple(r for r, c in at.items() if c is None or c.number < highest)
        if behind and ahead:
            first = min(ahead, key=lambda c: c.began)
            begun = tuple(r for r in at if r not in behind)
            if not all(c.completed for c in ahead):
                found.append(Missing(first, begun, behind))

    def order(missing: Missing) -> tuple[bool, int]:
        blamed = any(rank in astray for rank in missing.ranks)
        sound = not any(rank in astray for rank in missing.begun_by)
        return not (blamed and sound), missing.collective.began

    return min(found, key=order, default=None)
