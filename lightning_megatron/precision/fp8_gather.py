"""Gathering of FP8 layers' weights in FP8: half the bytes of bfloat16 on the wire.

ZeRO gathers weights in the format of the computation. Weights that only FP8 products read can be
gathered in FP8: each rank rounds its part to e4m3 with the scale of the whole tensor and sends it,
and the receivers widen it to bfloat16::

    rest     float32 shards --round(w / s)--> e4m3 --gather--> e4m3 --times s--> bfloat16 --> layer
    scale    s = amax / 448 over all shards, of all weights at once, after an optimizer step

``s`` is the scale that the layer would have computed (`TensorwiseGemm` gets it), and an e4m3 value
survives the way through bfloat16: rounding moves it by at most 2**-8 of itself, and the next e4m3
value is 2**-4 away. So the products are equal to those without it, to the bit.

The cost is one small all-reduce a step over the ranks that share the weights, and over tp. Only
scales of whole tensors allow this; scales of rows and blocks differ between forward and backward.

`Fp8Codec` packs rows of whole parameters (ZeRO 1 and 2, `zero.row_gather`), `Fp8Extension`
shards for FSDP2 (ZeRO 3).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_megatron._torch.dtensor import shard_of
from lightning_megatron._torch.graphs import keep_version
from lightning_megatron.precision.scaling import E4M3, amax_of, quantise, scale_of
from lightning_megatron.topology.mesh import Topology


class WeightScales:
    """Scales of the weights that are gathered in FP8, computed again when weights change.

    Args:
        parts: functions that return this rank's part of each weight.
        topology: topology of the run.
    """

    def __init__(self, parts: Sequence[Callable[[], Tensor]], topology: Topology) -> None:
        self._parts = list(parts)
        self._topology = topology
        self._scales: list[Tensor] = []

    def forget(self) -> None:
        """Drop the scales, as weights may have changed; called on all ranks alike."""
        self._scales = []

    def of(self, index: int) -> Tensor:
        """Return the scale of a weight; collective over dp and tp after `forget`."""
        if not self._scales:
            self._scales = self._find()
        return self._scales[index]

    def _find(self) -> list[Tensor]:
        # Layers see bfloat16, and rounding to it keeps the order: round the largest only.
        found = torch.stack([amax_of(part()) for part in self._parts])
        found = found.to(torch.bfloat16).float()
        for axis in (self._topology.loss, self._topology.tp):
            if axis.group is not None:
                dist.all_reduce(found, op=dist.ReduceOp.MAX, group=axis.group)
        return list(scale_of(found, E4M3))


class Fp8Codec:
    """Codec of the rows of a weight.

    Args:
        find_scale: function that returns the scale of the whole weight; called when it is gathered,
            by all ranks alike.
    """

    dtype = torch.uint8

    def __init__(self, find_scale: Callable[[], Tensor]) -> None:
        self._find_scale = find_scale
        self._scale: Tensor | None = None

    def scale(self) -> Tensor:
        """Scale of the weight at its last gathering."""
        assert self._scale is not None, "weights are gathered before a layer runs"
        return self._scale

    def begin(self, whole: Tensor) -> Tensor:
        """Return ``whole`` as if it had been gathered; all ranks call this in the same order."""
        self._scale = self._find_scale()
        return self.round_trip(whole)

    def pack(self, values: Tensor) -> Tensor:
        """Quantise ``values`` to bytes of the same shape."""
        self._scale = self._find_scale()
        return self._rounded(values)

    def unpack(self, packed: Tensor) -> Tensor:
        """Widen received bytes to the weight in bfloat16."""
        return packed.view(E4M3).float().mul_(self.scale()).to(torch.bfloat16)

    def round_trip(self, values: Tensor) -> Tensor:
        """Pack and unpack ``values``, with the scale of the last gathering."""
        return self.unpack(self._rounded(values))

    def _rounded(self, values: Tensor) -> Tensor:
        return quantise(values.detach().to(torch.bfloat16), self.scale(), E4M3).view(torch.uint8)


class Fp8Extension:
    """Extension of a shard that FSDP2 calls before and after it gathers the shard.

    Args:
        weight: sharded weight.
        find_scale: function that returns the scale of the whole weight; called when it is gathered,
            by all ranks alike.
    """

    def __init__(self, weight: DTensor, find_scale: Callable[[], Tensor]) -> None:
        self._weight = weight
        self._find_scale = find_scale
        self._scale: Tensor | None = None

    def scale(self) -> Tensor:
        """Scale of the weight at its last gathering."""
        assert self._scale is not None, "FSDP2 gathers before a layer runs"
        return self._scale

    def before(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Return the tensors to send, and metadata for later; the signature is FSDP2's."""
        del outer_stride, module, mp_policy
        self._scale = scale = self._find_scale()
        shard = shard_of(self._weight).detach().to(torch.bfloat16)
        low = quantise(shard, scale, E4M3).view(torch.uint8)
        missing = -(-outer_size[0] // mesh.size()) - low.shape[0]
        return (F.pad(low, (0, 0, 0, missing)) if missing else low,), (scale,)

    def after(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Tensor],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the whole weight from the sent tensors, or write it to ``out``."""
        (low,), (scale,) = all_gather_outputs, metadata
        with torch.no_grad():
            wide = low.view(E4M3).float().mul_(scale).to(param_dtype)
            if out is None:
                return wide, (wide,)
            with keep_version(out):
                out.copy_(wide[: out.shape[0]])
        return None
