"""A monitor's part in watching the other nodes of a run; see `node_board` for what goes by wire.

This file runs in a process without torch, see `node_monitor`.
"""

import queue
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_megatron.fault_tolerance.announce import announce
from lightning_megatron.fault_tolerance.hangs.diagnosis import (
    ABSENT,
    ENTANGLED,
    GONE,
    Suspicion,
    View,
    confirm,
    suspect,
)
from lightning_megatron.fault_tolerance.hangs.evidence import Evidence
from lightning_megatron.fault_tolerance.hangs.node_board import (
    Board,
    BoardGuest,
    BoardHolder,
    Lost,
    Node,
)
from lightning_megatron.fault_tolerance.hangs.report import describe, describe_silence

_UNREACHED_S = 30.0
"""How long a monitor tries to reach the board before it says that it cannot."""
_NOTE = "all ranks wait: two of these machines may have lost each other, which neither can tell"
_PAUSES = 4
"""Looks between two attempts to find out who all wait for."""


@dataclass(frozen=True, kw_only=True)
class NodeWatchConfig:
    """What a monitor is told about the other nodes."""

    nodes: tuple[Node, ...]
    """All nodes of the run; the first one holds the board."""
    node: int
    """Which of them this is."""
    limit: float
    """Seconds that a node may be silent."""
    address: tuple[str, int]
    """Host and port of the board."""
    token: str
    """Word by which the monitors know each other."""
    listening: int | None = None
    """File descriptor of the board's socket, in the monitor that holds it."""

    @property
    def here(self) -> Node:
        """This node."""
        return self.nodes[self.node]

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "NodeWatchConfig":
        """The configuration from what JSON has made of it."""
        nodes = tuple(Node(n["host"], tuple(n["ranks"])) for n in fields["nodes"])
        host, port = fields["address"]
        return NodeWatchConfig(**{**fields, "nodes": nodes, "address": (host, port)})


class Reporter(Protocol):
    """What the watch wants of its monitor."""

    def hold(self) -> None:
        """Let the ranks of this node know of a hang for which they are about to be ended."""
        ...

    def collect(self, views: Sequence[View]) -> Evidence:
        """What the ranks of this node can tell."""
        ...

    def conclude(
        self,
        report: Mapping[str, Any],
        views: Sequence[View],
        texts: Mapping[int, str],
        *,
        told: bool = False,
    ) -> None:
        """Report, and do what is to be done."""
        ...


