"""Communication of FSDP2's units, where FSDP2 lets its user decide about it.

FSDP2 calls an object of its user's to gather a unit's parameters and to reduce its gradients. Ours
count what passes and how long the host stands still (`topology.meter`).

Where parameters are replicated FSDP2 sums by itself; a hook behind it counts. On a GPU gathers and
reductions run on streams of FSDP2's own, and how long the computing stream waits for them is not
measured here.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch import gather_now, reduce_scatter_now, start_all_gather
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.meter import Meter


class _Memory:
    """Memory for the input or output of a collective."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An empty tensor."""
        return torch.empty(*size, dtype=dtype, device=device)


class UnitGather(_Memory):
    """All-gather of the shards of a unit's parameters.

    Args:
        meter: of the data-parallel axis.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with the ``input_tensor`` of every rank."""
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
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

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
        ranks = group.size()
        self._meter.ring(_bytes(input_tensor) * (ranks - 1) / ranks, group)
        begin = time.perf_counter()
        reduce_scatter_now(output_tensor, input_tensor, group, op)
        if input_tensor.device.type == "cpu":
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
