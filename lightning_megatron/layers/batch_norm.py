"""Batch normalisation over the samples of all data-parallel ranks.

``Trainer(sync_batchnorm=True)`` asks for statistics of the global batch, which make a run with
``dp`` ranks compute what one process would. ``torch.nn.SyncBatchNorm`` does it on GPUs and refuses
CPUs; `SyncBatchNorm` does the same arithmetic with autograd operations, on any device. Each layer
sums ``2 c + 1`` numbers over the ranks in forward (mean and count, then squared deviations, so that
nothing cancels), and as many in backward.
"""

import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron._torch.devices import is_cuda
from lightning_megatron._torch.state_dicts import AnyBatchNorm
from lightning_megatron.comm.functional import copy_to, reduce_from
from lightning_megatron.topology.axis import Axis

BatchNorm: TypeAlias = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class SyncBatchNorm(AnyBatchNorm):
    """Batch norm by the statistics of the global batch while training.

    Args:
        source: layer whose parameters, buffers and options are used.
        batch: axis of the ranks that see different samples.
    """

    def __init__(self, source: BatchNorm, batch: Axis) -> None:
        super().__init__(
            source.num_features,
            source.eps,
            source.momentum,
            affine=source.affine,
            track_running_stats=source.track_running_stats,
            device="meta",
        )
        self.batch = batch
        self.kind = type(source)
        self._parameters.update(source._parameters)
        self._buffers.update(source._buffers)
        self.training = source.training

    def plain(self) -> BatchNorm:
        """Return the layer that this one replaced, with its parameters and buffers."""
        layer = self.kind(
            self.num_features,
            self.eps,
            self.momentum,
            affine=self.affine,
            track_running_stats=self.track_running_stats,
            device="meta",
        )
        layer._parameters.update(self._parameters)
        layer._buffers.update(self._buffers)
        layer.training = self.training
        return layer

    def __deepcopy__(self, memo: dict[int, Any]) -> "SyncBatchNorm":
        """Return a layer over the same ranks."""
        memo[id(self)] = made = type(self).__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the layer that this one replaced: the ranks are those of one run."""
        return copy.copy, (self.plain(),)

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``[n, c, ...]`` per channel."""
        self.check_input(input)
        if self.batch.size == 1 or not self.training:
            return super().forward(input)
        x = input.transpose(0, 1).reshape(self.num_features, -1)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        sums = self._sum(torch.cat([wide.sum(1), wide.new_tensor([wide.shape[1]])]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        variance = self._sum((wide - mean[:, None]).square().sum(1)) / count
        self._track(mean.detach(), variance.detach(), count)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = torch.rsqrt(variance + self.eps)
        out = (input - mean.view(shape)) * scale.view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out.to(input.dtype)

    def _sum(self, partial: Tensor) -> Tensor:
        """Sum over the ranks, in forward and for gradients in backward."""
        return copy_to(reduce_from(partial, self.batch), self.batch)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


BATCH_NORMS_OVER_RANKS = (SyncBatchNorm, nn.SyncBatchNorm)
"""Layers whose statistics, and gradients of them, are sums over the ranks of a batch."""


def use_own_statistics(module: nn.Module) -> None:
    """Undo `synchronize_batch_norm`; torch's own ``SyncBatchNorm`` layers stay."""
    for child in list(module.modules()):
        if isinstance(child, nn.SyncBatchNorm):
            child.process_group = None
        for name, layer in child.named_children():
            if isinstance(layer, SyncBatchNorm):
                setattr(child, name, layer.plain())


def synchronize_batch_norm(module: nn.Module, batch: Axis, device: torch.device) -> nn.Module:
    """Replace every batch norm in ``module`` by one over the ranks of ``batch``, in place.

    On GPUs this is ``torch.nn.SyncBatchNorm``.
    """
    if batch.group is None:
        return module
    if is_cuda(device):
        convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
        native: nn.Module = convert(module, batch.group)
        return native
    for child in list(module.modules()):
        for name, layer in child.named_children():
            if isinstance(layer, BatchNorm) and not isinstance(layer, SyncBatchNorm):
                setattr(child, name, SyncBatchNorm(layer, batch))
    return module
