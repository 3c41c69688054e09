"""Keys and values that travel around a ring.

In hop ``h`` rank ``r`` multiplies its queries with the keys of rank ``r - h`` and at the same time
passes them on to rank ``r + 1`` (Liu et al., arXiv 2310.01889). Of two buffers one is multiplied
with and sent, the other received into. In backward the gradients of keys and values follow one hop
behind them, in float32 at least: every other rank adds its part, the last one sends them home, and
there the part of the rank itself comes to them.

Over ``p`` ranks, of ``b`` sequences with ``n`` positions a rank and ``K`` heads of size ``d`` and
``e`` bytes (``a`` bytes of a sum), a rank sends ``2 b n K d e (p - 1)`` bytes forward and ``2 b n K
d (e + a) (p - 1)`` backward. In contiguous order a causal mask needs nothing of higher ranks, and a
window nothing of those more than ``ceil((window - 1) / n)`` away: less is sent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.layers.context_attention.blocks import Blocks, Task
from lightning_megatron.layers.context_attention.partial_sums import wide
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.meter import Meter


@dataclass(frozen=True)
class Route:
    """Which keys a rank has at each hop, and where they go from there.

    >>> [Route(1, 4, 3, True).source(hop) for hop in range(4)]
    [1, 0, 3, 2]
    >>> [Route(1, 4, 1, False).source(hop) for hop in range(3)]
    [1, 0, None]
    """

    rank: int
    """Place of this rank."""
    size: int
    """Ranks of the ring."""
    hops: int
    """Hops that keys travel."""
    wraps: bool
    """Whether the last rank passes on to the first."""

    @staticmethod
    def of(task: Task, size: int) -> "Route":
        """Shortest route of a call."""
        ordered = task.rule.causal and task.rows.order == "contiguous"
        if not ordered:
            return Route(task.rank, size, size - 1, True)
        reach = size - 1
        if task.rule.window is not None:
            reach = min(reach, math.ceil((task.rule.window - 1) / task.rows.local))
        return Route(task.rank, size, reach, False)

    def source(self, hop: int) -> int | None:
        """Rank whose keys this one has at a hop; None: none any more."""
        source = self.rank - hop
        if hop > self.hops or (source < 0 and not self.wraps):
            return None
        return source % self.size

    def passes(self, hop: int) -> bool:
        """Whether this rank passes on the keys that it has at a hop."""
        follows = self.wraps or self.rank + 1 < self.size
        return self.source(hop) is not None and hop < self.hops and follows

    def last_hop(self, source: int) -> int:
        """Hop after which the keys of a rank go no further."""
        return self.hops if self.wraps else min(self.hops, self.size - 1 - source)

    def ends(self, hop: int) -> bool:
        """Whether the keys of some rank have gone as far as they go, away from it."""
        return hop > 0 and any(self.last_hop(source) == hop for source in range(self.size))

    def holder(self, source: int, hop: int) -> int:
        """Rank that has the keys of another one at a hop."""
        return (source + hop) % self.size


class Transfer:
    """Messages under way.

    Args:
        works: their handles.
        held: what is sent and received, kept alive.
        meter: meter that counts the time.
    """

    def __init__(self, works: Sequence[dist.Work], held: Sequence[Tensor], meter: Meter) -> None:
        self._works = works
        self._held: Sequence[Tensor] | None = held
        self._meter = meter
        for work in works:
            meter.started(work)

    def wait(self) -> None:
        """Wait until they have arrived, or left."""
        for work in self._works:
            self._meter.wait(work)
        self._works, self._held = (), None


def exchange(
    axis: Axis, sent: tuple[Tensor, int] | None, received: tuple[Tensor, int] | None
) -> Transfer:
    """Start to send a tensor to a rank of the axis, and to receive one; all ranks call this.

    Args:
        axis: axis of both.
        sent: contiguous tensor, and place of its receiver on the axis.
        received: contiguous tensor to fill, and place of its sender.
    """
    group = axis.group
    assert group is not None
    held = [tensor for tensor, _ in filter(None, (sent, received))]
    if sent is not None:
        size = sent[0].numel() * sent[0].element_size()
        axis.meter.message(size, axis.ranks[sent[1]])
    operations = []
    for message, run in ((sent, dist.isend), (received, dist.irecv)):
        if message is not None:
            operations.append(dist.P2POp(run, message[0], axis.ranks[message[1]], group))
    works = dist.batch_isend_irecv(operations) if operations else []
    return Transfer(works, held, axis.meter)


def forward(axis: Axis, blocks: Blocks, task: Task, k: Tensor, v: Tensor) -> None:
    """Attend to the keys of all ranks."""
    route, ring = Route.of(task, axis.size), _Keys(axis)
    ring.begin(route, k, v)
    for hop in range(route.hops + 1):
        ring.start(hop)
        source = route.source(hop)
        if source is not None:
            blocks.forward(source, *ring.present(hop))
        ring.finish()


def backward(axis: Axis, blocks: Blocks, task: Task, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of this rank's keys and values."""
    route, ring = Route.of(task, axis.size), _Keys(axis)
    ring.begin(route, k, v)
    sums = _Gradients(axis, route, k)
    for hop in range(route.hops + 1):
        ring.start(hop)
        source = route.source(hop)
        parts = [] if source is None else blocks.backward(source, *ring.present(hop))
        sums.add(hop, parts)
        ring.finish()
    return sums.result()


