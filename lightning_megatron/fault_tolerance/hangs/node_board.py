"""What the nodes of a run know of each other: their monitors' board.

A monitor sees the ranks of its own node. A node that loses its power or its cable cannot tell
anybody, and no connection breaks: whoever waits for its ranks waits until a timeout of half an
hour. So the monitors talk: the one on the node of rank 0 holds the board (`BoardHolder`), those of
the other nodes post there once a second how their ranks are (`BoardGuest`), and each post is
answered. The load is one message a second and node, each of a hundred bytes a rank, all on one
thread of the holder's monitor. Three things come of it:

* A node whose posts stay out for longer than the *node limit* has vanished, or its cable has. A
  guest whose posts are not answered for as long says the same of the holder's node, or of its own
  cable: nobody can tell the two apart from inside. Only time counts that a monitor has itself
  watched; nobody is blamed while the ranks here make progress, nor who has said that its ranks are
  done.
* A *verdict* of one monitor reaches all of them before the first rank is ended for it. Else the
  others would lose their connections to that rank and look for another reason why it died. Each
  monitor *holds* its ranks (`heartbeat.Page.hold`) as soon as it hears a verdict, says so, and acts
  when all have said so.
* Where all ranks of all nodes wait for each other, no monitor finds anybody to blame. The holder
  sees all posts as if they were one node's, has everybody look at the flight recorders, and judges
  (`verdict`).

The price of a link that was down: for as long as connections may need to notice that it is up again
(the kernel doubles the time between two tries, so once more the time of the interruption), the
holder does not judge that all wait for each other.

This file runs in a process without torch, see `node_monitor`.
"""

import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_megatron.fault_tolerance.hangs.diagnosis import View
from lightning_megatron.fault_tolerance.hangs.heartbeat import Beat, Member
from lightning_megatron.fault_tolerance.hangs.json_lines import (
    PATIENCE_S,
    PERIOD_S,
    LineClient,
    LineServer,
    Message,
)
from lightning_megatron.fault_tolerance.hangs.stack_dump import ProcessState
from lightning_megatron.monitoring.sections import SECTIONS

_AGREE_S = 3.0
"""How long to wait for all nodes to have heard a verdict."""
_EVIDENCE_S = 5.0
"""How long to wait for what they know of collectives."""


@dataclass(frozen=True)
class Node:
    """A machine of the run, or a container on it.

    Attributes:
        host: its name.
        ranks: those that run there.
    """

    host: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"{self.host} ({'rank' if len(self.ranks) == 1 else 'ranks'} {shown})"


@dataclass(frozen=True)
class Lost:
    """Nodes of which nothing is heard.

    Attributes:
        nodes: their numbers.
        silence: seconds since something was heard of them.
        views: how their ranks were then, as far as that is known.
        refused: whether their systems run: nobody listens there, or a connection was closed.
    """

    nodes: tuple[int, ...]
    silence: float
    views: tuple[View, ...]
    refused: bool


def pack(view: View) -> list[Any]:
    """A view of a rank, short, for JSON."""
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
    ]


