"""Reduce-scatter and gather over several nodes, first on one level and then on the other.

Of ``n`` bytes that ``L`` ranks on each of ``N`` nodes sum and divide among each other, an exchange
between all ranks sends ``n L (N-1)/N`` from each node to others, and a ring ``n (N L - 1)/(N L)``.
Here the ranks of a node first sum what belongs to ranks of the same *place*, on whatever node,
where one of them has that place; then the ranks of one place sum over the nodes. Each node sends
``n (N-1)/N`` to others, the least that is possible, in place of what each of its ranks has, and as
much inside as before. A gather goes the same way back. (As the reduce-scatter inside and the
all-reduce across of hybrid sharding, but every rank ends with a part of its own.)

This is for backends whose collectives know nothing of nodes, such as gloo. NCCL orders its rings by
node by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.comm.scratch import Scratch
from lightning_megatron.topology.mesh import Levels
from lightning_megatron.topology.meter import Meter


@dataclass(frozen=True)
class Wires:
    """Groups, meter and memory that transfers need."""

    levels: Levels
    meter: Meter
    scratch: Scratch


class TwoLevelSum:
    """A sum of which every rank of a group gets its own part, under way.

    Sums of a group run in the order in which they were begun; call `advance` in that order, too.

    Args:
        wires: groups, meter and memory of the transfers.
        sizes: elements of the part of each rank, in the order of the group.
        fill: writes what this rank adds to the part of a rank into a tensor.
        dtype: number format of the sum.
    """

    def __init__(
        self,
        wires: Wires,
        sizes: Sequence[int],
        fill: Callable[[Tensor, int], None],
        dtype: torch.dtype,
    ) -> None:
        self._wires = wires
        self._dtype = dtype
        levels = wires.levels
        columns = [[sizes[nodes[place]] for nodes in levels.table] for place in levels.places]
        lengths = [sum(column) for column in columns]
        self._sizes, mine = columns[levels.place], levels.place
        self._held = self._take(lengths[mine])
        self._parts = torch.split(self._held, self._sizes)
        to_send = [0 if place == mine else size for place, size in enumerate(lengths)]
        to_receive = [0 if place == mine else lengths[mine] for place in levels.places]
        self._sent = self._take(sum(to_send))
        for place, run in enumerate(torch.split(self._sent, to_send)):
            target = self._held if place == mine else run
            parts = torch.split(target, columns[place])
            for nodes, part in zip(levels.table, parts, strict=True):
                fill(part, nodes[place])
        self._received = self._take(sum(to_receive))
        self._crosses = False
        self._work = self._exchange(to_receive, to_send, levels.inside)

    def advance(self, *, waits: bool = False) -> bool:
        """Begin the second level if the first is over.

        Args:
            waits: whether to wait until it is.

        Returns:
            Whether the second level has begun.
        """
        if self._crosses or not (waits or self._work.is_completed()):
            return self._crosses
        self._end_level(self._held)
        self._crosses = True
        levels = self._wires.levels
        to_send = [0 if node == levels.node else size for node, size in enumerate(self._sizes)]
        own = self._sizes[levels.node]
        to_receive = [0 if node == levels.node else own for node in range(len(self._sizes))]
        self._sent = self._take(sum(to_send))
        self._received = self._take(sum(to_receive))
        for part, run in zip(self._parts, torch.split(self._sent, to_send), strict=True):
            if run.numel():
                run.copy_(part)
        self._work = self._exchange(to_receive, to_send, levels.across)
        return True

    def wait(self) -> None:
        """Wait for both levels; the sum is in `result` then."""
        self.advance(waits=True)
        self._end_level(self.result)

    @property
    def result(self) -> Tensor:
        """This rank's part, until `release`."""
        return self._parts[self._wires.levels.node]

    def release(self) -> None:
        """Give the memory back; nobody looks at the result any more."""
        self._wires.scratch.give(self._held)

    def _take(self, numel: int) -> Tensor:
        return self._wires.scratch.take(numel, self._dtype, torch.device("cpu"))

    def _exchange(
        self, to_receive: list[int], to_send: list[int], group: dist.ProcessGroup
    ) -> dist.Work:
        self._wires.meter.exchange(self._sent.numel() * self._sent.element_size(), group)
        work: dist.Work | None = dist.all_to_all_single(
            self._received, self._sent, to_receive, to_send, group=group, async_op=True
        )
        assert work is not None
        self._wires.meter.started(work)
        return work

    def _end_level(self, total: Tensor) -> None:
        """Add what the other ranks of the level have sent."""
        self._wires.meter.wait(self._work)
        if len(total):
            for run in torch.split(self._received, len(total)):
                total.add_(run)
        for buffer in (self._sent, self._received):
            self._wires.scratch.give(buffer)


class TwoLevelGather:
    """The parts of all ranks of a group, on their way to all of them.

    Gathers of a group are begun, and advance, in the same order on all ranks.

    Args:
        wires: groups, meter and memory of the transfers.
        sizes: elements of the part of each rank, in the order of the group.
        dtype: number format of the parts.

    Attributes:
        parts: part of every rank, in group order; this rank's is written before `start`.
    """

    def __init__(self, wires: Wires, sizes: Sequence[int], dtype: torch.dtype) -> None:
        self._wires, levels = wires, wires.levels
        columns = [[sizes[nodes[place]] for nodes in levels.table] for place in levels.places]
        cpu = torch.device("cpu")
        self._runs = [wires.scratch.take(sum(column), dtype, cpu) for column in columns]
        self.parts = [run[:0] for run in self._runs for _ in levels.table]
        for place, (run, column) in enumerate(zip(self._runs, columns, strict=True)):
            for nodes, part in zip(levels.table, torch.split(run, column), strict=True):
                self.parts[nodes[place]] = part
        self._works: list[dist.Work] = []

    def start(self) -> None:
        """Send this rank's part to the ranks of its place on other nodes."""
        levels = self._wires.levels
        mine = [self.parts[nodes[levels.place]] for nodes in levels.table]
        self._broadcast(mine, levels.node, levels.across)

    def advance(self) -> None:
        """Wait for those parts, and send them on inside the node."""
        self._wait()
        self._broadcast(self._runs, self._wires.levels.place, self._wires.levels.inside)

    def wait(self) -> None:
        """Wait for all parts."""
        self._wait()

    def release(self) -> None:
        """Give the memory back; nobody looks at the parts any more."""
        for run in self._runs:
            self._wires.scratch.give(run)

    def _broadcast(self, runs: Sequence[Tensor], mine: int, group: dist.ProcessGroup) -> None:
        """Send each rank's part to the other ranks of a group."""
        meter = self._wires.meter
        for rank, run in enumerate(runs):
            if run.numel():
                work = dist.broadcast(run, group=group, group_src=rank, async_op=True)
                assert work is not None
                meter.started(work)
                self._works.append(work)
        meter.exchange(runs[mine].nbytes * (len(runs) - 1), group)

    def _wait(self) -> None:
        for work in self._works:
            self._wires.meter.wait(work)
        self._works.clear()
