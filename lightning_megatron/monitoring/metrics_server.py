"""HTTP server for metrics inside a training process, with limits that protect training.

It answers ``GET /metrics`` and ``GET /healthz``, and nothing else, under limits: so many
connections at a time, so many a second, so many seconds for each from its first byte to its last
(which ends a client that sends a byte now and then), headers of 64 KiB, no bodies. Everything runs
in daemon threads. What comes faster is not even accepted, and waits in the kernel or is turned away
there: each answer takes Python's lock for about a millisecond, which training needs as well.

A server on the loopback interface is in reach of every web page that is open in a browser on the
same machine, by way of a name that its owner resolves to 127.0.0.1. So requests whose ``Host`` is
not the loopback interface are refused. A server that others may reach asks for a token instead.
"""

import contextlib
import hmac
import ipaddress
import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

MAX_BODY = 8192
"""Bytes that a request may announce; they are not read."""
MAX_CONNECTIONS = 8
DEADLINE_S = 5.0
"""Seconds that a connection may last."""
PER_SECOND = 2.0
"""Connections per second that are accepted in the long run; a scraper makes one in some seconds."""
BURST = 10
"""Connections that are accepted at once after a pause."""
_DRAINED = 4 * 2**20
"""Bytes of a refused body that are thrown away, so that the client gets to read the answer."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """WSGI middleware that checks method, body size, host and token.

    Args:
        pages: applications by path.
        token: secret of the header ``Authorization: Bearer``; None: any client may read.
    """

    def __init__(self, pages: dict[str, Application], token: str | None = None) -> None:
        self._pages = pages
        self._token = token

    def __call__(
        self, request: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        """Answer, as WSGI demands."""
        refusal = self._refusal(request)
        if refusal is None:
            return self._pages[request["PATH_INFO"]](request, start_response)
        body = (refusal + "\n").encode()
        headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))]
        if refusal.startswith("401"):
            headers.append(("WWW-Authenticate", "Bearer"))
        start_response(refusal, headers)
        return [body]

    def _refusal(self, request: dict[str, Any]) -> str | None:
        if request["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return "405 Method Not Allowed"
        if _announces_too_much(request):
            return "413 Content Too Large"
        if self._token is None and not is_loopback(_host(request.get("HTTP_HOST", ""))):
            return "403 Forbidden"
        if self._token is not None:
            given = request.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return "401 Unauthorized"
        return None if request["PATH_INFO"] in self._pages else "404 Not Found"


def _announces_too_much(request: dict[str, Any]) -> bool:
    length = request.get("CONTENT_LENGTH") or "0"
    body = not length.isdecimal() or int(length[:20]) > MAX_BODY
    return body or "HTTP_TRANSFER_ENCODING" in request


def _host(header: str) -> str:
    """Host of a ``Host`` header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def health_page(health: Callable[[], tuple[bool, dict[str, Any]]]) -> Application:
    """Return a page that says 200 or 503, and why, as JSON."""

    def page(request: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        good, facts = health()
        body = (json.dumps(facts) + "\n").encode()
        status = "200 OK" if good else "503 Service Unavailable"
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]

    return page


class _Handler(WSGIRequestHandler):
    timeout = DEADLINE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, as it would go into the output of training."""

    def address_string(self) -> str:
        """Address of the client; its name would need a DNS request."""
        return str(self.client_address[0])


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, host: str, port: int, deadline_s: float, per_second: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._deadline_s = deadline_s
        self._per_second = per_second
        self._left = float(BURST)
        self._counted = time.monotonic()
        self._open: dict[int, tuple[float, socket.socket]] = {}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind like `HTTPServer`, but without a DNS request for the name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        """The next connection, when it is time for one."""
        now = time.monotonic()
        self._left = min(self._left + (now - self._counted) * self._per_second, BURST)
        self._counted = now
        self._left -= 1
        if self._left < 0:
            time.sleep(-self._left / self._per_second)
        return super().get_request()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread, unless there are too many."""
        if not self._slots.acquire(blocking=False):
            request.close()
            return
        self._open[id(request)] = (time.monotonic() + self._deadline_s, request)
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system gives no more threads
            self._open.pop(id(request), None)
            self._slots.release()
            request.close()

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and give the slot back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._open.pop(id(request), None)
            self._slots.release()

    def service_actions(self) -> None:
        """Close connections after their deadline; `serve_forever` calls this regularly."""
        now = time.monotonic()
        for until, connection in tuple(self._open.values()):
            if now > until:
                _shut(connection, socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Read the rest of the request, so that the client sees the answer, and close."""
        _shut(request, socket.SHUT_WR)
        with contextlib.suppress(OSError):
            request.settimeout(0.5)
            left = _DRAINED
            while left > 0 and (got := len(request.recv(65536))):
                left -= got
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that went away."""


def _shut(connection: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # it is closed
        connection.shutdown(how)


class MetricsServer:
    """Serves an application in a thread, from the construction on.

    Args:
        application: WSGI application.
        host: address to listen on.
        port: 0 for any that is free.
        deadline_s: seconds that a connection may last.
        per_second: connections that are accepted in the long run.

    Raises:
        OSError: the port is in use, or not allowed.
    """

    def __init__(
        self,
        application: Application,
        host: str,
        port: int,
        deadline_s: float = DEADLINE_S,
        per_second: float = PER_SECOND,
    ) -> None:
        self._server = _Server(host, port, deadline_s, per_second)
        self._server.set_app(application)
        self.port = int(self._server.server_address[1])
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.25,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