def unpack(row: Sequence[Any], host: str) -> View:
    """What `pack` packed.

    Raises:
        ValueError, TypeError, IndexError: the row is none of it.
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
    )
    process = ProcessState() if gone else ProcessState(letter=str(row[8])[:1], started=1)
    member = Member(rank=rank, pid=pid, started=1, host=host, thread=0)
    return View(member, beat, process, stall, limit, silence)


class Board(Protocol):
    """What a monitor needs of the board, wherever that is.

    Attributes:
        inbox: messages for this node: a ``verdict``, or a wish for ``evidence``.
        news: set when something has come.
    """

    inbox: "queue.SimpleQueue[Message]"
    news: threading.Event

    @property
    def asleep(self) -> bool:
        """Whether all ranks of all nodes are stopped by signals: the job is suspended."""
        ...

    def post(self, views: Sequence[View], seconds: float) -> None:
        """Tell how the ranks of this node are, ``seconds`` of watching after the last time."""
        ...

    def lost(self, limit: float) -> Lost | None:
        """Nodes that have been silent for longer than ``limit``; None if there is none."""
        ...

    def tell(self, report: Message) -> None:
        """Have all nodes hear of a verdict; return when they have, or will not any more."""
        ...

    def await_others(self) -> None:
        """Return when all nodes have heard the verdict that this one was told."""
        ...

    def bring(self, number: int, evidence: Message) -> None:
        """Answer a wish for evidence."""
        ...

    def needed(self, limit: float) -> bool:
        """Whether other nodes still need this monitor when its own ranks are done."""
        ...

    def leave(self) -> None:
        """End in order: the ranks of this node are done."""
        ...


class BoardGuest:
    """The board, of a node that does not hold it.

    Args:
        address: of the holder.
        token: see `json_lines.LineServer`.
        node: number of this node.
        holder: the node that holds the board.
        hold: called, in another thread, as soon as a verdict is known.
        views: how the ranks of this node are.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        node: int,
        holder: Node,
        hold: Callable[[], None],
        views: Sequence[View],
    ) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.news, self._go = threading.Event(), threading.Event()
        self._holder, self._hold = holder, hold
        self._post: Message = {"rows": [pack(view) for view in views]}
        self._answer: Message = {}
        self._silence, self._heard = 0.0, 0
        self._client = LineClient(address, token, node, lambda: self._post, self._receive)

    @property
    def asleep(self) -> bool:
        """See `Board`."""
        return bool(self._answer.get("asleep"))

    @property
    def ever_connected(self) -> bool:
        """Whether the holder has ever answered."""
        return bool(self._client.heard)

    def post(self, views: Sequence[View], seconds: float) -> None:
        """See `Board`; sent by the client's thread, which is the sign of life."""
        self._post = {"rows": [pack(view) for view in views]}
        heard = self._client.heard
        self._silence = 0.0 if heard != self._heard else self._silence + seconds
        self._heard = heard

    def lost(self, limit: float) -> Lost | None:
        """See `Board`; who was never heard is not missed, and who has left may be silent."""
        done = self._answer.get("left", True)
        if not self.ever_connected or done or self._silence <= limit:
            return None
        views = tuple(unpack(row, self._holder.host) for row in self._answer["rows"])
        return Lost((0,), self._silence, views, self._client.refused)

    def tell(self, report: Message) -> None:
        """See `Board`."""
        self._go.clear()
        if self._silence <= PATIENCE_S and self._client.send({"verdict": report}):
            self._go.wait(_AGREE_S)

    def await_others(self) -> None:
        """See `Board`."""
        self._go.wait(_AGREE_S)

    def bring(self, number: int, evidence: Message) -> None:
        """See `Board`."""
        self._client.send({"evidence": number, **evidence})

    def needed(self, limit: float) -> bool:
        """See `Board`."""
        return False

    def leave(self) -> None:
        """See `Board`."""
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
                unpack(row, "")  # or it is not kept
            self._answer = message
            return
        self.inbox.put(message)
        self.news.set()


