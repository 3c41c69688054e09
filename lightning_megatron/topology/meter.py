"""Meter of the bytes that a rank sends over an axis, and of the time it waits for them.

Every collective over an axis, and every message of a pipeline, is counted on the axis' `Meter`:

* *bytes* that this rank sends, by the cheapest known way: of a whole tensor of ``n`` bytes on ``p``
  ranks a gather or a reduce-scatter sends ``n (p-1)/p``, an all-reduce twice that, a message ``n``.
  What a backend really does may be more (gloo's reduce-scatter) or go through fewer links;
* of these, bytes *between nodes*: those that the ring, the exchange or the message sends to a rank
  of another node (`topology.nodes`). Of a ring all leave the node, or none, so it is the mean over
  the ranks that tells: times the ranks of a node, it is what the node sends;
* *exposed* seconds: the host stood still, or on a GPU the stream that computes, until the transfer
  was over. Waiting for a peer that is late is in it, and in a pipeline the bubble;
* *hidden* seconds in which transfers were under way that nobody waited for yet, and the rank did
  not wait for others. Where several are under way at a time they count once, so exposed and
  hidden seconds together are those in which the axis was in use. The messages between stages have
  none: when one sets out its receiver does not know. Reduce-scatters of gloo have none either.

Counting is a few additions. Exposed time on a CPU is two looks at a clock, and always measured;
hidden time, and exposed time on a GPU, need a callback or events per transfer, and are measured
only while `Meter.timed` is set. Small sums that belong to no layer (norms of gradients, values that
are logged, agreements) are not counted.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatron._torch.devices import in_host_memory
from lightning_megatron.topology.nodes import Nodes


class _Flight:
    """Transfer that nobody has waited for yet."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._end: float | None = None

    def end(self, _: Any) -> None:
        """Record the end of the transfer; called in a thread of the backend."""
        self._end = time.perf_counter()

    def interval(self, now: float) -> tuple[float, float]:
        """Start, and the end, or ``now`` if it has not ended."""
        end = self._end
        return self._begin, now if end is None else min(end, now)


def _hidden_seconds(
    flights: Sequence[tuple[float, float]], waits: Sequence[tuple[float, float]]
) -> float:
    """Seconds within at least one flight, and within no wait."""
    marks = [(at, by, 0) for flight in flights for at, by in zip(flight, (1, -1), strict=True)]
    marks += [(at, 0, by) for wait in waits for at, by in zip(wait, (1, -1), strict=True)]
    flying = waiting = 0
    total = last = 0.0
    for at, in_flight, in_wait in sorted(marks):
        if flying and not waiting:
            total += at - last
        flying, waiting, last = flying + in_flight, waiting + in_wait, at
    return total


