"""The process that watches the ranks of a node.

It reads the ranks' pages (`heartbeat`), decides whether one of them hangs (`verdict`), collects
evidence, writes a report and does what is to be done about it. It is a process of its own, because
nothing in a rank can be relied on when the rank hangs: a C call that keeps Python's lock stops all
threads, a signal stops all of them, and a run may have one rank only. It has no torch, 10 MB of
memory, looks around twice a second, belongs to a session of its own so that signals to the job pass
it by, and ends with the last of its ranks.

A stall is the time in which the monitor itself has watched a rank make no progress. After a machine
was suspended, nobody seems to have hung.

The monitors of several nodes know of each other by a board (`node_board`): one that hears nothing
of another node any more blames that node, and what one has found all of them report and act upon.
"""

import json
import os
import queue
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_megatron.resilience import stacks
from lightning_megatron.resilience.announce import announce
from lightning_megatron.resilience.hang_report import (
    describe,
    describe_silence,
    summary,
    title,
    write_text,
)
from lightning_megatron.resilience.heartbeat import (
    EXIT,
    NOTHING,
    REPORTED,
    TELL,
    Beat,
    Member,
    Page,
    page_file,
    report_file,
    stack_file,
    trace_file,
    write_whole,
)
from lightning_megatron.resilience.node_board import Board, BoardGuest, BoardHolder, Lost, Node
from lightning_megatron.resilience.recorder import Collective, Missing, first_missing, strayed
from lightning_megatron.resilience.stacks import Frame, state_of
from lightning_megatron.resilience.verdict import (
    ABSENT,
    ENTANGLED,
    GONE,
    Suspicion,
    View,
    confirm,
    suspect,
)

CONFIG = "monitor.json"
_ANSWER_S = 1.0
"""How long a rank may take to show its stacks and collectives."""
_TRIES = 4
"""How often ranks that seem able to answer are asked, before a verdict is given without them."""
_SIGNAL_S = 0.3
"""How long a signal may take to make it show its stacks."""
_EXIT_GRACE_S = 2.0
_RAISE_GRACE_S = 20.0
_SILENCE = 4
"""Looks after which a rank that gave no sign of life counts as unable to."""
_UNREACHED_S = 30.0
"""How long a monitor tries to reach the board before it says that it cannot."""


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
    nodes: tuple[Node, ...] = ()
    """All nodes of the run, where these are several; the first one holds the board."""
    node: int = 0
    """Which of them this is."""
    node_limit: float = 120.0
    """Seconds that a node may be silent."""
    address: tuple[str, int] = ("", 0)
    """Host and port of the board."""
    token: str = ""
    """Word by which the monitors know each other."""
    listening: int | None = None
    """File descriptor of the board's socket, in the monitor that holds it."""

    @property
    def whole(self) -> bool:
        """Whether ``members`` are all ranks of the run."""
        return len(self.nodes) < 2

    @staticmethod
    def read(directory: Path) -> "MonitorConfig":
        """The configuration in a directory."""
        found = json.loads((directory / CONFIG).read_text())
        found["members"] = tuple(Member(**member) for member in found["members"])
        found["nodes"] = tuple(Node(n["host"], tuple(n["ranks"])) for n in found["nodes"])
        found["address"] = tuple(found["address"])
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