class Posts:
    """What all nodes have posted last, and how long ago that is.

    Args:
        nodes: of the run; the first one holds the board.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = tuple(nodes)
        self._views: dict[int, tuple[View, ...]] = {}
        self._ages: dict[int, float] = {}
        self._left: set[int] = set()
        self._unrest = 0.0
        self._lock = threading.Lock()

    def put(self, node: int, rows: Sequence[Sequence[Any]], *, left: bool) -> None:
        """A post.

        Raises:
            ValueError, TypeError, IndexError: it is none.
        """
        views = tuple(unpack(row, self._nodes[node].host) for row in rows)
        with self._lock:
            self._views[node] = views
            self._ages[node] = 0.0
            (self._left.add if left else self._left.discard)(node)

    def grow_older(self, seconds: float) -> None:
        """Let so much time have passed, in which this process has watched."""
        with self._lock:
            for node in self._ages:
                self._ages[node] += seconds
            present = [age for node, age in self._ages.items() if node not in self._left]
            worst = max(present, default=0.0)
            calmer = max(self._unrest - seconds, 0.0)
            self._unrest = max(calmer, 2 * worst) if worst > PATIENCE_S else calmer

    def ages(self) -> dict[int, float]:
        """Seconds since the last post, by node; without those that are done or never came."""
        with self._lock:
            return {n: age for n, age in self._ages.items() if n not in self._left}

    def views_of(self, nodes: Sequence[int]) -> tuple[View, ...]:
        """How the ranks of some nodes were when these posted last."""
        with self._lock:
            return tuple(view for node in nodes for view in self._views.get(node, ()))

    def asleep(self) -> bool:
        """Whether all ranks are stopped by signals."""
        with self._lock:
            views = [v for node in self._views.values() for v in node]
            here = [v for v in views if not v.beat.left and not v.gone]
            return bool(here) and all(v.process.stopped for v in here)

    def everybody(self) -> list[View] | None:
        """How all ranks are; None where that is not known of all, or was not until just now."""
        with self._lock:
            if self._unrest or len(self._views) < len(self._nodes):
                return None
            return [view for node in sorted(self._views) for view in self._views[node]]


class BoardHolder:
    """The board, of the node that holds it.

    Args:
        listening: socket at which the others find it.
        token: see `json_lines.LineServer`.
        nodes: of the run; this one is the first.
        hold: called, in another thread, as soon as a verdict is known.
        views: how the ranks of this node are.
    """

    def __init__(
        self,
        listening: socket.socket,
        token: str,
        nodes: Sequence[Node],
        hold: Callable[[], None],
        views: Sequence[View],
    ) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.news, self._go = threading.Event(), threading.Event()
        self._hold, self.posts = hold, Posts(nodes)
        self._rows = [pack(view) for view in views]
        self._left, self.asleep = False, False
        self._unaware: frozenset[int] = frozenset()
        self._verdicts = self._wishes = 0
        self._evidence: dict[int, Message] = {}
        self._server = LineServer(listening, token, len(nodes), self._receive)

    def post(self, views: Sequence[View], seconds: float) -> None:
        """See `Board`."""
        self._rows = [pack(view) for view in views]
        self._left = all(v.beat.left or v.gone for v in views)
        self.posts.grow_older(seconds)
        self.posts.put(0, self._rows, left=self._left)
        self.asleep = self.posts.asleep()

    def lost(self, limit: float) -> Lost | None:
        """See `Board`."""
        ages = self.posts.ages()
        if max(ages.values(), default=0.0) <= limit:
            return None
        # Nodes at one switch vanish together, and posted within a second of each other.
        alike = max(limit - 2 * PERIOD_S, limit / 2)
        nodes = tuple(sorted(node for node, age in ages.items() if age > alike))
        closed = self._server.closed.issuperset(nodes)
        return Lost(nodes, max(ages.values()), self.posts.views_of(nodes), closed)

    def tell(self, report: Message) -> None:
        """See `Board`."""
        self._spread(0, report)
        self._go.wait(_AGREE_S)

    def await_others(self) -> None:
        """See `Board`."""
        self._go.wait(_AGREE_S)

    def bring(self, number: int, evidence: Message) -> None:
        """See `Board`."""
        self._evidence[0] = evidence

    def gather(self, own: Callable[[], Message]) -> Mapping[int, Message] | None:
        """Evidence of all nodes; None if one of them has none.

        Args:
            own: gives that of this node.
        """
        self._wishes += 1
        self._evidence = {}
        others = self._server.connected & self.posts.ages().keys()
        for node in others:
            self._server.push(node, {"wish": self._wishes})
        self._evidence[0] = own()
        deadline = time.monotonic() + _EVIDENCE_S
        while others - self._evidence.keys() and time.monotonic() < deadline:
            time.sleep(0.05)
        return None if others - self._evidence.keys() else dict(self._evidence)

    def needed(self, limit: float) -> bool:
        """See `Board`."""
        heard = {node for node, age in self.posts.ages().items() if age <= limit}
        return bool(heard & self._server.connected)

    def leave(self) -> None:
        """See `Board`."""
        self._server.close()

    def _receive(self, node: int, message: Message) -> Message | None:
        if "verdict" in message:
            if not isinstance(message["verdict"], dict):
                raise ValueError(message)
            self._spread(node, message["verdict"])
        elif "held" in message:
            self._unaware -= {node}
            self._go_if_all_know()
        elif "evidence" in message:
            if message["evidence"] == self._wishes:
                self._evidence[node] = message
        else:
            self.posts.put(node, message["rows"], left=bool(message.get("left")))
            return {"rows": self._rows, "asleep": self.asleep, "left": self._left}
        return None

    def _spread(self, origin: int, report: Message) -> None:
        self._verdicts += 1
        self._go.clear()
        message = {"verdict": report, "number": self._verdicts}
        heard = {node for node, age in self.posts.ages().items() if age <= PATIENCE_S}
        self._unaware = others = frozenset(self._server.connected & heard - {origin})
        for node in others:
            self._server.push(node, message)
        if origin:
            self._hold()
            self.inbox.put(message)
            self.news.set()
        self._go_if_all_know()

    def _go_if_all_know(self) -> None:
        if not self._unaware:
            for node in self._server.connected:
                self._server.push(node, {"go": self._verdicts})
            self._go.set()
