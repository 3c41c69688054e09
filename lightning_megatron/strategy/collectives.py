"""Collectives with the meaning that Lightning and users' code expect of them.

``barrier`` concerns the whole job: all processes call it. ``reduce`` and ``all_gather`` without a
group concern the *batch* ranks, which saw different samples: tp peers hold the same values and
other pipeline stages none, and inside a step only the ranks of one stage reach the call. With an
explicit group they concern that group.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_megatron._lightning.results import EVERYBODY, AmongRanks, synchronize_metrics
from lightning_megatron._torch.collectives import start_all_gather
from lightning_megatron._torch.devices import is_cuda
from lightning_megatron.errors import ConfigError
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.splits import whole


def barrier(device: torch.device) -> None:
    """Wait for all processes."""
    if not dist.is_initialized():
        return
    if is_cuda(device):
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def reduce(
    tensor: Tensor,
    topology: Topology,
    group: dist.ProcessGroup | None,
    reduce_op: ReduceOp | str | None,
    device: torch.device,
) -> Tensor:
    """Reduce a tensor over the batch ranks, or over ``group``; the result is on ``device``."""
    refuse_shards(tensor, "a value to reduce (sync_dist=True)")
    group, size = _group(topology, group)
    if group is None:
        return tensor
    mean, op = _reduce_op(reduce_op)
    if mean and not tensor.is_floating_point():
        tensor = tensor.to(torch.get_default_dtype())
    result: Tensor = whole(tensor).to(device, copy=True).contiguous()
    dist.all_reduce(result, op=op, group=group)
    return result / size if mean else result


def all_gather(
    tensor: Tensor,
    topology: Topology | None,
    group: dist.ProcessGroup | None,
    *,
    sync_grads: bool,
) -> Tensor:
    """Stack on a new dim 0 the tensors of the batch ranks, or of ``group``.

    The whole world counts as no group: ``LightningModule.all_gather`` fills it in when the user
    gives none.
    """
    if dist.is_initialized() and group is dist.group.WORLD:
        group = None
    group, size = _group(topology, group) if topology is not None else (None, 1)
    tensor = whole(tensor)
    if group is None:
        return tensor.unsqueeze(0)
    if sync_grads:
        gathered: Tensor = _AllGather.apply(tensor, group, size)  # type: ignore[no-untyped-call]
        return gathered
    return _gather(tensor.detach(), group, size)


class MonitoredValues:
    """Values by which schedules of the learning rate decide, made the same on all ranks.

    What ``self.log`` holds without ``sync_dist=True`` is a rank's own. Ranks that go down with the
    learning rate at different times would train, each with its part of the optimizer state, what no
    run of one process does.

    Args:
        exchange: gathers numbers from every rank; collective.
    """

    def __init__(self, exchange: Callable[[Sequence[float]], list[tuple[float, ...]]]) -> None:
        self._exchange = exchange
        self._warned: set[str] = set()

    def share(self, key: str, value: Any) -> Any:
        """``value``, or the mean over all ranks where it is not the same on them; collective."""
        [found] = self._exchange([math.nan if value is None else float(value)])
        first = found[0]
        if value is None or all(x == first or x != x and first != first for x in found):
            return value
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(
                f"ReduceLROnPlateau(monitor={key!r}): data-parallel ranks logged values from "
                f"{min(found):.6g} to {max(found):.6g}, each of its own samples; the mean of the "
                f"ranks decides; self.log({key!r}, ..., sync_dist=True) logs that of all samples"
            )
        mean = sum(found) / len(found)  # not fsum: opposite infinities make a NaN
        return torch.tensor(mean, dtype=getattr(value, "dtype", None))


class SharedMetrics:
    """Metrics that are synchronised over the ranks that saw different samples.

    While a run lasts these are all metrics, wherever they are made and kept, but those with a
    ``process_group`` of the user's. Behind it they are those of the run, as others may be of a run
    of another strategy.

    Args:
        topology: the layout of the run.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = ref(topology)  # its groups end with it
        self._runs = True
        self._of_run: WeakValueDictionary[int, Metric] = WeakValueDictionary()  # hashes change
        synchronize_metrics(self._among)

    def _among(self, metric: Metric) -> AmongRanks:
        topology = self._topology()
        if topology is None or topology.is_closed:
            return EVERYBODY
        if self._runs:
            self._of_run[id(metric)] = metric
        elif id(metric) not in self._of_run:
            return EVERYBODY
        return topology.batch.group

    def rest(self, module: nn.Module) -> None:
        """The run has ended; its module's metrics may still be computed."""
        self._runs = False
        found = [m for m in module.modules() if isinstance(m, Metric)]
        self._of_run.update({id(metric): metric for metric in found})


def leave_metrics() -> None:
    """Undo `SharedMetrics`."""
    synchronize_metrics(None)


def _group(
    topology: Topology, group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, int]:
    if group is not None:
        return group, dist.get_world_size(group)
    axis = topology.batch
    if topology.is_closed:  # after a run in which all ranks read other samples
        return (dist.group.WORLD if axis.size > 1 else None), axis.size
    return axis.group, axis.size


def refuse_shards(value: Tensor, what: str) -> None:
    """Raise `ConfigError` if ``value`` was computed from the shards of parameters.

    Args:
        value: of a step.
        what: it is, in words.
    """
    if isinstance(value, DTensor):
        raise ConfigError(
            f"{what} is a DTensor: the step uses parameters outside of the forward of their "
            "module, where ZeRO holds shards of them; nearest valid: weight_decay of the "
            "optimizer for a penalty on weights, the same computation inside that forward, or "
            "zero=2, which keeps parameters whole"
        )


class _AllGather(torch.autograd.Function):
    """Forward: all-gather on a new dim 0. Backward: sum over ranks, keep this rank's part."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
        ctx.group = group
        return _gather(tensor, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        # Not autograd's own tensor, which other branches may receive too.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None, None


def _gather(tensor: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    output = torch.empty((size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    start_all_gather(output.view(-1), tensor.contiguous().view(-1), group).wait()
    return output


def _reduce_op(op: ReduceOp | str | None) -> tuple[bool, Any]:
    """Whether to divide by the size afterwards, and the operation to communicate."""
    if op is None or isinstance(op, str):
        if op in (None, "mean", "avg"):
            return True, ReduceOp.SUM
        return False, getattr(ReduceOp, op.upper())
    average: Any = ReduceOp.AVG
    return (True, ReduceOp.SUM) if op == average else (False, op)
