"""Communication of FSDP2's units, where FSDP2 lets its user decide about it.

FSDP2 calls an object of its user's to gather a unit's parameters and to reduce its gradients. Ours
count what passes and how long the host stands still (`topology.meter`), and exchange pieces
directly where that is faster: gloo's reduce-scatter is an all-reduce of which most is dropped, so
on CPUs every rank sends each other rank its piece and adds up what arrives (`comm.collectives`),
over several nodes in two levels (`comm.two_levels`).

Ranks must gather and reduce the same units in the same order. A module that runs a unit on some
ranks only would leave gloo with messages of other sizes than it expects, which ends the process, or
waiting for ever. On the CPUs of one machine each rank looks first what the others do (`RollCall`).
On GPUs, and between machines, nothing tells in time: there the ranks wait until the timeout.

Where parameters are replicated FSDP2 sums by itself; a hook behind it counts. On a GPU gathers and
reductions run on streams of FSDP2's own, and how long the computing stream waits for them is not
measured here.
"""

import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch import gather_now, reduce_scatter_now, start_all_gather
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import Levels
from lightning_megatron.topology.meter import Meter


@dataclass(frozen=True)
class Deed:
    """Something that all ranks of a group do together."""

    one: str
    """Sentence about one rank; the unit's name follows."""
    many: str
    """Sentence about several ranks."""


GATHER = Deed("gathers", "gather")
REDUCE = Deed("reduces the gradients of", "reduce the gradients of")
END_FORWARD = Deed("ends the forward of", "end the forward of")
END_BACKWARD = Deed("ends the backward of", "end the backward of")
_DEEDS = (GATHER, REDUCE, END_FORWARD, END_BACKWARD)


