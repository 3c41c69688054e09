"""Matrix products of linear layers in FP8, one `GemmBackend` for each recipe.

Under tensor parallelism a layer's operands may be parts of whole tensors. With one scale for the
tensor the parts must agree on it, or a layout would change the numbers, so the largest magnitudes
of split operands are reduced over tp::

                   x           weight       gradient of the output
    column         whole       split        split
    row            split       split        whole

Each rank scales its own rows and blocks: their scales never span more than its part, which is at
least as fine as the recipe says.

Autograd keeps operands in their own format, and backward quantises them again with the scales of
the forward: the values are the same, also where the forward is recomputed or the weight gradient
deferred. A gradient, which two products use with one scale, is quantised once.

Products of the forward use fast accumulation, with fewer bits of a sum, and products of gradients
do not, as torchao does by default (``torchao/float8/config.py``) and Transformer Engine: errors of
gradients accumulate from layer to layer.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron._torch.devices import capability, device_module, is_cuda
from lightning_megatron._torch.kernels import scaled_mm
from lightning_megatron.precision.scaling import (
    ALIGNMENT,
    E4M3,
    amax_of,
    quantise,
    scale_of,
)

X, WEIGHT, GRADIENT = range(3)
"""Operands of a layer."""
SplitOperands = tuple[bool, bool, bool]
"""Whether each operand is a part of a tensor that is split over tp."""


def lack_of_units(device: torch.device) -> str | None:
    """Reason why a device cannot multiply in FP8; None if it can."""
    if not is_cuda(device):
        return None
    major, minor = capability(device)
    if (major, minor) >= (8, 9):
        return None
    name = device_module(device).get_device_name(device)
    return f"{name} ({major}.{minor}) has no FP8 units (8.9 and later)"


class Scaled(NamedTuple):
    """Gradient in FP8 with the scales that its products need."""

    low_no: Tensor
    """Gradient in FP8."""
    scale: Tensor
    dtype: torch.dtype
    """Number format of the gradient before."""
    kept: tuple[Tensor, ...]
    """Scales of the forward."""


class TensorwiseGemm:
    """`GemmBackend` with one scale per tensor, computed when the tensor is used.

    Args:
        gradient_format: FP8 format of gradients; values are e4m3.
        group: process group of tp; None for one rank.
        split: whether each operand is a part.

    Attributes:
        weight_scale: function that returns the scale of a weight that was gathered in FP8
            (`precision.fp8_gather`).
    """

    def __init__(
        self, gradient_format: torch.dtype, group: dist.ProcessGroup | None, split: SplitOperands
    ) -> None:
        self._formats = (E4M3, E4M3, gradient_format)
        self._group = group
        self._split = split
        self.weight_scale: Callable[[], Tensor] | None = None

    def output(self, x_ni: Tensor, weight_oi: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `layers.gemm`."""
        if self.weight_scale is not None:
            kept = (*self._scales((X, x_ni)), self.weight_scale())
        else:
            kept = self._scales((X, x_ni), (WEIGHT, weight_oi))
        x, weight = _rows(self._low(X, x_ni, kept[0])), _rows(self._low(WEIGHT, weight_oi, kept[1]))
        return scaled_mm(x, weight.t(), kept[0], kept[1], x_ni.dtype, fast=True), kept

    def prepare_gradient(self, grad_no: Tensor, kept: tuple[Tensor, ...]) -> Scaled:
        """See `layers.gemm`."""
        (scale,) = self._scales((GRADIENT, grad_no))
        return Scaled(self._low(GRADIENT, grad_no, scale), scale, grad_no.dtype, kept)

    def input_gradient(self, gradient: Scaled, weight_oi: Tensor) -> Tensor:
        """See `layers.gemm`."""
        scale = gradient.kept[WEIGHT]
        weight = _columns(self._low(WEIGHT, weight_oi, scale))
        return scaled_mm(_rows(gradient.low_no), weight, gradient.scale, scale, gradient.dtype)

    def weight_gradient(self, gradient: Scaled, x_ni: Tensor) -> Tensor:
        """See `layers.gemm`."""
        scale = gradient.kept[X]
        grad = _padded(gradient.low_no)
        x = _columns(_padded(self._low(X, x_ni, scale)))
        return scaled_mm(_rows(grad.t()), x, gradient.scale, scale, torch.float32)

    def _scales(self, *operands: tuple[int, Tensor]) -> tuple[Tensor, ...]:
        found = [amax_of(tensor) for _, tensor in operands]
        if self._group is not None and any(self._split[which] for which, _ in operands):
            # Whole operands are the same on all ranks, and so is their maximum.
            together = torch.stack(found)
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._group)
            found = list(together)
        return tuple(
            scale_of(amax, self._formats[which])
            for amax, (which, _) in zip(found, operands, strict=True)
        )

    def _low(self, which: int, tensor: Tensor, scale: Tensor) -> Tensor:
        return quantise(tensor, scale, self._formats[which])


