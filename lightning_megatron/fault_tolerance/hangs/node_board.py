"""Exchange between the monitors of several nodes: the board.

A monitor sees the ranks of its own node. A node that loses power or its cable sends nothing, and no
connection breaks: ranks that wait for it wait until a timeout of half an hour. So the monitors
exchange messages. The monitor on the node of rank 0 holds the board (`BoardHolder`). Those of the
other nodes post the state of their ranks once a second (`BoardGuest`), and each post is answered.
The load is one message a second for each node, of a hundred bytes for each rank, all on one thread
of the holder's monitor. The board does three things:

* A node without posts for longer than the *node limit* is down or disconnected. A guest without
  answers for as long reports the same of the holder's node, or of its own connection: it cannot
  tell the two apart. Only time in which the monitor itself was running counts. No node is reported
  while the ranks here make progress, or after it has said that its ranks are done.
* A *report* of one monitor reaches all others before the first rank is ended. Else the other nodes
  would lose their connections to that rank and look for another cause. Each monitor *holds* its
  ranks (`heartbeat.Page.hold`) as soon as it gets a report, confirms that, and acts when all have
  confirmed.
* If all ranks of all nodes wait for each other, no monitor alone finds the cause. The holder takes
  the posts of all nodes together, asks all for their flight recorders, and decides (`diagnosis`).

After a link was down, connections may need as long again to notice that it is up, as the kernel
doubles the time between two tries. Until then the holder does not decide that all wait.

This file runs in a process without torch (`node_monitor`), so that the monitors have a connection
of their own beside the two ways in which ranks meet (`comm/peers.py`, `launch/store_barrier.py`).
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning_megatron.fault_tolerance.hangs.diagnosis import RankView
from lightning_megatron.fault_tolerance.hangs.heartbeat import Beat, Member
from lightning_megatron.fault_tolerance.hangs.json_lines import (
    PATIENCE_S,
    PERIOD_S,
    LineClient,
    LineServer,
    Message,
)
from lightning_megatron.fault_tolerance.hangs.stack_dump import ProcessState
from lightning_megatron.run_log.sections import SECTIONS

_AGREE_S = 3.0
"""Seconds to wait until all nodes have confirmed a report."""
_EVIDENCE_S = 5.0
"""Seconds to wait for the evidence of the other nodes."""


@dataclass(frozen=True)
class Node:
    """Machine of the run, or a container on it.

    Attributes:
        host: name of the machine.
        ranks: ranks that run there.
    """

    host: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"{self.host} ({'rank' if len(self.ranks) == 1 else 'ranks'} {shown})"


@dataclass(frozen=True)
class Lost:
    """Nodes that are silent.

    Attributes:
        nodes: their numbers.
        silence: seconds since their last message.
        views: state of their ranks by that message, if known.
        refused: whether their systems run, as a connection was refused or closed.
    """

    nodes: tuple[int, ...]
    silence: float
    views: tuple[RankView, ...]
    refused: bool


def pack(view: RankView) -> list[Any]:
    """State of a rank as a short JSON list."""
    beat, state = view.beat, view.process
    return [
        view.rank,
        view.member.pid,
        SECTIONS.index(beat.section),
        beat.step,
        beat.entries,
        beat.waits,
        int(beat.left),
        int(view.gone),
        state.letter,
        round(view.stall, 1),
        round(view.limit, 1),
        round(view.silence, 1),
        int(beat.device_waits),
    ]


def unpack(row: Sequence[Any], host: str) -> RankView:
    """State of a rank from the list of `pack`.

    Raises:
        ValueError, TypeError, IndexError: the row is no such list.
    """
    rank, pid, section, step, entries, waits, left, gone = map(int, row[:8])
    stall, limit, silence = map(float, row[9:12])
    if not 0 <= section < len(SECTIONS):
        raise ValueError(section)
    beat = Beat(
        entries=entries,
        step=step,
        since=0.0,
        section=SECTIONS[section],
        waits=waits,
        alive=0.0,
        left=bool(left),
        limits={},
        device_waits=bool(row[12]),
    )
    process = ProcessState() if gone else ProcessState(letter=str(row[8])[:1], started=1)
    member = Member(rank=rank, pid=pid, started=1, host=host, thread=0)
    return RankView(member, beat, process, stall, limit, silence)


class BoardGuest:
    """Board of a node that does not hold it.

    Args:
        address: address of the holder.
        token: see `json_lines.LineServer`.
        node: number of this node.
        holder: node that holds the board.
        hold: called, in another thread, as soon as a report comes.
        views: state of this node's ranks.

    Attributes:
        inbox: messages for this node: a report (``verdict``) or a request of evidence (``wish``).
        news: set when a message has come.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        node: int,
        holder: Node,
        hold: Callable[[], None],
        views: Sequence[RankView],
    ) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.news = threading.Event()
        self._go = threading.Event()
        self._holder = holder
        self._hold = hold
        self._post: Message = {"rows": [pack(view) for view in views]}
        self._answer: Message = {}
        self._silence = 0.0
        self._heard = 0
        self._client = LineClient(address, token, node, lambda: self._post, self._receive)

    @property
    def asleep(self) -> bool:
        """Whether all ranks of all nodes are stopped by signals, as the job is suspended."""
        return bool(self._answer.get("asleep"))

    @property
    def ever_connected(self) -> bool:
        """Whether the holder has ever answered."""
        return bool(self._client.heard)

    def post(self, views: Sequence[RankView], seconds: float) -> None:
        """Post the state of this node's ranks, ``seconds`` of watching after the last post.

        The client's thread sends it, as a heartbeat.
        """
        self._post = {"rows": [pack(view) for view in views]}
        heard = self._client.heard
        self._silence = 0.0 if heard != self._heard else self._silence + seconds
        self._heard = heard

    def lost(self, limit: float) -> Lost | None:
        """Nodes that are silent for longer than ``limit``; None if there are none.

        A holder that never answered, or whose ranks are done, does not count.
        """
        done = self._answer.get("left", True)
        if not self.ever_connected or done or self._silence <= limit:
            return None
        views = tuple(unpack(row, self._holder.host) for row in self._answer["rows"])
        return Lost((0,), self._silence, views, self._client.refused)

    def tell(self, report: Message) -> None:
        """Send a report to all nodes; return when they have confirmed it or may not any more."""
        self._go.clear()
        if self._silence <= PATIENCE_S and self._client.send({"verdict": report}):
            self._go.wait(_AGREE_S)

    def await_others(self) -> None:
        """Return when all nodes have the report that this one got."""
        self._go.wait(_AGREE_S)

    def bring(self, number: int, evidence: Message) -> None:
        """Answer a request of evidence."""
        self._client.send({"evidence": number, **evidence})

    def needed(self, limit: float) -> bool:
        """Whether other nodes still need this monitor after its own ranks are done."""
        return False

    def leave(self) -> None:
        """End, as the ranks of this node are done."""
        self._client.send({**self._post, "left": True})
        self._client.close()

    def _receive(self, message: Message) -> None:
        if "verdict" in message:
            self._go.clear()
            self._hold()
            self._client.send({"held": message["number"]})
        elif "go" in message:
            self._go.set()
            return
        elif "rows" in message:
            for row in message["rows"]:
                unpack(row, "")  # a bad row raises
            self._answer = message
            return
        self.inbox.put(message)
        self.news.set()