class RollCall:
    """Compares, on the CPUs of one machine, what the ranks of a group do.

    Every rank writes down what it is about to do, in memory that all of them see, and looks at what
    those have written that came there first. The last to come sees everybody, so that one of two
    ranks that do different things always knows before both do them. Nobody waits for it.

    Args:
        group: the ranks that read different samples, also where each shard has several copies and
            they gather among fewer; None if there is but one. Construction is collective over them.
        on_host: whether they compute on CPUs. Nothing is compared if not.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, on_host: bool) -> None:
        self._group = group
        self._names: list[str] = []
        self._count = 0
        self._board = _shared_board(group) if on_host and group is not None else None

    def enter(self, name: str) -> int:
        """Make a unit known, in the same order on all ranks; returns its number."""
        self._names.append(name or "the whole module")
        return len(self._names) - 1

    def compare(self, deed: Deed, unit: int, numel: int = 0) -> None:
        """Say what this rank is about to do.

        Args:
            deed: what.
            unit: with which unit.
            numel: with how many elements of it.

        Raises:
            ConfigError: a rank that came here before is doing something else.
        """
        board, group = self._board, self._group
        if board is None or group is None:
            return
        self._count += 1
        here, place = group.rank() * _LINE, 1 + self._count % _KEPT
        board[here + place] = own = (numel * 1024 + unit) * len(_DEEDS) + _DEEDS.index(deed)
        board[here] = self._count
        lines = range(0, group.size() * _LINE, _LINE)
        said = {
            rank: board[line + place]
            for rank, line in enumerate(lines)
            if board[line] >= self._count
        }
        if any(other != own for other in said.values()):
            self._refuse(said, dist.get_process_group_ranks(group))

    def _refuse(self, said: dict[int, int], ranks: Sequence[int]) -> None:
        by_deed: dict[int, list[int]] = {}
        for rank, other in said.items():
            by_deed.setdefault(other, []).append(ranks[rank])
        sizes_differ = len({other % (1024 * len(_DEEDS)) for other in by_deed}) == 1
        parts = [self._in_words(deed, ranks, sizes_differ) for deed, ranks in by_deed.items()]
        raise ConfigError(
            f"{', '.join(parts)}: under ZeRO 3 all ranks must run the same units in the same order "
            "and train the same parameters of each; nearest valid: zero=2"
        )

    def _in_words(self, said: int, ranks: Sequence[int], with_size: bool) -> str:
        rest, deed = divmod(said, len(_DEEDS))
        numel, unit = divmod(rest, 1024)
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        what = _DEEDS[deed].one if len(ranks) == 1 else _DEEDS[deed].many
        return f"{who} {what} {self._names[unit]}{f' ({numel} elements)' if with_size else ''}"


_KEPT = 63
"""Deeds of each rank that are kept: nobody is so far behind another."""
_LINE = 1 + _KEPT
"""Numbers of a rank on the board: how many deeds it has said, and the latest."""


def _shared_board(group: dist.ProcessGroup) -> "memoryview[int] | None":
    """Zeros that all ranks of a group see; None if they are on several machines. Collective."""
    names: list[Any] = [None] * group.size()
    dist.all_gather_object(names, socket.gethostname(), group=group)
    if len(set(names)) > 1:
        return None
    size, path = 8 * _LINE * group.size(), ""
    if group.rank() == 0:
        handle, path = tempfile.mkstemp(prefix="roll-call-")
        os.write(handle, bytes(size))
        os.close(handle)
    box = [path]
    dist.broadcast_object_list(box, group=group, group_src=0)
    with open(box[0], "r+b") as file:
        memory = mmap.mmap(file.fileno(), size)
    dist.barrier(group=group)
    if group.rank() == 0:
        os.unlink(box[0])  # it lives for as long as it is mapped
    return memoryview(memory).cast("q")


class _Memory:
    """Memory for the input or output of a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class UnitGather(_Memory):
    """All-gather of the shards of a unit's parameters.

    Args:
        meter: of the data-parallel axis.
        roll: of the ranks that hold the unit.
        unit: its number there.
    """

    def __init__(self, meter: Meter, roll: RollCall, unit: int) -> None:
        self._meter = meter
        self._roll = roll
        self._unit = unit

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with the ``input_tensor`` of every rank.

        Raises:
            ConfigError: another rank does not gather this unit now.
        """
        self._roll.compare(GATHER, self._unit, input_tensor.numel())
        self._meter.ring(_bytes(input_tensor) * (group.size() - 1), group)
        on_host = output_tensor.device.type == "cpu"
        if async_op:
            work = start_all_gather(output_tensor, input_tensor, group)
            self._meter.started(work)
            return _MeteredWork(work, self._meter) if on_host else work
        begin = time.perf_counter()
        gather_now(output_tensor, input_tensor, group)
        if on_host:
            self._meter.stood(time.perf_counter() - begin)
        return None


class UnitReduceScatter(_Memory):
    """Reduce-scatter of a unit's gradients.

    Args:
        meter: of the data-parallel axis.
        roll: of the ranks that hold the unit.
        unit: its number there.
        levels: the ranks inside and across nodes; None where they are on one node.
    """

    def __init__(
        self, meter: Meter, roll: RollCall, unit: int, levels: Levels | None = None
    ) -> None:
        self._meter = meter
        self._roll = roll
        self._unit = unit
        self._levels = levels

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum (or average) ``input_tensor`` over the group, keeping this rank's part.

        Raises:
            ConfigError: another rank does not reduce this unit now.
        """
        del async_op
        self._roll.compare(REDUCE, self._unit, input_tensor.numel())
        ranks = group.size()
        if input_tensor.device.type != "cpu":
            self._meter.ring(_bytes(input_tensor) * (ranks - 1) / ranks, group)
            reduce_scatter_now(output_tensor, input_tensor, group, op)
            return
        rows = input_tensor.view(ranks, -1)
        if self._levels is None:
            torch.sum(self._exchanged(rows, group), 0, out=output_tensor)
        else:  # as `comm.two_levels` does it
            order = torch.tensor(self._levels.table).t().flatten()
            inside, across = self._levels.inside, self._levels.across
            by_place = rows[order].view(inside.size(), -1)
            of_node = self._exchanged(by_place, inside).sum(0).view(across.size(), -1)
            torch.sum(self._exchanged(of_node, across), 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(ranks)

    def _exchanged(self, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Rows for this rank from every rank of a group."""
        self._meter.exchange(_bytes(rows) * (len(rows) - 1) / len(rows), group)
        begin = time.perf_counter()
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=group)
        self._meter.stood(time.perf_counter() - begin)
        return received


def count_sums(axis: Axis) -> Callable[[Tensor], None]:
    """A hook for FSDP2's all-reduce, that counts what has been summed over ``axis``."""

    def hook(output: Tensor) -> None:
        axis.meter.ring(2 * _bytes(output) * (axis.size - 1) / axis.size, axis.group)

    return hook


class _MeteredWork(dist.Work):
    """A gather under way, whose waiting is counted."""

    def __init__(self, work: dist.Work, meter: Meter) -> None:
        super().__init__()
        self._work = work
        self._meter = meter

    @override
    def wait(self, timeout: Any = None) -> bool:
        self._meter.wait(self._work)
        return True


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
