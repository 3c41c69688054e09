"""The monitor: a process that checks the ranks of a node for hangs.

It reads the ranks' pages (`heartbeat`), decides whether one of them hangs (`diagnosis`), collects
evidence, writes a report and acts. It is a process of its own, as nothing in a rank that hangs can
be relied on: a C call that holds the GIL or a signal stops all threads, and a run may have one rank
only. It has no torch and 10 MB of memory, checks twice a second, has a session of its own so that
signals to the job do not reach it, and ends with the last of its ranks.

A stall is the time in which the running monitor saw no progress of a rank. So no rank seems to hang
after a machine was suspended.

The monitors of several nodes exchange messages (`node_watch`): a node that is silent is reported,
and all nodes report and act on the hang that one has found.
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
from lightning_megatron.fault_tolerance.hangs.diagnosis import RankView, confirm, suspect
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
"""Attempts to get answers of all ranks before a diagnosis is made without them."""
_EXIT_GRACE_S = 10.0
_RAISE_GRACE_S = 20.0
_SILENCE = 4
"""Checks without a heartbeat after which a rank counts as unable to run Python."""


@dataclass(frozen=True)
class MonitorConfig:
    """Config of the monitor, see `watchdog.start_monitor`."""

    members: tuple[Member, ...]
    reports: str
    """Directory for reports."""
    name: str
    """Prefix of the names of reports."""
    action: str
    check_s: float
    watch: NodeWatchConfig | None = None
    """Config for the other nodes; None if there are none."""

    @property
    def whole(self) -> bool:
        """Whether ``members`` are all ranks of the run."""
        return self.watch is None

    @staticmethod
    def read(directory: Path) -> "MonitorConfig":
        """Read the config from a directory."""
        found = json.loads((directory / CONFIG).read_text())
        found["members"] = tuple(Member(**member) for member in found["members"])
        if found["watch"] is not None:
            found["watch"] = NodeWatchConfig.of(found["watch"])
        return MonitorConfig(**found)

    def write(self, directory: Path) -> None:
        """Write the config to a directory."""
        write_whole(directory / CONFIG, asdict(self))


@dataclass
class _Watched:
    """A rank, and the seconds that it stands still."""

    member: Member
    page: Page
    progress: tuple[int, int] = (-1, -1)
    stall: float = 0.0


class NodeMonitor:
    """Checks the ranks of a node.

    Args:
        directory: directory with their pages.
        config: the ranks, and the action on a hang.
    """

    def __init__(self, directory: Path, config: MonitorConfig) -> None:
        self._directory = directory
        self._config = config
        self._watched = [_Watched(m, Page(page_file(directory, m.rank))) for m in config.members]
        self._looked = time.monotonic()
        self._orders = 0
        self._told: dict[int, tuple[int, int]] = {}
        """Progress of the ranks that the latest report names."""
        self._pause_until = 0.0
        self._tries = 0
        self._passed = 0.0
        self._ends = False
        self._watch: NodeWatch | None = None
        if config.watch is not None:
            patience, views = _SILENCE * config.check_s, self.look()
            self._watch = NodeWatch(config.watch, config.check_s, patience, self, views)

    def run(self) -> None:
        """Check until all ranks have left or ended."""
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

    def look(self) -> list[RankView]:
        """Read the state of all ranks."""
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
            views.append(RankView(watched.member, beat, state, watched.stall, limit, silence))
        asleep = self._asleep
        if all(v.process.stopped for v in views) if asleep is None else asleep:
            for watched in self._watched:
                watched.stall = 0.0  # the run is suspended; the stall counts from its end
        return views

    @property
    def _asleep(self) -> bool | None:
        """Whether the ranks of all nodes are stopped; None on a single node."""
        return None if self._watch is None else self._watch.asleep

    def act_on(self, views: Sequence[RankView]) -> None:
        """Report a hang, once, and act."""
        by_rank = {v.rank: v.beat.progress for v in views}
        hung = bool(self._told)
        self._told = {r: p for r, p in self._told.items() if by_rank[r] == p}
        if hung and not self._told:
            # Who goes on kept the others waiting: their own time begins now.
            for watched in self._watched:
                watched.stall = 0.0
            return
        if self._told or time.monotonic() < self._pause_until:
            return
        whole, patience = self._config.whole, _SILENCE * self._config.check_s
        suspicion = suspect(views, patience, whole=whole, asleep=self._asleep)
        if suspicion is None:
            return
        evidence = self.collect(views)
        if evidence.mute and not suspicion.certain:
            # That took a while, and their state may now show why they do not answer.
            views = self.look()
            suspicion = suspect(views, patience, whole=whole, asleep=self._asleep)
            if suspicion is None:
                return
        self._tries += 1
        if evidence.mute and not suspicion.certain and self._tries < _TRIES:
            return  # on a busy machine, evidence without the silent ranks would point to them
        self._tries = 0
        found = confirm(suspicion, views, evidence.missing, evidence.frames, whole=whole)
        if found is None:
            self._pause_until = time.monotonic() + 4 * self._config.check_s
            return
        # Not the ranks that wait: they may make no progress until the next hang.
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
        views: Sequence[RankView],
        texts: Mapping[int, str],
        *,
        told: bool = False,
    ) -> None:
        """Report a hang, also to the other nodes, and act.

        Args:
            report: the report.
            views: ranks of this node.
            texts: their stacks.
            told: whether the report is of another node.
        """
        if self._ends:
            return  # because of an earlier report
        self._ends = self._config.action == "abort"
        self.hold()
        path = self._write(report, texts)
        rows = summary(report)
        rows += [f"stacks of all ranks: {path}"] if path else []
        announce(title(report), [*rows, f"action: {self._config.action}"])
        report = {"path": path, **report}  # the file of the node that found it has priority
        if self._watch is not None:
            self._watch.agree(report, told=told)
        self._do(views, report)

    def hold(self) -> None:
        """Tell the ranks that they are about to be ended because of a hang."""
        if self._config.action == "abort":
            for watched in self._watched:
                watched.page.hold()

    # Evidence ------------------------------------------------------------------------------------

    def collect(self, views: Sequence[RankView]) -> Evidence:
        """Collect the evidence of the ranks."""
        self._orders += 1
        return collect(self._directory, self._orders, views, self._page)

    def _page(self, rank: int) -> Page:
        return next(w.page for w in self._watched if w.member.rank == rank)

    # Consequences --------------------------------------------------------------------------------

    def _write(self, report: Mapping[str, Any], texts: Mapping[int, str]) -> str | None:
        """Write the report; returns the path of the text, or None if it cannot be written."""
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

    def _do(self, views: Sequence[RankView], report: Mapping[str, Any]) -> None:
        here = [v for v in views if not v.beat.left and not v.gone]
        able = [v for v in here if v.silence <= _SILENCE * self._config.check_s]
        able = [v for v in able if not v.process.stopped]
        self._orders += 1
        order = {"action": self._config.action, "teller": able[0].rank if able else -1}
        kind = REPORTED
        try:
            write_whole(report_file(self._directory, self._orders), {**order, "report": report})
        except OSError as error:  # disk full: the ranks get only the order to end
            announce("the report of a hang cannot be passed to the ranks", [str(error)])
            kind = EXIT if self._config.action == "abort" else NOTHING
        for view in here:
            self._page(view.rank).give(self._orders, kind)
        if self._config.action == "abort":
            self._kill([v for v in here if v not in able])
            self._end(here, _EXIT_GRACE_S)
        elif self._config.action == "raise":
            self._end([v for v in here if v in able], _RAISE_GRACE_S)
            self._kill([v for v in here if v not in able])

    def _end(self, views: Sequence[RankView], grace: float) -> None:
        """Give ranks time to end or to make progress, and kill the others."""
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

    def _has_moved(self, view: RankView) -> bool:
        beat, state = self._page(view.rank).read(), state_of(view.member.pid)
        same = state.exists and state.started == view.member.started
        return beat.left or not same or beat.progress != view.beat.progress

    def _kill(self, views: Sequence[RankView]) -> None:
        for view in views:
            if state_of(view.member.pid).started == view.member.started:
                os.kill(view.member.pid, signal.SIGKILL)


def main() -> None:
    """Check the ranks of the directory in the first argument; outlives the caller."""
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
