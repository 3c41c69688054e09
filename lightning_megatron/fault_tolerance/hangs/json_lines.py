"""JSON lines over TCP between the monitors of several nodes.

One process listens, the others connect, say who they are with a word that only processes of the run
know, and from then on either side sends lines. A client sends one every second, and takes a server
that does not answer for three seconds for gone: it connects anew for as long as it is not closed,
so that a cable that is put back is found within seconds, whatever the kernel's own timers say.
Those are set as well (`harden`), for what lies in the buffers of a connection whose other end has
vanished.

Nothing that comes over the network is unpickled, run or kept beyond a bounded size.

This file runs in a process without torch, see `node_monitor`.
"""

import json
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

PERIOD_S = 1.0
"""Seconds between two lines of a client."""
PATIENCE_S = 3.0
"""Seconds without an answer after which a client connects anew."""
_LONGEST, _LONGEST_HELLO = 4 << 20, 1024
_HELLO_S = 5.0
_STRANGERS = 64
"""Connections that have not said who they are."""

Message = dict[str, Any]


def harden(connection: socket.socket) -> None:
    """Have the kernel notice within seconds that the other end of a connection has vanished."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 10_000),
    ):
        if hasattr(socket, name):  # macOS has other names for them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _line(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _messages(data: bytearray, longest: int) -> list[Message]:
    """Take whole lines off the beginning of ``data``.

    Raises:
        ValueError: a line is no JSON object, or too long.
    """
    *lines, rest = bytes(data).split(b"\n")
    if max(map(len, [*lines, rest])) > longest:
        raise ValueError("the line is too long")
    data[:] = rest
    found = [json.loads(line) for line in lines]
    if not all(isinstance(message, dict) for message in found):
        raise ValueError("the line is no object")
    return found


class _Guest:
    """A connection, as the server sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.node: int | None = None
        self.since = time.monotonic()
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.is_full = False
        """Whether more is to be sent when the connection takes it."""


class LineServer:
    """Listens to the other nodes; a thread of its own handles all connections.

    Args:
        listening: socket that listens already.
        token: word that each client has to know.
        nodes: number of nodes; clients are some of 0 to ``nodes - 1``.
        receive: called in the server's thread with a node and its message; returns the answer.

    Attributes:
        closed: nodes whose systems have closed their connections, and which have not come back.
    """

    def __init__(
        self,
        listening: socket.socket,
        token: str,
        nodes: int,
        receive: Callable[[int, Message], Message | None],
    ) -> None:
        self._listening = listening
        self._token = token
        self._nodes = nodes
        self._receive = receive
        self._selector = selectors.DefaultSelector()
        self._wakes, self._awakens = socket.socketpair()
        self._guests: set[_Guest] = set()
        self._pushed: set[_Guest] = set()
        self.closed: set[int] = set()
        self._lock = threading.Lock()
        self._ends = False
        for one in (listening, self._wakes):
            one.setblocking(False)
            self._selector.register(one, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> set[int]:
        """Nodes that have a connection; it may be one whose other end has vanished."""
        with self._lock:
            return {guest.node for guest in self._guests if guest.node is not None}

    def push(self, node: int, message: Message) -> None:
        """Send a message to a node, if it is connected."""
        with self._lock:
            for guest in self._guests:
                if guest.node == node:
                    guest.outgoing += _line(message)
                    self._pushed.add(guest)
        self._wake()

    def close(self) -> None:
        """Send what is left to send, as far as that goes at once, and end all connections."""
        self._ends = True
        self._wake()
        self._thread.join(PATIENCE_S)

    def _wake(self) -> None:
        with suppress(OSError):  # it is awake already
            self._awakens.send(b".")

    def _run(self) -> None:
        swept = time.monotonic()
        while not self._ends:
            for key, events in self._selector.select(PERIOD_S):
                if key.fileobj is self._listening:
                    self._accept()
                elif key.fileobj is self._wakes:
                    self._wakes.recv(4096)
                else:
                    self._serve(key.data, events)
            with self._lock:
                pushed, self._pushed = self._pushed, set()
            for guest in pushed:
                self._write(guest)
            if time.monotonic() - swept > PERIOD_S:
                swept = time.monotonic()
                self._sweep(swept)
        for guest in list(self._guests):
            self._write(guest)
            self._drop(guest)
        self._listening.close()

    def _serve(self, guest: _Guest, events: int) -> None:
        if events & selectors.EVENT_READ and guest in self._guests:
            self._read(guest)
        if guest in self._guests:
            self._write(guest)

    def _sweep(self, now: float) -> None:
        """Drop who does not say who it is."""
        for guest in [g for g in self._guests if g.node is None and now - g.since > _HELLO_S]:
            self._drop(guest)

    def _accept(self) -> None:
        with suppress(OSError):  # gone again, or no file descriptor left
            connection, _ = self._listening.accept()
            if sum(guest.node is None for guest in self._guests) >= _STRANGERS:
                connection.close()
                return
            connection.setblocking(False)
            harden(connection)
            guest = _Guest(connection)
            with self._lock:
                self._guests.add(guest)
            self._selector.register(connection, selectors.EVENT_READ, guest)

    def _drop(self, guest: _Guest) -> None:
        with self._lock:
            self._guests.discard(guest)
        with suppress(KeyError, ValueError):
            self._selector.unregister(guest.connection)
        guest.connection.close()

    def _write(self, guest: _Guest) -> None:
        """Send what the connection takes; the rest goes when it takes more."""
        broken = False
        with self._lock:
            if guest not in self._guests:
                return
            try:
                if guest.outgoing:
                    del guest.outgoing[: guest.connection.send(guest.outgoing)]
            except BlockingIOError:
                pass
            except OSError:
                broken = True
            left = len(guest.outgoing)
        if broken or left > _LONGEST:
            self._drop(guest)
        elif bool(left) != guest.is_full:
            guest.is_full = bool(left)
            more = selectors.EVENT_WRITE if guest.is_full else 0
            self._selector.modify(guest.connection, selectors.EVENT_READ | more, guest)

    def _read(self, guest: _Guest) -> None:
        try:
            data = guest.connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            guest.incoming += data
            longest = _LONGEST if guest.node is not None else _LONGEST_HELLO
            for message in _messages(guest.incoming, longest):
                self._take(guest, message)
        except BlockingIOError:
            return
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, ConnectionResetError) and guest.node is not None:
                self.closed.add(guest.node)
            self._drop(guest)

    def _take(self, guest: _Guest, message: Message) -> None:
        if guest.node is None:
            node, token = message["node"], str(message["token"])
            from hmac import compare_digest  # late: it loads OpenSSL, 4 MB that clients do without

            known = compare_digest(token.encode(), self._token.encode())
            if not known or type(node) is not int or not 0 <= node < self._nodes:
                raise ValueError("a stranger")
            for other in [g for g in self._guests if g.node == node]:
                self._drop(other)  # its old connection
            guest.node = node
            self.closed.discard(node)
            return
        answer = self._receive(guest.node, message)
        if answer is not None:
            with self._lock:
                guest.outgoing += _line(answer)


