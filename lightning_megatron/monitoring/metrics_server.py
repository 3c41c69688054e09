"""HTTP server for metrics inside a training process: who may ask, and for which pages.

It serves WSGI applications, such as `prometheus_client.make_wsgi_app`, from daemon threads. A
client that sends nothing for five seconds is cut off.

A server on the loopback interface is in reach of every web page that is open in a browser on the
same machine, by way of a name that its owner resolves to 127.0.0.1. So requests whose ``Host`` is
not the loopback interface are refused. A server that others may reach asks for a token instead.
"""

import hmac
import json
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from lightning_megatron.launch import interfaces

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address, a number or a name."""
    with suppress(ValueError):
        return host.lower() == "localhost" or interfaces.is_loopback(host)
    return False


class Guard:
    """WSGI middleware that checks method, host, token and path.

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
        start_response(refusal, [("Content-Type", "text/plain"), ("WWW-Authenticate", "Bearer")])
        return [f"{refusal}\n".encode()]

    def _refusal(self, request: dict[str, Any]) -> str | None:
        if request["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return "405 Method Not Allowed"
        if self._token is None:
            if not is_loopback(_host(request.get("HTTP_HOST", ""))):
                return "403 Forbidden"
        else:
            given = request.get("HTTP_AUTHORIZATION", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode(), self._token.encode()):
                return "401 Unauthorized"
        return None if request["PATH_INFO"] in self._pages else "404 Not Found"


def _host(header: str) -> str:
    """Host of a ``Host`` header, without the port."""
    with suppress(ValueError):
        return urlsplit(f"//{header}").hostname or ""
    return ""


def health_page(health: Callable[[], tuple[bool, dict[str, Any]]]) -> Application:
    """Return a page that says 200 or 503, and why, as JSON."""

    def page(request: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        good, facts = health()
        status = "200 OK" if good else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [f"{json.dumps(facts)}\n".encode()]

    return page


class _Handler(WSGIRequestHandler):
    timeout = 5.0

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, as it would go into the output of training."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind like `HTTPServer`, but without a DNS request for the name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that went away."""


class MetricsServer:
    """Serves an application in a thread, from the construction on.

    Args:
        application: WSGI application.
        host: address to listen on.
        port: 0 for any that is free.

    Raises:
        OSError: the port is in use, or not allowed.
    """

    def __init__(self, application: Application, host: str, port: int) -> None:
        self._server = _Server(host, port)
        self._server.set_app(application)
        self.port = int(self._server.server_address[1])
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.25,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
