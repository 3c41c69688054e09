"""Report of a hang: a dictionary for programs, a text file, and a few lines for the console.

This file runs in a process without torch, see `node_monitor`.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_megatron.fault_tolerance.hangs.diagnosis import (
    ABSENT,
    GONE,
    SILENT,
    Diagnosis,
    RankView,
)
from lightning_megatron.fault_tolerance.hangs.flight_recorder import Collective, Missing
from lightning_megatron.fault_tolerance.hangs.stack_dump import Frame

VERSION = 1
_SHOWN, _KEPT = 4, 30
"""Frames in the block on the console and in the dictionary; the text has all."""


def describe(
    suspicion: Diagnosis,
    views: Sequence[RankView],
    collectives: Mapping[int, Sequence[Collective]],
    missing: Missing | None,
    stacks: Mapping[int, Sequence[Frame]],
    nodes: int = 1,
) -> dict[str, Any]:
    """Make the report as a dictionary.

    Args:
        suspicion: ranks that hang.
        views: ranks that can be seen.
        collectives: last collective of each group, by rank.
        missing: collective in which ranks wait.
        stacks: frames of the training threads, innermost first.
        nodes: number of nodes of the run.
    """
    ranks = [_of_rank(v, collectives.get(v.rank, ()), stacks.get(v.rank, ())) for v in views]
    return {
        "v": VERSION,
        "t": time.time(),
        "mono": time.monotonic(),
        "step": max((v.beat.step for v in views if v.rank in suspicion.ranks), default=0),
        "reason": suspicion.reason,
        "nodes": nodes,
        "culprits": [entry for entry in ranks if entry["rank"] in suspicion.ranks],
        "waiting": [v.rank for v in views if v.late and v.rank not in suspicion.ranks],
        "waiting_in": None if missing is None else str(missing.collective),
        "ranks": ranks,
    }


def _of_rank(view: RankView, last: Sequence[Collective], frames: Sequence[Frame]) -> dict[str, Any]:
    return {
        "rank": view.rank,
        "host": view.member.host,
        "pid": view.member.pid,
        "section": view.beat.section,
        "step": view.beat.step,
        "seconds": round(view.stall, 3),
        "limit": view.limit,
        "waits": view.beat.waiting,
        "left": view.beat.left,
        "silence": round(view.silence, 3),
        "process": str(view.process),
        "collectives": [str(collective) for collective in last],
        "stack": [str(frame) for frame in frames[:_KEPT]],
    }


def describe_silence(
    silent: Sequence[str],
    seconds: float,
    limit: float,
    host: str,
    views: Sequence[RankView],
    away: Sequence[RankView],
    stacks: Mapping[int, Sequence[Frame]],
) -> dict[str, Any]:
    """Make the report of silent nodes as a dictionary.

    Args:
        silent: these nodes, with their ranks.
        seconds: seconds since their last message.
        limit: seconds that they may be silent.
        host: node that reports.
        views: ranks of that node.
        away: ranks of the silent nodes by their last message.
        stacks: frames of the training threads, innermost first.
    """
    blamed = Diagnosis(tuple(v.rank for v in away), SILENT, certain=True)
    found = describe(blamed, [*views, *away], {}, None, stacks, nodes=2)
    here = [v for v in views if not v.beat.left]
    return {
        **found,
        # It took part in all steps that were done here, also after its last message.
        "step": max((v.beat.step for v in (*here, *away)), default=0),
        "waiting": [v.rank for v in here],
        "silent": list(silent),
        "seconds": round(seconds, 3),
        "limit": limit,
        "host": host,
    }


def title(report: Mapping[str, Any]) -> str:
    """The hang in one line."""
    if report["reason"] == SILENT:
        have = "have" if len(report["silent"]) > 1 else "has"
        return f"{' and '.join(report['silent'])} {have} been silent since step {report['step']}"
    several = report["nodes"] > 1
    parts = [_what(culprit, report["reason"], several) for culprit in report["culprits"]]
    return f"{'; '.join(parts)} at step {report['step']}"


def _what(culprit: Mapping[str, Any], reason: str, with_host: bool) -> str:
    rank = f"rank {culprit['rank']}" + (f" ({culprit['host']})" if with_host else "")
    if reason == ABSENT:
        return f"{rank} has left training while others wait for it"
    if reason == GONE:
        return f"{rank} is gone while others wait for it"
    return f"{rank} hangs in {culprit['section']}"


def summary(report: Mapping[str, Any]) -> list[str]:
    """Lines for the console."""
    if report["reason"] == SILENT:
        return _summary_of_silence(report)
    rows = []
    for entry in report["culprits"]:
        rows.append(
            f"rank {entry['rank']} (host {entry['host']}, pid {entry['pid']}): {entry['section']} "
            f"for {entry['seconds']:.1f} s, limit {entry['limit']:.1f} s; {report['reason']}; "
            f"process {entry['process']}"
        )
        rows += [f"  at {frame}" for frame in entry["stack"][:_SHOWN]]
        rows += [f"  last collective: {last}" for last in entry["collectives"]]
    if report["waiting"]:
        rows.append(f"waiting for it: {_ranks(report['waiting'])}{_where(report)}")
    return [*rows, report["note"]] if "note" in report else rows


def _summary_of_silence(report: Mapping[str, Any]) -> list[str]:
    rows = [
        f"{report['host']} has had no message from there for {report['seconds']:.1f} s (node_limit "
        f"{report['limit']:.1f} s): that machine is off or stands still, or its link is broken",
        f"or the connection of {report['host']} itself is broken",
    ]
    for entry in report["culprits"]:
        rows.append(
            f"rank {entry['rank']} (host {entry['host']}, pid {entry['pid']}) was last in "
            f"{entry['section']} of step {entry['step']}"
        )
    if report["waiting"]:
        rows.append(f"waiting here: {_ranks(report['waiting'])}")
    return rows


def _ranks(numbers: Sequence[int]) -> str:
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"


def _where(report: Mapping[str, Any]) -> str:
    return f" in {report['waiting_in']}" if report["waiting_in"] else ""


def write_text(path: Path, report: Mapping[str, Any], stacks: Mapping[int, str]) -> None:
    """Write the report as text, with the stacks of all threads."""
    rows = [title(report), "", *summary(report), ""]
    for entry in report["ranks"]:
        state = "waits" if entry["waits"] else "has left" if entry["left"] else "does not wait"
        rows += [
            f"--- rank {entry['rank']}, host {entry['host']}, pid {entry['pid']} ---",
            f"{entry['section']} of step {entry['step']} for {entry['seconds']:.1f} s "
            f"(limit {entry['limit']:.1f} s); {state}; process {entry['process']}",
            *(f"last collective: {last}" for last in entry["collectives"]),
            stacks.get(entry["rank"], "") or "no stacks: the process did not answer",
            "",
        ]
    path.write_text("\n".join(rows))