@dataclass
class _Evidence:
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
        for rank, entries in packed["collectives"].items():
            self.collectives[int(rank)] = [Collective(**entry) for entry in entries]
        for rank, entries in packed["frames"].items():
            self.frames[int(rank)] = [Frame(**entry) for entry in entries]
        self.groups.update(packed["groups"])
        self.mute += int(packed["mute"])
        self.astray.update(packed["astray"])


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
        self._told_all: dict[int, tuple[int, int]] = {}
        """The same, of those on any node."""
        self._pause_until = 0.0
        self._tries = 0
        self._passed, self._ends = 0.0, False
        self._blamed: set[int] = set()
        """Nodes whose silence was reported."""
        self._begun, self._warned = time.monotonic(), False
        self._board: Board | None = None
        if not config.whole:
            self._board = self._join()

    def run(self) -> None:
        """Watch until all ranks have left or ended."""
        while True:
            self._pause()
            views = self.look()
            if self._board is not None:
                self._board.post(views, self._passed)
            needed = self._board is not None and self._board.needed(self._config.node_limit)
            if all(v.beat.left or v.gone for v in views) and not needed:
                break
            self.act_on(views)
            if self._board is not None:
                self._attend(self._board, views)
        if self._board is not None:
            self._board.leave()

    def _pause(self) -> None:
        if self._board is None:
            time.sleep(self._config.check_s)
        else:
            self._board.news.wait(self._config.check_s)
            self._board.news.clear()

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
        return None if self._board is None else self._board.asleep

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
        evidence = self._collect(views)
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
        nodes = max(len(self._config.nodes), 1)
        report = describe(
            found, views, evidence.collectives, evidence.missing, evidence.frames, nodes
        )
        self._conclude(report, views, evidence.texts)

    def _conclude(
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
        if self._board is not None and told:
            self._board.await_others()
        elif self._board is not None:
            self._board.tell({**report, "ranks": []})
        self._do(views, report)

    def hold(self) -> None:
        """Let the ranks know that a hang was found for which they are about to be ended."""
        if self._config.action == "abort":
            for watched in self._watched:
                watched.page.hold()

    # Other nodes ---------------------------------------------------------------------------------

    def _join(self) -> Board:
        config, views, hold = self._config, self.look(), self.hold
        if config.listening is None:
            address, token = config.address, config.token
            return BoardGuest(address, token, config.node, config.nodes[0], hold, views)
        listening = socket.socket(fileno=config.listening)
        return BoardHolder(listening, config.token, config.nodes, hold, views)

    def _attend(self, board: Board, views: Sequence[View]) -> None:
        """Do what other nodes want, and see whether one of them is missing."""
        while True:
            try:
                message = board.inbox.get_nowait()
            except queue.Empty:
                break
            if "wish" in message:
                board.bring(message["wish"], self._collect(views).packed())
            else:
                self._be_told(message["verdict"], views)
        lost = board.lost(self._config.node_limit)
        self._blamed.intersection_update(() if lost is None else lost.nodes)
        if lost is not None and not self._blamed.issuperset(lost.nodes):
            self._miss(lost, views)
        if isinstance(board, BoardHolder):
            self._judge(board, views)
        elif isinstance(board, BoardGuest):
            self._warn(board)

    def _be_told(self, report: dict[str, Any], views: Sequence[View]) -> None:
        evidence = self._collect(views)
        blamed = Suspicion(tuple(c["rank"] for c in report["culprits"]), report["reason"], True)
        own = describe(blamed, views, evidence.collectives, None, evidence.frames)["ranks"]
        others = [c for c in report["culprits"] if c["rank"] not in {e["rank"] for e in own}]
        self._conclude({**report, "ranks": [*own, *others]}, views, evidence.texts, told=True)

    def _miss(self, lost: Lost, views: Sequence[View]) -> None:
        """Blame nodes that are silent, if the ranks here have been waiting for them."""
        here = [v for v in views if not v.beat.left and not v.gone]
        waited = min((v.stall for v in here), default=0.0) > self._config.node_limit / 2
        if not waited or (lost.refused and not all(v.late for v in here)):
            return
        self._blamed.update(lost.nodes)
        evidence = self._collect(views)
        report = describe_silence(
            [str(self._config.nodes[node]) for node in lost.nodes],
            lost.silence,
            self._config.node_limit,
            self._config.nodes[self._config.node].host,
            views,
            lost.views,
            evidence.frames,
        )
        self._conclude(report, views, evidence.texts)

    def _judge(self, board: BoardHolder, views: Sequence[View]) -> None:
        """Blame a rank of any node where all wait, which no node can do by itself."""
        everybody = board.posts.everybody()
        if everybody is None or self._told or time.monotonic() < self._pause_until:
            return
        by_rank = {v.rank: v.beat.progress for v in everybody}
        self._told_all = {r: p for r, p in self._told_all.items() if by_rank.get(r) == p}
        if self._told_all:
            return
        patience = _SILENCE * self._config.check_s
        suspicion = suspect(everybody, patience, asleep=board.asleep)
        if suspicion is None or suspicion.reason not in (ABSENT, ENTANGLED, GONE):
            return  # what remains, the node of that rank sees better
        evidence = self._collect(views)
        gathered = board.gather(evidence.packed) if suspicion.reason == ENTANGLED else {}
        for node in sorted((gathered or {}).keys() - {0}):
            assert gathered is not None
            evidence.add(gathered[node])
        found = confirm(suspicion, everybody, evidence.missing, evidence.frames)
        if gathered is None or evidence.mute or found is None:
            self._pause_until = time.monotonic() + 4 * self._config.check_s
            return
        here = [r for r in found.ranks if r in by_rank]
        self._told_all = {r: by_rank[r] for r in here}
        report = describe(
            found,
            everybody,
            evidence.collectives,
            evidence.missing,
            evidence.frames,
            len(self._config.nodes),
        )
        self._conclude(report, views, evidence.texts)

    def _warn(self, board: BoardGuest) -> None:
        """Say so where the board was never reached: a firewall, or a wrong interface."""
        if board.ever_connected or self._warned:
            return
        if time.monotonic() - self._begun > _UNREACHED_S:
            self._warned = True
            host, port = self._config.address
            node = self._config.nodes[self._config.node]
            announce(
                f"{node} does not reach the monitor of {self._config.nodes[0]}",
                [
                    f"nothing answers at {host}, port {port}: is there a firewall, or is it the "
                    "wrong interface (ConnectionConfig.bind)?",
                    "until it answers, nobody notices if one of the two machines vanishes",
                ],
            )

    # Evidence ------------------------------------------------------------------------------------

    def _collect(self, views: Sequence[View]) -> _Evidence:
        """Have the ranks tell what they can, and look at the others by signal."""
        self._orders += 1
        here = [v for v in views if not v.beat.left and not v.gone and not v.process.stopped]
        sizes = {v.rank: stacks.size_of(stack_file(self._directory, v.rank)) for v in here}
        for view in here:
            self._page(view.rank).give(self._orders, TELL)
        evidence = _Evidence({v.rank: _of_sample(v.beat) for v in views}, {}, {}, {})
        deadline = time.monotonic() + _ANSWER_S
        mute = [v for v in here if not self._read_trace(v, deadline, evidence)]
        evidence.mute = len(mute)
        for view in mute:
            stacks.ask(view.member.pid)
        deadline = max(deadline, time.monotonic() + _SIGNAL_S)
        for view in here:
            file = stack_file(self._directory, view.rank)
            text = stacks.read_since(file, sizes[view.rank], deadline)
            evidence.texts[view.rank] = text
            evidence.frames[view.rank] = stacks.frames_of(text, view.member.thread)
        return evidence

    def _read_trace(self, view: View, deadline: float, evidence: _Evidence) -> bool:
        """Take the rank's answer; whether there was one."""
        file = trace_file(self._directory, view.rank, self._orders)
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if not file.exists():
            return False
        answer = json.loads(file.read_text())
        file.unlink()
        evidence.collectives[view.rank] = [Collective(**c) for c in answer["collectives"]]
        evidence.groups.update(answer["groups"])
        if strayed(answer["begun"]):
            evidence.astray.add(view.rank)
        return True

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


def _of_sample(beat: Beat) -> list[Collective]:
    return [
        Collective(group, begun, "collective", "", 0, begun == completed)
        for group, (begun, completed) in beat.collectives.items()
    ]


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
