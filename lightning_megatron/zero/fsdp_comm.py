"""Communication of FSDP2's units, where FSDP2 lets its user decide about it.

FSDP2 calls an object of its user's to gather a unit's parameters and to reduce its gradients. Ours
count what passes and how long the host stands still (`topology.meter`).

Ranks must gather and reduce the same units in the same order. Units of other sizes leave the
backend waiting until the timeout; units of one size would be mixed without a word. So each rank
puts a checksum of what it has gathered and reduced into a vote of the batch (`comm.votes`), on the
host and before the update, and `UnitOrder` raises where the checksums differ.

Where parameters are replicated FSDP2 sums by itself; a hook behind it counts. On a GPU gathers and
reductions run on streams of FSDP2's own, and how long the computing stream waits for them is not
measured here.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.collectives import gather_now, reduce_scatter_now, start_all_gather
from lightning_megatron._torch.devices import on_host
from lightning_megatron.comm.votes import Vote
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.meter import Meter


class UnitOrder:
    """Compares what ranks have gathered and reduced in a batch.

    Args:
        ranks: the global ranks that must do alike.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._vote: Vote | None = None
        self._sum = 0

    def settle_by(self, vote: Vote) -> None:
        """Take this vote."""
        self._vote = vote

    def note(self, what: str, unit: int, numel: int) -> None:
        """Note that this rank gathers or reduces so many elements of a unit."""
        self._sum = zlib.crc32(f"{what} {unit} {numel}".encode(), self._sum)

    def put(self) -> None:
        """Tell the others, behind the backward of a batch."""
        if self._vote is not None:
            self._vote.put(self._sum)

    def check(self) -> None:
        """Compare, when the votes are settled.

        Raises:
            ConfigError: ranks have done different things.
        """
        self._sum = 0
        values = () if self._vote is None else self._vote.values
        by_sum: dict[float, list[int]] = {}
        for rank in self._ranks if len(values) > 1 else ():
            by_sum.setdefault(values[rank], []).append(rank)
        if len(by_sum) > 1:
            first, other, *_ = by_sum.values()
            raise ConfigError(
                f"rank {other[0]} ran other layers than rank {first[0]} in this batch, or in "
                "another order: under ZeRO 3 all ranks must run the same units in the same order "
                "and train the same parameters of each; nearest valid: zero=2"
            )


class _Memory:
    """Memory for the input or output of a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class UnitGather(_Memory):
    """All-gather of the shards of a unit's parameters.

    Args:
        meter: of the data-parallel axis.
        order: is told.
        unit: number of the unit.
    """

    def __init__(self, meter: Meter, order: UnitOrder, unit: int) -> None:
        self._meter = meter
        self._order = order
        self._unit = unit

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with the ``input_tensor`` of every rank."""
        self._order.note("gather", self._unit, input_tensor.numel())
        self._meter.ring(_bytes(input_tensor) * (group.size() - 1), group)
        waits = on_host(output_tensor.device)
        if async_op:
            work = start_all_gather(output_tensor, input_tensor, group)
            self._meter.started(work)
            return _MeteredWork(work, self._meter) if waits else work
        begin = time.perf_counter()
        gather_now(output_tensor, input_tensor, group)
        if waits:
            self._meter.stood(time.perf_counter() - begin)
        return None


class UnitReduceScatter(_Memory):
    """Reduce-scatter of a unit's gradients.

    Args:
        meter: of the data-parallel axis.
        order: is told.
        unit: number of the unit.
    """

    def __init__(self, meter: Meter, order: UnitOrder, unit: int) -> None:
        self._meter = meter
        self._order = order
        self._unit = unit

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum (or average) ``input_tensor`` over the group, keeping this rank's part."""
        del async_op
        self._order.note("reduce", self._unit, input_tensor.numel())
        ranks = group.size()
        self._meter.ring(_bytes(input_tensor) * (ranks - 1) / ranks, group)
        begin = time.perf_counter()
        reduce_scatter_now(output_tensor, input_tensor, group, op)
        if on_host(input_tensor.device):
            self._meter.stood(time.perf_counter() - begin)


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