class Meter:
    """Meter of the transfers of one rank over one kind of axis.

    Args:
        nodes: nodes of the run; None if there is one.
        device: of the run, whose streams wait for transfers; a CPU when None.

    Attributes:
        calls: number of transfers that this rank has started.
        bytes: number of bytes that it has sent.
        inter_node_bytes: number of these bytes that went to other nodes.
        exposed_s: seconds in which the rank only waited.
        hidden_s: seconds in which transfers that were started while ``timed`` ran and the rank did
            not wait, by the last `settle`; on CPUs only.
        timed: whether to time transfers that need more than a clock for it.
    """

    __slots__ = (
        *("_device", "_events", "_flights", "_flying", "_nodes", "_shares", "_waits"),
        *("bytes", "calls", "exposed_s", "hidden_s", "inter_node_bytes", "timed"),
    )

    def __init__(self, nodes: Nodes | None = None, device: torch.device | None = None) -> None:
        self._device = None if device is None or in_host_memory(device) else device.type
        self._nodes = nodes if nodes is not None and nodes.count > 1 else None
        self._shares: dict[str, tuple[float, float]] = {}
        self.calls = 0
        self.bytes = 0
        self.inter_node_bytes = 0
        self.exposed_s = 0.0
        self.hidden_s = 0.0
        self.timed = False
        self._events: list[tuple[Any, Any]] = []
        self._flying: dict[dist.Work, _Flight] = {}
        self._flights: list[tuple[float, float]] = []
        self._waits: list[tuple[float, float]] = []

    def count(self, sent: float, leaving: float = 0.0) -> None:
        """Count a transfer.

        Args:
            sent: number of bytes that this rank sends.
            leaving: share of them that goes to other nodes.
        """
        self.calls += 1
        self.bytes += int(sent)
        self.inter_node_bytes += int(sent * leaving)

    def ring(self, sent: float, group: dist.ProcessGroup | None) -> None:
        """Count a collective that goes around the ring of a group."""
        self.count(sent, self._leaving(group)[0])

    def exchange(self, sent: float, group: dist.ProcessGroup | None) -> None:
        """Count a collective in which this rank sends equally much to every other rank."""
        self.count(sent, self._leaving(group)[1])

    def to_each(self, sent: Sequence[float], peers: Sequence[int]) -> None:
        """Count a collective in which this rank sends to every rank what is that rank's.

        Args:
            sent: number of bytes for each rank; those for this rank itself do not count.
            peers: global ranks, in the same order.
        """
        nodes, rank = self._nodes, dist.get_rank()
        by_peer = {p: n for p, n in zip(peers, sent, strict=True) if p != rank}
        away = 0.0
        if nodes is not None:
            away = sum(n for p, n in by_peer.items() if nodes[p] != nodes[rank])
        total = sum(by_peer.values())
        self.count(total, away / total if total else 0.0)

    def message(self, sent: float, peer: int) -> None:
        """Count a message to one global rank."""
        nodes = self._nodes
        self.count(sent, float(nodes is not None and nodes[peer] != nodes[dist.get_rank()]))

    def _leaving(self, group: dist.ProcessGroup | None) -> tuple[float, float]:
        """Shares of the bytes of a ring and of an exchange that go to other nodes."""
        nodes = self._nodes
        if nodes is None or group is None:
            return 0.0, 0.0
        key = group.group_name  # to hold the group would keep its threads
        if key not in self._shares:
            ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
            self._shares[key] = nodes.by_ring(ranks, rank), nodes.by_exchange(ranks, rank)
        return self._shares[key]

    def started(self, work: dist.Work | None) -> None:
        """Time a transfer that has just been started, if ``timed``."""
        if not self.timed or work is None or self._device is not None:
            return
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's reduce-scatter does not tell when it ends
            return
        flight = self._flying[work] = _Flight(time.perf_counter())
        future.then(flight.end)

    def wait(self, work: dist.Work) -> None:
        """Wait for a transfer, and count the time."""
        on_device = self.timed and self._device is not None
        if on_device:
            before, after = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            before.record()
        begin = time.perf_counter()
        if self._flying and (flight := self._flying.pop(work, None)) is not None:
            self._flights.append(flight.interval(begin))
        work.wait()
        if on_device:
            after.record()
            self._events.append((before, after))
        else:
            self.stood(time.perf_counter() - begin)

    def stood(self, seconds: float) -> None:
        """Count a transfer during which the host waited."""
        self.exposed_s += seconds
        if self.timed:
            now = time.perf_counter()
            self._waits.append((now - seconds, now))

    def settle(self) -> None:
        """Add times that were measured on the device, for which it waits, and the hidden ones."""
        now = time.perf_counter()
        self._flights += [flight.interval(now) for flight in self._flying.values()]
        self._flying.clear()  # of those that are under way, what follows is not counted
        self.hidden_s += _hidden_seconds(self._flights, self._waits)
        self._flights.clear()
        self._waits.clear()
        for before, after in self._events:
            after.synchronize()
            self.exposed_s += before.elapsed_time(after) / 1e3
        self._events.clear()