class LineClient:
    """Talks to a `LineServer` until it is closed, over as many connections as that takes.

    Args:
        address: of the server: host and port.
        token: word that the server expects.
        node: number of this node.
        say: called once a second, for what is sent then.
        receive: called with each message, in the client's thread.

    Attributes:
        heard: number of messages that have come.
        refused: whether the server's machine answered last that nobody listens there any more.
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        node: int,
        say: Callable[[], Message],
        receive: Callable[[Message], None],
    ) -> None:
        self._address = address
        self._hello = {"node": node, "token": token}
        self._say = say
        self._receive = receive
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.heard = 0
        self.refused = False
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> bool:
        """Send a message now; whether there is a connection that took it."""
        with self._lock:
            if self._connection is None:
                return False
            try:
                self._connection.sendall(_line(message))
            except OSError:
                return False
            return True

    def close(self) -> None:
        """End the connection, in order."""
        self._closed.set()
        self._thread.join(2 * PATIENCE_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            begun = time.monotonic()
            try:
                with socket.create_connection(self._address, timeout=PATIENCE_S) as connection:
                    harden(connection)
                    connection.sendall(_line(self._hello))
                    with self._lock:
                        self._connection = connection
                    self._talk(connection)
            except ConnectionRefusedError:
                self.refused = True
            except (OSError, ValueError, KeyError, TypeError):
                pass
            finally:
                with self._lock:
                    self._connection = None
            self._closed.wait(max(begun + PERIOD_S - time.monotonic(), 0.0))

    def _talk(self, connection: socket.socket) -> None:
        data, due, heard = bytearray(), 0.0, time.monotonic()
        while not self._closed.is_set():
            now = time.monotonic()
            if now >= due:
                self.send(self._say())
                due = now + PERIOD_S
            if not select.select([connection], [], [], min(due - now, 0.2))[0]:
                if time.monotonic() - heard > PATIENCE_S:
                    return
                continue
            more = connection.recv(1 << 16)
            if not more:
                self.refused = True  # by a system that runs
                return
            data += more
            heard = time.monotonic()
            for message in _messages(data, _LONGEST):
                self.refused = False
                self._receive(message)
                self.heard += 1