class Posts:
    """Last post of each node, and its age.

    Args:
        nodes: nodes of the run; the first one holds the board.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = tuple(nodes)
        self._views: dict[int, tuple[RankView, ...]] = {}
        self._ages: dict[int, float] = {}
        self._left: set[int] = set()
        self._unrest = 0.0
        self._lock = threading.Lock()

    def put(self, node: int, rows: Sequence[Sequence[Any]], *, left: bool) -> None:
        """Store a post.

        Raises:
            ValueError, TypeError, IndexError: a row is not valid.
        """
        views = tuple(unpack(row, self._nodes[node].host) for row in rows)
        with self._lock:
            self._views[node] = views
            self._ages[node] = 0.0
            (self._left.add if left else self._left.discard)(node)

    def grow_older(self, seconds: float) -> None:
        """Add time in which this process was running to the ages."""
        with self._lock:
            for node in self._ages:
                self._ages[node] += seconds
            present = [age for node, age in self._ages.items() if node not in self._left]
            worst = max(present, default=0.0)
            calmer = max(self._unrest - seconds, 0.0)
            self._unrest = max(calmer, 2 * worst) if worst > PATIENCE_S else calmer

    def ages(self) -> dict[int, float]:
        """Seconds since the last post, by node; without nodes that are done or never posted."""
        with self._lock:
            return {n: age for n, age in self._ages.items() if n not in self._left}

    def views_of(self, nodes: Sequence[int]) -> tuple[RankView, ...]:
        """State of the ranks of some nodes by their last posts."""
        with self._lock:
            return tuple(view for node in nodes for view in self._views.get(node, ()))

    def asleep(self) -> bool:
        """Whether all ranks are stopped by signals."""
        with self._lock:
            views = [v for node in self._views.values() for v in node]
            here = [v for v in views if not v.beat.left and not v.gone]
            return bool(here) and all(v.process.stopped for v in here)

    def everybody(self) -> list[RankView] | None:
        """State of all ranks; None if some nodes have not posted, or were late until just now."""
        with self._lock:
            if self._unrest or len(self._views) < len(self._nodes):
                return None
            return [view for node in sorted(self._views) for view in self._views[node]]


class BoardHolder:
    """Board of the node that holds it.

    Args:
        listening: socket to which the others connect.
        token: see `json_lines.LineServer`.
        nodes: nodes of the run; this one is the first.
        hold: called, in another thread, as soon as a report comes.
        views: state of this node's ranks.
    """

    def __init__(
        self,
        listening: socket.socket,
        token: str,
        nodes: Sequence[Node],
        hold: Callable[[], None],
        views: Sequence[RankView],
    ) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.news = threading.Event()
        self._go = threading.Event()
        self._hold = hold
        self.posts = Posts(nodes)
        self._rows = [pack(view) for view in views]
        self._left = False
        self.asleep = False
        self._unconfirmed: frozenset[int] = frozenset()
        self._reports = self._requests = 0
        self._evidence: dict[int, Message] = {}
        self._server = LineServer(listening, token, len(nodes), self._receive)

    def post(self, views: Sequence[RankView], seconds: float) -> None:
        """See `BoardGuest`."""
        self._rows = [pack(view) for view in views]
        self._left = all(v.beat.left or v.gone for v in views)
        self.posts.grow_older(seconds)
        self.posts.put(0, self._rows, left=self._left)
        self.asleep = self.posts.asleep()

    def lost(self, limit: float) -> Lost | None:
        """See `BoardGuest`."""
        ages = self.posts.ages()
        if max(ages.values(), default=0.0) <= limit:
            return None
        # Nodes at one switch fail together, and posted within a second of each other.
        alike = max(limit - 2 * PERIOD_S, limit / 2)
        nodes = tuple(sorted(node for node, age in ages.items() if age > alike))
        closed = self._server.closed.issuperset(nodes)
        return Lost(nodes, max(ages.values()), self.posts.views_of(nodes), closed)

    def tell(self, report: Message) -> None:
        """See `BoardGuest`."""
        self._send_to_all(0, report)
        self._go.wait(_AGREE_S)

    def await_others(self) -> None:
        """See `BoardGuest`."""
        self._go.wait(_AGREE_S)

    def bring(self, number: int, evidence: Message) -> None:
        """See `BoardGuest`."""
        self._evidence[0] = evidence

    def gather(self, own: Callable[[], Message]) -> Mapping[int, Message] | None:
        """Collect the evidence of all nodes; None if one of them sends none.

        Args:
            own: returns the evidence of this node.
        """
        self._requests += 1
        self._evidence = {}
        others = self._server.connected & self.posts.ages().keys()
        for node in others:
            self._server.push(node, {"wish": self._requests})
        self._evidence[0] = own()
        deadline = time.monotonic() + _EVIDENCE_S
        while others - self._evidence.keys() and time.monotonic() < deadline:
            time.sleep(0.05)
        return None if others - self._evidence.keys() else dict(self._evidence)

    def needed(self, limit: float) -> bool:
        """See `BoardGuest`."""
        heard = {node for node, age in self.posts.ages().items() if age <= limit}
        return bool(heard & self._server.connected)

    def leave(self) -> None:
        """See `BoardGuest`."""
        self._server.close()

    def _receive(self, node: int, message: Message) -> Message | None:
        if "verdict" in message:
            if not isinstance(message["verdict"], dict):
                raise ValueError(message)
            self._send_to_all(node, message["verdict"])
        elif "held" in message:
            self._unconfirmed -= {node}
            self._go_if_all_confirmed()
        elif "evidence" in message:
            if message["evidence"] == self._requests:
                self._evidence[node] = message
        else:
            self.posts.put(node, message["rows"], left=bool(message.get("left")))
            return {"rows": self._rows, "asleep": self.asleep, "left": self._left}
        return None

    def _send_to_all(self, origin: int, report: Message) -> None:
        self._reports += 1
        self._go.clear()
        message = {"verdict": report, "number": self._reports}
        heard = {node for node, age in self.posts.ages().items() if age <= PATIENCE_S}
        self._unconfirmed = others = frozenset(self._server.connected & heard - {origin})
        for node in others:
            self._server.push(node, message)
        if origin:
            self._hold()
            self.inbox.put(message)
            self.news.set()
        self._go_if_all_confirmed()

    def _go_if_all_confirmed(self) -> None:
        if not self._unconfirmed:
            for node in self._server.connected:
                self._server.push(node, {"go": self._reports})
            self._go.set()


Board: TypeAlias = BoardHolder | BoardGuest
"""Board of a node, whichever holds it."""