class NodeWatch:
    """Watches the other nodes, and listens to what their monitors find.

    Args:
        config: who they are.
        check_s: seconds between looks.
        patience: seconds without a sign of life after which a rank's lock counts as held.
        reporter: the monitor.
        views: how the ranks of this node are.
    """

    def __init__(
        self,
        config: NodeWatchConfig,
        check_s: float,
        patience: float,
        reporter: Reporter,
        views: Sequence[View],
    ) -> None:
        self._config, self._check_s, self._patience = config, check_s, patience
        self._reporter = reporter
        self._board: Board
        if config.listening is None:
            self._board = BoardGuest(
                config.address, config.token, config.node, config.nodes[0], reporter.hold, views
            )
        else:
            listening = socket.socket(fileno=config.listening)
            self._board = BoardHolder(listening, config.token, config.nodes, reporter.hold, views)
        self._blamed: set[int] = set()
        """Nodes whose silence was reported."""
        self._told: dict[int, tuple[int, int]] = {}
        """Progress of the ranks of the latest report."""
        self._pause_until = 0.0
        self._begun, self._warned = time.monotonic(), False

    @property
    def asleep(self) -> bool:
        """Whether the ranks of all nodes are stopped by signals."""
        return self._board.asleep

    @property
    def needed(self) -> bool:
        """Whether other nodes need this monitor when its own ranks are done."""
        return self._board.needed(self._config.limit)

    def pause(self) -> None:
        """Let a look's time go by, or less if there is news."""
        self._board.news.wait(self._check_s)
        self._board.news.clear()

    def post(self, views: Sequence[View], seconds: float) -> None:
        """Tell how the ranks of this node are, ``seconds`` of watching after the last time."""
        self._board.post(views, seconds)

    def agree(self, report: Mapping[str, Any], *, told: bool) -> None:
        """Return when all nodes know of a report, or will not any more.

        Args:
            report: what this node has found, or was told.
            told: whether it was.
        """
        if told:
            self._board.await_others()
        else:
            self._board.tell({**report, "ranks": []})

    def attend(self, views: Sequence[View]) -> None:
        """Do what other nodes want, and see whether one of them is missing."""
        while True:
            try:
                message = self._board.inbox.get_nowait()
            except queue.Empty:
                break
            if "wish" in message:
                self._board.bring(message["wish"], self._reporter.collect(views).packed())
            else:
                self._be_told(message["verdict"], views)
        lost = self._board.lost(self._config.limit)
        self._blamed.intersection_update(() if lost is None else lost.nodes)
        if lost is not None and not self._blamed.issuperset(lost.nodes):
            self._miss(lost, views)
        if isinstance(self._board, BoardHolder):
            self._judge(self._board, views)
        elif isinstance(self._board, BoardGuest):
            self._warn(self._board)

    def leave(self) -> None:
        """End in order: the ranks of this node are done."""
        self._board.leave()

    def _be_told(self, report: dict[str, Any], views: Sequence[View]) -> None:
        evidence = self._reporter.collect(views)
        blamed = Suspicion(tuple(c["rank"] for c in report["culprits"]), report["reason"], True)
        own = describe(blamed, views, evidence.collectives, None, evidence.frames)["ranks"]
        others = [c for c in report["culprits"] if c["rank"] not in {e["rank"] for e in own}]
        report = {**report, "ranks": [*own, *others]}
        self._reporter.conclude(report, views, evidence.texts, told=True)

    def _miss(self, lost: Lost, views: Sequence[View]) -> None:
        """Blame nodes that are silent, if the ranks here have been waiting for them."""
        here = [v for v in views if not v.beat.left and not v.gone]
        waited = min((v.stall for v in here), default=0.0) > self._config.limit / 2
        if not waited or (lost.refused and not all(v.late for v in here)):
            return
        self._blamed.update(lost.nodes)
        evidence = self._reporter.collect(views)
        report = describe_silence(
            [str(self._config.nodes[node]) for node in lost.nodes],
            lost.silence,
            self._config.limit,
            self._config.here.host,
            views,
            lost.views,
            evidence.frames,
        )
        self._reporter.conclude(report, views, evidence.texts)

    def _judge(self, board: BoardHolder, views: Sequence[View]) -> None:
        """Blame a rank of any node where all wait, which no node can do by itself."""
        everybody = board.posts.everybody()
        if everybody is None or time.monotonic() < self._pause_until:
            return
        by_rank = {v.rank: v.beat.progress for v in everybody}
        self._told = {r: p for r, p in self._told.items() if by_rank.get(r) == p}
        suspicion = suspect(everybody, self._patience, asleep=board.asleep)
        if self._told or suspicion is None:
            return
        if suspicion.reason not in (ABSENT, ENTANGLED, GONE):
            return  # the monitor of that rank sees it better
        evidence = self._reporter.collect(views)
        if suspicion.certain:
            found: Suspicion | None = suspicion
        else:
            found = self._confirm(suspicion, everybody, evidence, board)
        if found is None:
            self._pause_until = time.monotonic() + _PAUSES * self._check_s
            return
        self._told = {rank: by_rank[rank] for rank in found.ranks if rank in by_rank}
        report = describe(
            found,
            everybody,
            evidence.collectives,
            evidence.missing,
            evidence.frames,
            len(self._config.nodes),
        )
        if not suspicion.certain:
            report["note"] = _NOTE
        self._reporter.conclude(report, views, evidence.texts)

    def _confirm(
        self,
        suspicion: Suspicion,
        everybody: Sequence[View],
        evidence: Evidence,
        board: BoardHolder,
    ) -> Suspicion | None:
        """The suspicion in the light of what all nodes know, which ``evidence`` is added to."""
        gathered = board.gather(evidence.packed)
        if gathered is None:
            return None
        for node in sorted(gathered.keys() - {0}):
            evidence.add(gathered[node])
        if evidence.mute:
            return None
        return confirm(suspicion, everybody, evidence.missing, evidence.frames)

    def _warn(self, board: BoardGuest) -> None:
        """Say so where the board was never reached: a firewall, or a wrong interface."""
        late = time.monotonic() - self._begun > _UNREACHED_S
        if self._warned or not late or board.ever_connected:
            return
        self._warned = True
        host, port = self._config.address
        announce(
            f"{self._config.here} does not reach the monitor of {self._config.nodes[0]}",
            [
                f"nothing answers at {host}, port {port}: is there a firewall, or is it the wrong "
                "interface (ConnectionConfig.bind)?",
                "until it answers, nobody notices if one of the two machines vanishes",
            ],
        )
