"""The process that watches the ranks of a node.

It reads the ranks' pages (`heartbeat`), decides whether one of them hangs (`verdict`), collects
evidence, writes a report and does what is to be done about it. It is a process of its own, because
nothing in a rank can be relied on when the rank hangs: a C call that keeps Python's lock stops all
threads, a signal stops all of them, and a run may have one rank only. It has no torch, 10 MB of
memory, looks around twice a second, belongs to a session of its own so that signals to the job pass
it by, and ends with the last of its ranks.

A stall is the time in which the monitor itself has watched a rank make no progress. After a machine
was suspended, nobody seems to have hung.

The monitors of several nodes know of each other (`node_watch`): one that hears nothing of another
node any more blames that node, and what one has found all of them report and act upon.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.hangs import stack_dump as stacks
from lightning_megatron.fault_tolerance.hangs.diagnosis import View, confirm, suspect
from lightning_megatron.fault_tolerance.hangs.evidence import Evidence, collect
from lightning_megatron.fault_tolerance.hangs.heartbeat import (
    EXIT,
    NOTHING,
    REPORTED,
    Member,
    Page,
    page_file,
    report_file,
    write_whole,
)
from lightning_megatron.fault_tolerance.hangs.node_watch import NodeWatch, NodeWatchConfig
from lightning_megatron.fault_tolerance.hangs.report import describe, summary, title, write_text
from lightning_megatron.fault_tolerance.hangs.stack_dump import state_of

CONFIG = "monitor.json"
_TRIES = 4
"""How often ranks that seem able to answer are asked, before a verdict is given without them."""
_EXIT_GRACE_S = 2.0
_RAISE_GRACE_S = 20.0
_SILENCE = 4
"""Looks after which a rank that gave no sign of life counts as unable to."""


@dataclass(frozen=True)
class MonitorConfig:
    """What the monitor is told, see `watchdog.start_monitor`."""

    members: tuple[Member, ...]
    reports: str
    """Directory for reports."""
    name: str
    """First part of the names of reports."""
    action: str
    check_s: float
    watch: NodeWatchConfig | None = None
    """Of the other nodes, where there are others."""

    @property
    def whole(self) -> bool:
        """Whether ``members`` are all ranks of the run."""
        return self.watch is None

    @staticmethod
    def read(directory: Path) -> "MonitorConfig":
        """The configuration in a directory."""
        found = json.loads((directory / CONFIG).read_text())
        found["members"] = tuple(Member(**member) for member in found["members"])
        if found["watch"] is not None:
            found["watch"] = NodeWatchConfig.of(found["watch"])
        return MonitorConfig(**found)

    def write(self, directory: Path) -> None:
        """Leave the configuration in a directory."""
        write_whole(directory / CONFIG, asdict(self))


@dataclass
class _Watched:
    """A rank, and since when it stands still."""

    member: Member
    page: Page
    progress: tuple[int, int] = (-1, -1)
    stall: float = 0.0


class NodeMonitor:
    """Watches the ranks that a directory belongs to.

    Args:
        directory: with their pages.
        config: who they are, and what follows a hang.
    """

    def __init__(self, directory: Path, config: MonitorConfig) -> None:
        self._directory, self._config = directory, config
        self._watched = [_Watched(m, Page(page_file(directory, m.rank))) for m in config.members]
        self._looked = time.monotonic()
        self._orders = 0
        self._told: dict[int, tuple[int, int]] = {}
        """Progress of the culprits of the latest report."""
        self._pause_until = 0.0
        self._tries = 0
        self._passed, self._ends = 0.0, False
        self._watch: NodeWatch | None = None
        if config.watch is not None:
            patience, views = _SILENCE * config.check_s, self.look()
            self._watch = NodeWatch(config.watch, config.check_s, patience, self, views)

    def run(self) -> None:
        """Watch until all ranks have left or ended."""
        watch = self._watch
        while True:
            if watch is None:
                time.sleep(self._config.check_s)
            else:
                watch.pause()
            views = self.look()
            if watch is not None:
                watch.post(views, self._passed)
            self.act_on(views)
            if watch is not None:
                watch.attend(views)
            if all(v.beat.left or v.gone for v in views) and not (watch and watch.needed):
                break
        if watch is not None:
            watch.leave()

    def look(self) -> list[View]:
        """How the ranks are."""
        now = time.monotonic()
        passed = self._passed = min(now - self._looked, 2 * self._config.check_s)
        self._looked = now
        beats = [w.page.read() for w in self._watched]
        limits = {name: max(b.limits[name] for b in beats) for name in beats[0].limits}
        views = []
        for watched, beat in zip(self._watched, beats, strict=True):
            moved = beat.progress != watched.progress
            watched.stall = 0.0 if moved else watched.stall + passed
            watched.progress = beat.progress
            state = state_of(watched.member.pid)
            if state.started and state.started != watched.member.started:
                state = stacks.ProcessState()
            limit = limits[beat.section]
            silence = now - beat.alive
            views.append(View(watched.member, beat, state, watched.stall, limit, silence))
        asleep = self._asleep
        if all(v.process.stopped for v in views) if asleep is None else asleep:
            for watched in self._watched:
                watched.stall = 0.0  # suspended as a whole; counted from when it goes on
        return views

    @property
    def _asleep(self) -> bool | None:
        """Whether the ranks of all nodes are stopped; None where the own ones tell."""
        return None if self._watch is None else self._watch.asleep

    def act_on(self, views: Sequence[View]) -> None:
        """Report a hang, once, and do what is to be done."""
        by_rank = {v.rank: v.beat.progress for v in views}
        self._told = {r: p for r, p in self._told.items() if by_rank[r] == p}
        if self._told or time.monotonic() < self._pause_until:
            return
        whole, patience = self._config.whole, _SILENCE * self._config.check_s
        suspicion = suspect(views, patience, whole=whole, asleep=self._asleep)
        if suspicion is None:
            return
        evidence = self.collect(views)
        if evidence.mute and not suspicion.certain:
            # It took a while, after which it may be clear why they do not answer.
            views = self.look()
            suspicion = suspect(views, patience, whole=whole, asleep=self._asleep)
            if suspicion is None:
                return
        self._tries += 1
        if evidence.mute and not suspicion.certain and self._tries < _TRIES:
            return  # a busy machine: what the others say would lay it to whoever is silent
        self._tries = 0
        found = confirm(suspicion, views, evidence.missing, evidence.frames, whole=whole)
        if found is None:
            self._pause_until = time.monotonic() + 4 * self._config.check_s
            return
        # Not those that wait for them: they may stand where they are through the next hang.
        here = [r for r in found.ranks if r in by_rank] or [v.rank for v in views if v.late]
        self._told = {r: by_rank[r] for r in here}
        nodes = 1 if self._config.watch is None else len(self._config.watch.nodes)
        report = describe(
            found, views, evidence.collectives, evidence.missing, evidence.frames, nodes
        )
        self.conclude(report, views, evidence.texts)

    def conclude(
        self,
        report: Mapping[str, Any],
        views: Sequence[View],
        texts: Mapping[int, str],
        *,
        told: bool = False,
    ) -> None:
        """Say what has happened, to the other nodes as well, and do what is to be done.

        Args:
            report: what to say.
            views: the ranks of this node.
            texts: their stacks.
            told: whether another node has found it, and knows.
        """
        if self._ends:
            return  # for another hang, or what another node says of the same
        self._ends = self._config.action == "abort"
        self.hold()
        path = self._write(report, texts)
        rows = summary(report)
        rows += [f"stacks of all ranks: {path}"] if path else []
        announce(title(report), [*rows, f"action: {self._config.action}"])
        report = {"path": path, **report}  # what counts is the file of the node that has found it
        if self._watch is not None:
            self._watch.agree(report, told=told)
        self._do(views, report)

    def hold(self) -> None:
        """Let the ranks know that a hang was found for which they are about to be ended."""
        if self._config.action == "abort":
            for watched in self._watched:
                watched.page.hold()

    # Evidence ------------------------------------------------------------------------------------

    def collect(self, views: Sequence[View]) -> Evidence:
        """Have the ranks tell what they can, and look at the others by signal."""
        self._orders += 1
        return collect(self._directory, self._orders, views, self._page)

    def _page(self, rank: int) -> Page:
        return next(w.page for w in self._watched if w.member.rank == rank)

    # Consequences --------------------------------------------------------------------------------

    def _write(self, report: Mapping[str, Any], texts: Mapping[int, str]) -> str | None:
        """The path of the text; None if it cannot be written, which is no reason to say nothing."""
        directory = Path(self._config.reports)
        name = f"{self._config.name}-step_{report['step']}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            count = 2
            while (directory / f"{name}.json").exists():
                name = f"{name.partition('.')[0]}.{count}"
                count += 1
            write_text(directory / f"{name}.txt", report, texts)
            write_whole(directory / f"{name}.json", report)
        except OSError as error:
            announce("the report of a hang cannot be written", [str(error)])
            return None
        return str(directory / f"{name}.txt")

    def _do(self, views: Sequence[View], report: Mapping[str, Any]) -> None:
        here = [v for v in views if not v.beat.left and not v.gone]
        able = [v for v in here if v.silence <= _SILENCE * self._config.check_s]
        able = [v for v in able if not v.process.stopped]
        self._orders += 1
        order = {"action": self._config.action, "teller": able[0].rank if able else -1}
        kind = REPORTED
        try:
            write_whole(report_file(self._directory, self._orders), {**order, "report": report})
        except OSError as error:  # no room: the ranks learn no more than that they are to end
            announce("the ranks cannot be told of a hang", [str(error)])
            kind = EXIT if self._config.action == "abort" else NOTHING
        for view in here:
            self._page(view.rank).give(self._orders, kind)
        if self._config.action == "abort":
            self._kill([v for v in here if v not in able])
            self._end(here, _EXIT_GRACE_S)
        elif self._config.action == "raise":
            self._end([v for v in here if v in able], _RAISE_GRACE_S)
            self._kill([v for v in here if v not in able])

    def _end(self, views: Sequence[View], grace: float) -> None:
        """Give ranks time to end, or to move on, and kill those that do neither."""
        deadline = time.monotonic() + grace
        remaining = list(views)
        while remaining and time.monotonic() < deadline:
            time.sleep(0.05)
            remaining = [v for v in remaining if not self._has_moved(v)]
        for view in remaining:
            self._page(view.rank).give(self._orders + 1, EXIT)
        if remaining:
            self._orders += 1
            time.sleep(2 * self._config.check_s)
            self._kill([v for v in remaining if not self._has_moved(v)])

    def _has_moved(self, view: View) -> bool:
        beat, state = self._page(view.rank).read(), state_of(view.member.pid)
        same = state.exists and state.started == view.member.started
        return beat.left or not same or beat.progress != view.beat.progress

    def _kill(self, views: Sequence[View]) -> None:
        for view in views:
            if state_of(view.member.pid).started == view.member.started:
                os.kill(view.member.pid, signal.SIGKILL)


def main() -> None:
    """Watch the ranks of the directory in the first argument; runs on after the caller."""
    directory = Path(sys.argv[1])
    config = MonitorConfig.read(directory)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        NodeMonitor(directory, config).run()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
