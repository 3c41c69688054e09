"""Check of the other nodes by a node's monitor; `node_board` has the messages between them.

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
    Diagnosis,
    RankView,
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
"""Seconds without a connection to the board after which a warning says so."""
_NOTE = "all ranks wait: the connection between two of these machines may be broken"
_PAUSES = 4
"""Checks between two attempts to find the rank that all wait for."""


@dataclass(frozen=True, kw_only=True)
class NodeWatchConfig:
    """Nodes of the run and address of the board, for a monitor."""

    nodes: tuple[Node, ...]
    """All nodes of the run; the first one holds the board."""
    node: int
    """Position of this node."""
    limit: float
    """Seconds that a node may be silent."""
    address: tuple[str, int]
    """Host and port of the board."""
    token: str
    """Secret of the run, which every connection must send."""
    listening: int | None = None
    """File descriptor of the board's socket, in the monitor that holds it."""

    @property
    def here(self) -> Node:
        """This node."""
        return self.nodes[self.node]

    @staticmethod
    def of(fields: Mapping[str, Any]) -> "NodeWatchConfig":
        """Read the config from JSON values."""
        nodes = tuple(Node(n["host"], tuple(n["ranks"])) for n in fields["nodes"])
        host, port = fields["address"]
        return NodeWatchConfig(**{**fields, "nodes": nodes, "address": (host, port)})


class Reporter(Protocol):
    """Methods of the monitor that the watch calls."""

    def hold(self) -> None:
        """Tell the ranks of this node that they are about to be ended because of a hang."""
        ...

    def collect(self, views: Sequence[RankView]) -> Evidence:
        """Collect the evidence of this node's ranks."""
        ...

    def conclude(
        self,
        report: Mapping[str, Any],
        views: Sequence[RankView],
        texts: Mapping[int, str],
        *,
        told: bool = False,
    ) -> None:
        """Report a hang, and act."""
        ...


class NodeWatch:
    """Checks the other nodes, and receives the reports of their monitors.

    Args:
        config: nodes and board.
        check_s: seconds between checks.
        patience: seconds without a heartbeat after which a rank's GIL counts as held.
        reporter: the monitor.
        views: state of this node's ranks.
    """

    def __init__(
        self,
        config: NodeWatchConfig,
        check_s: float,
        patience: float,
        reporter: Reporter,
        views: Sequence[RankView],
    ) -> None:
        self._config = config
        self._check_s = check_s
        self._patience = patience
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
        self._begun = time.monotonic()
        self._warned = False

    @property
    def asleep(self) -> bool:
        """Whether the ranks of all nodes are stopped by signals."""
        return self._board.asleep

    @property
    def needed(self) -> bool:
        """Whether other nodes need this monitor after its own ranks are done."""
        return self._board.needed(self._config.limit)

    def pause(self) -> None:
        """Wait until the next check, or until a message comes."""
        self._board.news.wait(self._check_s)
        self._board.news.clear()

    def post(self, views: Sequence[RankView], seconds: float) -> None:
        """Post the state of this node's ranks, ``seconds`` of watching after the last post."""
        self._board.post(views, seconds)

    def agree(self, report: Mapping[str, Any], *, told: bool) -> None:
        """Return when all nodes have a report or may not get it any more.

        Args:
            report: report of this node or another one.
            told: whether it is of another node.
        """
        if told:
            self._board.await_others()
        else:
            self._board.tell({**report, "ranks": []})

    def attend(self, views: Sequence[RankView]) -> None:
        """Answer the messages of other nodes, and check whether one is silent."""
        while True:
            try:
                message = self._board.inbox.get_nowait()
            except queue.Empty:
                break
            if "wish" in message:
                self._board.bring(message["wish"], self._reporter.collect(views).packed())
            else:
                self._receive_diagnosis(message["verdict"], views)
        lost = self._board.lost(self._config.limit)
        self._blamed.intersection_update(() if lost is None else lost.nodes)
        if lost is not None and not self._blamed.issuperset(lost.nodes):
            self._miss(lost, views)
        if isinstance(self._board, BoardHolder):
            self._diagnose(self._board, views)
        else:
            self._warn(self._board)

    def leave(self) -> None:
        """End, as the ranks of this node are done."""
        self._board.leave()

    def _receive_diagnosis(self, report: dict[str, Any], views: Sequence[RankView]) -> None:
        evidence = self._reporter.collect(views)
        blamed = Diagnosis(tuple(c["rank"] for c in report["culprits"]), report["reason"], True)
        own = describe(blamed, views, evidence.collectives, None, evidence.frames)["ranks"]
        others = [c for c in report["culprits"] if c["rank"] not in {e["rank"] for e in own}]
        report = {**report, "ranks": [*own, *others]}
        self._reporter.conclude(report, views, evidence.texts, told=True)

    def _miss(self, lost: Lost, views: Sequence[RankView]) -> None:
        """Report silent nodes, if the ranks here have waited for them."""
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

    def _diagnose(self, board: BoardHolder, views: Sequence[RankView]) -> None:
        """Find the rank of any node for which all others wait, by the posts of all nodes."""
        everybody = board.posts.everybody()
        if everybody is None or time.monotonic() < self._pause_until:
            return
        by_rank = {v.rank: v.beat.progress for v in everybody}
        self._told = {r: p for r, p in self._told.items() if by_rank.get(r) == p}
        suspicion = suspect(everybody, self._patience, asleep=board.asleep)
        if self._told or suspicion is None:
            return
        if suspicion.reason not in (ABSENT, ENTANGLED, GONE):
            return  # the monitor of that rank decides
        evidence = self._reporter.collect(views)
        if suspicion.certain:
            found: Diagnosis | None = suspicion
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
        suspicion: Diagnosis,
        everybody: Sequence[RankView],
        evidence: Evidence,
        board: BoardHolder,
    ) -> Diagnosis | None:
        """Confirm a diagnosis by the evidence of all nodes, which is added to ``evidence``."""
        gathered = board.gather(evidence.packed)
        if gathered is None:
            return None
        for node in sorted(gathered.keys() - {0}):
            evidence.add(gathered[node])
        if evidence.mute:
            return None
        return confirm(suspicion, everybody, evidence.missing, evidence.frames)

    def _warn(self, board: BoardGuest) -> None:
        """Warn if the board was never reached."""
        late = time.monotonic() - self._begun > _UNREACHED_S
        if self._warned or not late or board.ever_connected:
            return
        self._warned = True
        host, port = self._config.address
        announce(
            f"{self._config.here} does not reach the monitor of {self._config.nodes[0]}",
            [
                f"nothing answers at {host}, port {port}: a firewall blocks it, or the interface "
                "is wrong; nearest valid: ConnectionConfig(bind=) with the interface between them",
                "until it answers, the loss of one of the two machines is not detected",
            ],
        )
