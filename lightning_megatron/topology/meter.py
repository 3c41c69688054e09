"""What a rank sends over an axis, and how long it stands waiting for it.

Every collective over an axis, and every message of a pipeline, is counted on the axis' `Meter`:

* *bytes* that this rank sends, by the cheapest known way: of a whole tensor of ``n`` bytes on ``p``
  ranks a gather or a reduce-scatter sends ``n (p-1)/p``, an all-reduce twice that, a message ``n``.
  What a backend really does may be more (gloo's reduce-scatter) or go through fewer links;
* *exposed* seconds: the host stood still, or on a GPU the stream that computes, until the transfer
  was over. Waiting for a peer that is late is in it, and in a pipeline the bubble;
* *total* seconds from the start of a transfer to its end, whether anybody waited or not; of the
  messages between stages, which have no start that a receiver could know, those of waiting.

Counting is two additions. Exposed time on a CPU is two looks at a clock, and always measured; the
total, and exposed time on a GPU, need a callback or events per transfer, and are measured only
while `Meter.timed` is set. Small sums that belong to no layer (norms of gradients, values that are
logged, agreements) are not counted.
"""

import time
from typing import Any

import torch
import torch.distributed as dist


class Meter:
    """Counts the transfers of one rank over one kind of axis.

    Attributes:
        calls: transfers that this rank has started.
        bytes: that it has sent.
        exposed_s: seconds in which nothing else was done.
        total_s: seconds of the transfers that were started while ``timed``; of CPUs only.
        timed: whether transfers are timed that need more than a clock for it.
    """

    __slots__ = ("_ended", "_events", "bytes", "calls", "exposed_s", "timed", "total_s")

    def __init__(self) -> None:
        self.calls = self.bytes = 0
        self.exposed_s = self.total_s = 0.0
        self.timed = False
        self._events: list[tuple[Any, Any]] = []
        self._ended: list[float] = []

    def count(self, sent: float) -> None:
        """A transfer in which this rank sends so many bytes."""
        self.calls += 1
        self.bytes += int(sent)

    def started(self, work: dist.Work | None) -> None:
        """Take the time of a transfer that has just been started, if ``timed``."""
        if not self.timed or work is None or torch.cuda.is_available():
            return
        begin = time.perf_counter()

        def ended(_: Any) -> None:  # in a thread of the backend
            self._ended.append(time.perf_counter() - begin)

        work.get_future().then(ended)

    def wait(self, work: dist.Work) -> None:
        """Wait for a transfer, and know how long."""
        on_device = self.timed and torch.cuda.is_available()
        if on_device:
            before, after = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            before.record()
        begin = time.perf_counter()
        work.wait()
        if on_device:
            after.record()
            self._events.append((before, after))
        else:
            self.exposed_s += time.perf_counter() - begin

    def stood(self, seconds: float) -> None:
        """A transfer during which the host stood still."""
        self.exposed_s += seconds
        if self.timed:
            self.total_s += seconds

    def settle(self) -> None:
        """Take in what was timed elsewhere; waits for the device."""
        while self._ended:
            self.total_s += self._ended.pop()
        for before, after in self._events:
            after.synchronize()
            self.exposed_s += before.elapsed_time(after) / 1e3
        self._events.clear()
