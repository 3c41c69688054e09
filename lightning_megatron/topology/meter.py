"""What a rank sends over an axis, and how long it stands waiting for it.

Every collective over an axis, and every message of a pipeline, is counted on the axis' `Meter`:

* *bytes* that this rank sends, by the cheapest known way: of a whole tensor of ``n`` bytes on ``p``
  ranks a gather or a reduce-scatter sends ``n (p-1)/p``, an all-reduce twice that, a message ``n``.
  What a backend really does may be more (gloo's reduce-scatter) or go through fewer links;
* of these, bytes *between nodes*: those that the ring, the exchange or the message sends to a rank
  of another node (`topology.nodes`). Of a ring all leave the node, or none, so it is the mean over
  the ranks that tells: times the ranks of a node, it is what the node sends;
* *exposed* seconds: the host stood still, or on a GPU the stream that computes, until the transfer
  was over. Waiting for a peer that is late is in it, and in a pipeline the bubble;
* *hidden* seconds from the start of a transfer until it is over or somebody begins to wait for it.
  Exposed and hidden seconds together are those that the transfers take. The messages between
  stages have none: when one sets out its receiver does not know.

Counting is a few additions. Exposed time on a CPU is two looks at a clock, and always measured;
hidden time, and exposed time on a GPU, need a callback or events per transfer, and are measured
only while `Meter.timed` is set. Small sums that belong to no layer (norms of gradients, values that
are logged, agreements) are not counted.
"""

import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron.topology.nodes import Nodes


class _Flight:
    """A transfer that nobody has waited for yet."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._end: float | None = None

    def end(self, _: Any) -> None:
        """The transfer is over; called in a thread of the backend."""
        self._end = time.perf_counter()

    def seconds(self, now: float) -> float:
        """Until its end, or ``now`` if it has not come."""
        end = self._end
        return (now if end is None else min(end, now)) - self._begin


class Meter:
    """Counts the transfers of one rank over one kind of axis.

    Args:
        nodes: of the run; None where there is but one.

    Attributes:
        calls: transfers that this rank has started.
        bytes: that it has sent.
        inter_node_bytes: of these, those to ranks of other nodes.
        exposed_s: seconds in which nothing else was done.
        hidden_s: seconds in which transfers that were started while ``timed`` went on and nobody
            waited for them; on CPUs only.
        timed: whether transfers are timed that need more than a clock for it.
    """

    __slots__ = (
        *("_events", "_flying", "_nodes", "_shares"),
        *("bytes", "calls", "exposed_s", "hidden_s", "inter_node_bytes", "timed"),
    )

    def __init__(self, nodes: Nodes | None = None) -> None:
        self._nodes = nodes if nodes is not None and nodes.count > 1 else None
        self._shares: dict[str, tuple[float, float, float]] = {}
        self.calls = self.bytes = self.inter_node_bytes = 0
        self.exposed_s = self.hidden_s = 0.0
        self.timed = False
        self._events: list[tuple[Any, Any]] = []
        self._flying: dict[dist.Work, _Flight] = {}

    def count(self, sent: float, leaving: float = 0.0) -> None:
        """A transfer in which this rank sends so many bytes.

        Args:
            sent: bytes.
            leaving: share of them that goes to other nodes.
        """
        self.calls += 1
        self.bytes += int(sent)
        self.inter_node_bytes += int(sent * leaving)

    def ring(self, sent: float, group: dist.ProcessGroup | None) -> None:
        """A collective that goes around the ring of a group."""
        self.count(sent, self._leaving(group)[0])

    def exchange(self, sent: float, group: dist.ProcessGroup | None) -> None:
        """A collective in which this rank sends the same to every other rank of a group."""
        self.count(sent, self._leaving(group)[1])

    def broadcasts(self, sent: float, group: dist.ProcessGroup | None) -> None:
        """A broadcast from every rank of a group, of which each sends on what others send."""
        self.count(sent, self._leaving(group)[2])

    def message(self, sent: float, peer: int) -> None:
        """A message to one global rank."""
        nodes = self._nodes
        self.count(sent, float(nodes is not None and nodes[peer] != nodes[dist.get_rank()]))

    def _leaving(self, group: dist.ProcessGroup | None) -> tuple[float, float, float]:
        """Share of what a ring, an exchange and broadcasts send to other nodes."""
        nodes = self._nodes
        if nodes is None or group is None:
            return 0.0, 0.0, 0.0
        key = group.group_name  # to hold the group would keep its threads
        if key not in self._shares:
            ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
            ways = nodes.by_ring, nodes.by_exchange, nodes.by_broadcasts
            ring, exchange, broadcasts = (way(ranks, rank) for way in ways)
            self._shares[key] = ring, exchange, broadcasts
        return self._shares[key]

    def started(self, work: dist.Work | None) -> None:
        """Take the time of a transfer that has just been started, if ``timed``."""
        if not self.timed or work is None or torch.cuda.is_available():
            return
        flight = self._flying[work] = _Flight(time.perf_counter())
        work.get_future().then(flight.end)

    def wait(self, work: dist.Work) -> None:
        """Wait for a transfer, and know how long."""
        on_device = self.timed and torch.cuda.is_available()
        if on_device:
            before, after = (torch.Event("cuda", enable_timing=True) for _ in range(2))
            before.record()
        begin = time.perf_counter()
        if self._flying and (flight := self._flying.pop(work, None)) is not None:
            self.hidden_s += flight.seconds(begin)
        work.wait()
        if on_device:
            after.record()
            self._events.append((before, after))
        else:
            self.exposed_s += time.perf_counter() - begin

    def stood(self, seconds: float) -> None:
        """A transfer during which the host stood still."""
        self.exposed_s += seconds

    def settle(self) -> None:
        """Take in what was timed elsewhere; waits for the device."""
        now = time.perf_counter()
        self.hidden_s += sum(flight.seconds(now) for flight in self._flying.values())
        self._flying.clear()  # of those that are under way, what follows is not counted
        for before, after in self._events:
            after.synchronize()
            self.exposed_s += before.elapsed_time(after) / 1e3
        self._events.clear()
