"""Work that may take long or fail, and must do neither to training.

A thread takes it from a queue of limited length. What does not fit is dropped, what fails is
dropped, and each kind of failure is said once.
"""

import json
import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


class Courier:
    """Runs functions one after the other in a daemon thread.

    Args:
        length: how many may wait.

    Attributes:
        dropped: how many did not fit.
    """

    def __init__(self, length: int = 100) -> None:
        self.dropped = 0
        self._queue: queue.Queue[tuple[str, Callable[[], Any]]] = queue.Queue(length)
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()

    def send(self, name: str, work: Callable[[], Any]) -> None:
        """Have ``work`` called soon; ``name`` is how a failure is reported."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="courier", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait((name, work))
        except queue.Full:
            self.dropped += 1
            self._tell(name, "too many are waiting")

    def drain(self, timeout_s: float) -> bool:
        """Wait until all is done, or not longer; returns whether it is."""
        until = time.monotonic() + timeout_s
        while self._queue.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.01)
        return not self._queue.unfinished_tasks

    def _run(self) -> None:
        while True:
            name, work = self._queue.get()
            try:
                work()
            except Exception as error:
                self._tell(name, f"{type(error).__name__}: {error}")
            finally:
                self._queue.task_done()

    def _tell(self, name: str, why: str) -> None:
        if name not in self._told:
            self._told.add(name)
            message = "%s failed: %s; training goes on, further failures are not reported"
            logger.warning(message, name, why)


def post(url: str, content: Mapping[str, Any], timeout_s: float = _TIMEOUT_S) -> None:
    """Post JSON."""
    body = json.dumps(content).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        answer.read(1024)


def shown_url(url: str) -> str:
    """The part of a URL that is no secret: webhooks carry theirs in the path."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}/..."