class _Keys:
    """Keys and values on their way around.

    Args:
        axis: axis of the ring.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._transfer: Transfer | None = None
        self._buffers: list[Tensor] = []

    def begin(self, route: Route, k: Tensor, v: Tensor) -> None:
        """Begin with the keys and values of this rank."""
        self._route, self._own = route, (k, v)
        if not route.hops:
            return
        own = torch.stack((k, v))
        self._buffers = [own, torch.empty_like(own)]

    def start(self, hop: int) -> None:
        """Start to pass on the present keys and to receive the next ones."""
        route, sent, received = self._route, None, None
        if route.passes(hop):
            sent = self._buffers[hop % 2], (route.rank + 1) % route.size
        if route.source(hop + 1) is not None:
            received = self._buffers[(hop + 1) % 2], (route.rank - 1) % route.size
        if hop < route.hops:
            self._transfer = exchange(self._axis, sent, received)

    def present(self, hop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a hop."""
        if hop == 0:
            return self._own
        k, v = self._buffers[hop % 2].unbind(0)
        return k, v

    def finish(self) -> None:
        """Wait for what `start` has started."""
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None


class _Gradients:
    """Gradients of keys and values, one hop behind them.

    Args:
        axis: axis of the ring.
        route: route of the keys.
        like: keys of this rank.
    """

    def __init__(self, axis: Axis, route: Route, like: Tensor) -> None:
        self._axis, self._route, self._like = axis, route, like
        self._transfers: list[Transfer] = []
        self._own = self._buffer()
        self._pair: list[Tensor | None] = [None, None]
        self._turn = 0
        self._arriving: Transfer | None = None
        self._home: Tensor | None = None

    def add(self, hop: int, parts: list[tuple[tuple[int, int], Tensor, Tensor]]) -> None:
        """Add what this rank computed at a hop, and pass the sum on."""
        route = self._route
        if hop == 0:
            add_parts(self._own, parts, fresh=True)
            return
        source, following = route.source(hop), route.source(hop + 1)
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        present = self._at(self._turn)
        if source is not None:
            add_parts(present, parts, fresh=hop == 1)
        sent, received = None, None
        if route.passes(hop):
            sent = present, (route.rank + 1) % route.size
        if following is not None:
            received = self._at(1 - self._turn), (route.rank - 1) % route.size
        if hop < route.hops:
            self._settle()
            self._arriving = exchange(self._axis, sent, received)
        self._send_home(hop, source, present)
        if following is not None:
            self._turn = 1 - self._turn

    def _send_home(self, hop: int, source: int | None, present: Tensor) -> None:
        """Send a sum home that goes no further, and receive that of this rank's keys."""
        route, sent, received = self._route, None, None
        mine = route.last_hop(route.rank)
        if source is not None and route.last_hop(source) == hop:
            sent = present, source
        if mine == hop:
            self._home = self._buffer()
            received = self._home, route.holder(route.rank, hop)
        if route.ends(hop):
            self._transfers.append(exchange(self._axis, sent, received))

    def result(self) -> tuple[Tensor, Tensor]:
        """Gradients of this rank's keys and values."""
        for transfer in self._transfers:
            transfer.wait()
        if self._home is not None:
            self._own.add_(self._home)
        dk, dv = (x.to(self._like.dtype, copy=True) for x in self._own.unbind(0))
        return dk, dv

    def _settle(self) -> None:
        """Wait for sums on their way home, which lie where the next ones arrive."""
        for transfer in self._transfers:
            transfer.wait()
        self._transfers.clear()

    def _at(self, turn: int) -> Tensor:
        """One of the two buffers of sums on their way."""
        buffer = self._pair[turn]
        if buffer is None:
            buffer = self._pair[turn] = self._buffer()
        return buffer

    def _buffer(self) -> Tensor:
        like = self._like
        return like.new_empty((2, *like.shape), dtype=wide(like.dtype))


def add_parts(
    total: Tensor, parts: list[tuple[tuple[int, int], Tensor, Tensor]], *, fresh: bool
) -> None:
    """Add gradients of some places of keys and values, ``[2, b, t, n, d]``.

    Args:
        total: the sum.
        parts: places, and gradients of both.
        fresh: whether the sum holds nothing yet.
    """
    if fresh and len(parts) == 1 and parts[0][0] == (0, total.shape[2]):
        total[0].copy_(parts[0][1])
        total[1].copy_(parts[0][2])
        return
    if fresh:
        total.zero_()
    for (start, end), dk, dv in parts:
        total[0, :, start:end].add_(dk)
        total[1, :, start:end].add_(dv)
