"""Collectives with the meaning that Lightning and users' code expect of them.

``barrier``, ``broadcast`` and ``reduce_boolean_decision`` concern the whole job: all processes call
them. ``reduce`` and ``all_gather`` without a group concern the *batch* ranks, which saw different
samples: tp peers hold the same values and other pipeline stages none, and inside a step only the
ranks of one stage reach the call. With an explicit group they concern that group.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from lightning_megatron._torch import start_all_gather
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.splits import whole
from lightning_megatron.topology.mesh import Topology


class TopologyCollectives:
    """Strategy methods that communicate; mixed into the strategy."""

    _topology: Topology | None
    root_device: torch.device

    def barrier(self, name: str | None = None) -> None:
        """Wait for all processes."""
        del name
        if not dist.is_initialized():
            return
        if self.root_device.type == "cuda":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of global rank ``src``, on all processes."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different samples: what `all_gather` stacks."""
        return 1 if self._topology is None else self._topology.batch.size

    @property
    def data_parallel_rank(self) -> int:
        """Which of them this is: the index of this rank's tensor in what `all_gather` returns.

        Under tp and pp several processes have the same one, so ``self.global_rank`` is no index.

        Example:
            A contrastive loss whose negatives are those of all ranks; ``queries`` and ``keys`` are
            ``[batch, features]``::

                keys = self.all_gather(keys, sync_grads=True).flatten(0, 1)
                labels = torch.arange(len(queries), device=self.device)
                labels += len(queries) * self.trainer.strategy.data_parallel_rank
                loss = F.cross_entropy(queries @ keys.T, labels)

            Each rank's loss then has the gradient of its own queries through all keys; their mean
            over the ranks is that of one process with the whole batch.
        """
        return 0 if self._topology is None else self._topology.batch.rank

    def share_metrics(self, module: nn.Module) -> None:
        """Have metrics synchronised over the ranks that saw different samples."""
        assert self._topology is not None
        group = self._topology.batch.group
        for child in module.modules():
            if isinstance(child, Metric) and child.process_group is None:
                child.process_group = group
                if group is None:  # a metric takes this for the whole world
                    child.distributed_available_fn = _nobody_else

    def unshare_metrics(self, module: nn.Module) -> None:
        """Undo `share_metrics`."""
        assert self._topology is not None
        group = self._topology.batch.group
        for child in module.modules():
            if isinstance(child, Metric) and child.process_group is group:
                child.process_group = None
                if child.distributed_available_fn is _nobody_else:
                    child.distributed_available_fn = jit_distributed_available

    def reduce(
        self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean"
    ) -> Any:
        """Reduce over the ranks that saw different samples (or over ``group``).

        Args:
            tensor: of any shape; anything but a tensor is returned as it is.
            group: None for the batch axis.
            reduce_op: ``"mean"``, ``"sum"``, ``"max"``, ``"min"``, ``"product"`` or a ``ReduceOp``.
                The mean of integers is a floating-point number.
        """
        if not isinstance(tensor, Tensor) or self._topology is None:
            return tensor
        refuse_shards(tensor, "a value to reduce (sync_dist=True)")
        group, size = self._group(group)
        if group is None:
            return tensor
        mean, op = _reduce_op(reduce_op)
        if mean and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        result = whole(tensor).to(self.root_device, copy=True).contiguous()
        dist.all_reduce(result, op=op, group=group)
        return result / size if mean else result

    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Stack on a new dim 0 the tensors of the ranks that saw different samples.

        Args:
            tensor: of the same shape on all ranks.
            group: other ranks. None is the batch axis, and so is the whole world, which
                ``LightningModule.all_gather`` fills in when the user gives no group.
            sync_grads: whether gradients flow back to every rank's tensor.
        """
        if dist.is_initialized() and group is dist.group.WORLD:
            group = None
        group, size = self._group(group) if self._topology is not None else (None, 1)
        tensor = whole(tensor)
        if group is None:
            return tensor.unsqueeze(0)
        if sync_grads:
            gathered: Tensor = _AllGather.apply(tensor, group, size)  # type: ignore[no-untyped-call]
            return gathered
        return _gather(tensor.detach(), group, size)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all (or any) of the processes of the job decided so."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if all else bool(votes)

    def _group(self, group: Any | None) -> tuple[dist.ProcessGroup | None, int]:
        if group is None:
            assert self._topology is not None
            axis = self._topology.batch
            if self._topology.is_closed:  # after a run in which all ranks read other samples
                return (dist.group.WORLD if axis.size > 1 else None), axis.size
            return axis.group, axis.size
        return group, dist.get_world_size(group)


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
            "zero=0"
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


def _nobody_else() -> bool:
    """What a metric is told that has no ranks to be synchronised with."""
    return False