class DelayedGemm(TensorwiseGemm):
    """`GemmBackend` with one scale per tensor, from the largest magnitudes of earlier steps.

    The first step, which has no earlier one, computes as `TensorwiseGemm`.

    Args:
        gradient_format: FP8 format of gradients; values are e4m3.
        group: process group of tp; None for one rank.
        split: whether each operand is a part.
        history: number of steps to look back.
        device: device of this process.
        rarely_used: whether steps may pass before the first use, as for an expert without tokens;
            operands that no earlier step knows are then scaled as by `TensorwiseGemm`.

    Attributes:
        history: largest magnitudes, ``[history, operand]``; the latest step first.
        current: largest magnitudes of the running step.
        watching: whether magnitudes are recorded (in training, not in evaluation).
    """

    def __init__(
        self,
        gradient_format: torch.dtype,
        group: dist.ProcessGroup | None,
        split: SplitOperands,
        history: int,
        device: torch.device,
        rarely_used: bool = False,
    ) -> None:
        super().__init__(gradient_format, group, split)
        self._rarely_used = rarely_used
        self.history = torch.zeros(history, 3, device=device)
        self.current = torch.zeros(3, device=device)
        self.watching = True
        self.steps = 0

    def advance(self, amax: Tensor) -> None:
        """End a step, whose largest magnitudes over all ranks were ``amax``."""
        # Of a layer that was not used, or in a step that overflowed, the last value stays.
        sound = torch.isfinite(amax) & (amax > 0)
        newest = torch.where(sound, amax, self.history[0])
        self.history = torch.cat([newest[None], self.history[:-1]])
        self.current.zero_()
        self.steps += 1

    def _scales(self, *operands: tuple[int, Tensor]) -> tuple[Tensor, ...]:
        if self.watching:
            for which, tensor in operands:
                self.current[which] = torch.maximum(self.current[which], amax_of(tensor))
        if not self.steps:
            return super()._scales(*operands)
        known = self.history.amax(0)
        amax = [known[which] for which, _ in operands]
        if self._rarely_used:
            amax = [
                torch.where(earlier > 0, earlier, amax_of(tensor))
                for earlier, (_, tensor) in zip(amax, operands, strict=True)
            ]
        return tuple(
            scale_of(largest, self._formats[which])
            for largest, (which, _) in zip(amax, operands, strict=True)
        )


class RowwiseGemm:
    """`GemmBackend` with one scale per row of the left and per column of the right operand.

    Args:
        gradient_format: FP8 format of gradients; values are e4m3.
    """

    def __init__(self, gradient_format: torch.dtype) -> None:
        self._gradient_format = gradient_format

    def output(self, x_ni: Tensor, weight_oi: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `layers.gemm`."""
        return self._product(x_ni, E4M3, weight_oi, E4M3, x_ni.dtype, fast=True), ()

    def prepare_gradient(self, grad_no: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """See `layers.gemm`."""
        del kept
        return grad_no

    def input_gradient(self, gradient: Tensor, weight_oi: Tensor) -> Tensor:
        """See `layers.gemm`."""
        return self._product(gradient, self._gradient_format, weight_oi.t(), E4M3, gradient.dtype)

    def weight_gradient(self, gradient: Tensor, x_ni: Tensor) -> Tensor:
        """See `layers.gemm`."""
        left, right = _padded(gradient).t(), _padded(x_ni).t()
        # The kernels for rows write bfloat16 on GPUs.
        return self._product(left, self._gradient_format, right, E4M3, x_ni.dtype)

    @staticmethod
    def _product(
        left_mk: Tensor,
        left_format: torch.dtype,
        right_nk: Tensor,
        right_format: torch.dtype,
        result: torch.dtype,
        *,
        fast: bool = False,
    ) -> Tensor:
        """Compute ``left @ right.t()``, both with a scale for each row."""
        scale_m = scale_of(amax_of(left_mk, 1), left_format)
        scale_n = scale_of(amax_of(right_nk, 1), right_format)
        left = _rows(quantise(left_mk, scale_m, left_format))
        right = _rows(quantise(right_nk, scale_n, right_format))
        return scaled_mm(left, right.t(), scale_m, scale_n.t(), result, fast=fast)


def _rows(matrix: Tensor) -> Tensor:
    """Store the matrix by rows, as GPUs require of the left operand of an FP8 product."""
    # Of a single row contiguous() leaves strides as they are, and they are looked at.
    return matrix.contiguous().flatten().view(matrix.shape)


def _columns(matrix: Tensor) -> Tensor:
    """Store the matrix by columns, as GPUs require of the right operand."""
    return _rows(matrix.t()).t()


def _padded(matrix: Tensor) -> Tensor:
    """Add rows of zeros up to the next multiple that FP8 kernels take."""
    missing = -matrix.shape[0] % ALIGNMENT
    if not missing:
        return matrix
    if matrix.dtype.itemsize == 1:  # padding knows no FP8
        return F.pad(matrix.view(torch.uint8), (0, 0, 0, missing)).view(matrix.dtype)
    return F.pad(matrix, (0, 0, 0, missing))
