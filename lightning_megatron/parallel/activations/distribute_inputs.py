"""Inputs of recomputed blocks, of which each tensor-parallel rank keeps a part.

The residual stream between blocks is whole on every rank of the tp axis, where it is not split
along the sequence. A block that is recomputed keeps just that: its input, ``tp`` times the same.
Instead each rank keeps ``1 / tp`` of the elements, and all of them are gathered when the backward
comes to the block (Rajbhandari et al., arXiv 1910.02054, call it partitioned activation
checkpointing). That costs one all-gather of ``2 s b h`` bytes a block in the backward, beside the
all-reduces of as many, two in the forward, two in its repetition and two in the backward. Sequence
parallelism has the same effect at no cost, where all layers between the blocks allow it.

Only inputs that the backward goes through are kept this way, and only if they are the same on all
ranks, which is looked at once for each block.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from lightning_megatron._torch.fsdp import class_name
from lightning_megatron.comm.collectives import start_gather
from lightning_megatron.errors import ConfigError
from lightning_megatron.parallel.activations.offload import Offloader
from lightning_megatron.parallel.forward_wrapper import BlockForward
from lightning_megatron.topology.axis import Axis

_TOLERANCE = 1e-2
"""Relative difference of two checksums that rounding may explain."""


class SharedInputs(BlockForward):
    """A recomputed forward of which each rank keeps a part of the input.

    Args:
        block: whose forward keeps nothing but its inputs.
        tp: the ranks that compute it together.
        offloader: where the parts wait.
    """

    def __init__(self, block: nn.Module, tp: Axis, offloader: Offloader | None) -> None:
        super().__init__(block)
        self._tp = tp
        self._offloader = offloader
        self._looked = False

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        with saved_tensors_hooks(self._pack, self._unpack):
            return self._forward(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Any:
        divisible = tensor.requires_grad and tensor.is_contiguous() and tensor.numel()
        if not divisible or type(tensor) is not Tensor:
            return self._keep(tensor)
        if not self._looked:
            self._look(tensor)
        flat = tensor.detach().view(-1)
        size = -(-flat.numel() // self._tp.size)
        part = flat.new_zeros(size)
        own = flat[self._tp.rank * size : (self._tp.rank + 1) * size]
        part[: own.numel()] = own
        return _Part(self._keep(part), tensor.shape)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Part):
            return self._fetch(packed)
        whole = start_gather(self._fetch(packed.held), self._tp, 0).wait()
        return whole[: packed.shape.numel()].view(packed.shape)

    def _keep(self, tensor: Tensor) -> Any:
        return tensor if self._offloader is None else self._offloader.pack(tensor)

    def _fetch(self, packed: Any) -> Tensor:
        found: Tensor = packed if self._offloader is None else self._offloader.unpack(packed)
        return found

    def _look(self, tensor: Tensor) -> None:
        """Refuse inputs that differ; collective over tp."""
        self._looked = True
        values = tensor.detach().to(torch.float64).view(-1)
        half = values.numel() // 2
        sums = torch.stack([values.abs().sum(), values[:half].abs().sum(), values.sum()])
        lowest, highest = sums.clone(), sums.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self._tp.group)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self._tp.group)
        if (highest - lowest).abs().max() > _TOLERANCE * highest[0]:
            raise ConfigError(
                "activations.distribute_inputs=True, blocks: the input of "
                f"{class_name(self._block)} differs between tensor-parallel ranks, so they cannot "
                "keep it together; nearest valid: blocks whose input all of them hold "
                "(blocks=None), or distribute_inputs=False"
            )


class _Part:
    """Part of a tensor that one rank keeps."""

    def __init__(self, held: Any, shape: torch.Size) -> None:
        self.held = held
        self.shape = shape
