"""Collectives whose names differ between versions, and who waits for them."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_megatron._torch.devices import in_host_memory

# torch 2.13 renames all_gather_into_tensor and reduce_scatter_tensor and warns on every call of the
# old names; 2.11 has only those. Remove the fallback when 2.13 is the oldest version supported.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def start_all_gather(output: Tensor, local: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to fill ``output`` with the ``local`` of every rank, one after another.

    Args:
        output: contiguous, ``group.size()`` times as many elements as ``local``.
        local: contiguous; must stay untouched until the work is waited for.
        group: the ranks that take part.
    """
    work: dist.Work = _all_gather(output, local, group=group, async_op=True)
    return work


def start_reduce_scatter(output: Tensor, local: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum ``local`` over the ranks, leaving the rank-th equal part in ``output``.

    Args:
        output: contiguous, ``1 / group.size()`` as many elements as ``local``.
        local: contiguous; must stay untouched until the work is waited for.
        group: the ranks that take part.
    """
    work: dist.Work = _reduce_scatter(output, local, group=group, async_op=True)
    return work


def gather_now(output: Tensor, local: Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill ``output`` with the ``local`` of every rank; on a GPU, on the current stream."""
    _all_gather(output, local, group=group)


def reduce_scatter_now(output: Tensor, local: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Reduce ``local`` over the ranks, leaving the rank-th equal part in ``output``.

    Older torch sums over gloo whatever ``op`` is; 2.13 does not. What the versions between them do
    has not been tried, so the mean is divided here.
    """
    divides = in_host_memory(output.device) and op == dist.ReduceOp.AVG
    _reduce_scatter(output, local, op=dist.ReduceOp.SUM if divides else op, group=group)
    if divides:
        output.div_(group.size())


def watch_waits(began: Callable[[], float], ended: Callable[[float], None]) -> Callable[[], None]:
    """Call ``began`` and ``ended`` around every wait of this thread for others (2.11-2.13).

    All of ``torch.distributed``, FSDP2 and our own communication wait by ``Work.wait``, a method of
    a class written in C++ which no hook surrounds; functional collectives wait elsewhere, unseen.
    On GPUs it returns at once and the device waits, which the flight recorder shows
    (`fault_tolerance.hangs.flight_recorder.open_on_device`). Other threads may wait as they like,
    as that which writes checkpoints does for hours: it is not they who are watched.

    Returns:
        A function that undoes it.
    """
    work: Any = dist.Work
    observers: list[Any] | None = getattr(work.wait, "observers", None)
    if observers is None:
        work.wait = _observed(work.wait)
        observers = work.wait.observers
    own = (threading.get_ident(), began, ended)
    observers.append(own)

    def undo() -> None:
        if own in observers:
            observers.remove(own)
        if not observers and getattr(work.wait, "observers", None) is observers:
            work.wait = work.wait.__wrapped__

    return undo


def _observed(original: Any) -> Any:
    observers: list[Any] = []

    @functools.wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident()
        tokens = [(ended, began()) for thread, began, ended in observers if thread == here]
        try:
            return original(self, *args, **kwargs)
        finally:
            for ended, token in tokens:
                ended(token)

    wait.observers = observers  # type: ignore[attr-defined]
    return wait
