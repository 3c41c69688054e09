"""Quantisation to FP8: one scale for a tensor, a row, a block.

FP8 has two formats: ``e4m3`` (4 significant bits, up to 448) for values, and ``e5m2`` (3 bits, up
to 57344) for gradients, whose range is wider (Micikevicius et al., arXiv 2209.05433). A tensor is
stored as ``q = round(x / scale)`` with ``scale = amax / largest``, so that its largest element just
fits. The fewer elements share a scale, the less the largest of them costs the others::

    tensor   one scale                      a single outlier flushes the small elements to zero
    row      one per row of the product     each token and each output feature for itself
    block    1 x 128 or 128 x 128           DeepSeek-V3 (arXiv 2412.19437, section 3.3.2)
    mx       1 x 32, powers of two          OCP microscaling (arXiv 2310.10537)

Block scales are powers of two here, rounded up so that nothing saturates. Division by them is exact
and a dequantised e4m3 value fits a bfloat16, so that a bfloat16 product of dequantised operands,
which accumulates in float32, is the block-scaled FP8 product itself, up to the order of its sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

BLOCK, MX_BLOCK = 128, 32
"""Number of elements along the sum that share a scale, in ``blockwise`` and ``mxfp8``."""

ALIGNMENT = 16
"""Divisor of the sizes of a product: FP8 kernels load 16 bytes at a time."""

_TINY = 2.0**-120
"""Lowest scale, so that a tensor of zeros has a scale to divide by."""
_SIGNIFICAND = (1 << 23) - 1
"""Bits of the significand in a float32."""


def largest(fmt: torch.dtype) -> float:
    """Largest finite value of a format."""
    return float(torch.finfo(fmt).max)


def amax_of(x: Tensor, dim: int | None = None) -> Tensor:
    """Largest magnitude, of all or along ``dim`` (which stays, with size 1); float32."""
    if x.numel() == 0:
        found = x.new_zeros(()) if dim is None else x.detach().sum(dim, keepdim=True)
        return found.float()
    absolute = x.detach().abs()
    found = absolute.amax() if dim is None else absolute.amax(dim, keepdim=True)
    return found.float()


def scale_of(amax: Tensor, fmt: torch.dtype) -> Tensor:
    """Scale that maps ``amax`` to the largest value of the format."""
    return (amax / largest(fmt)).clamp(min=_TINY)


def quantise(x: Tensor, scale: Tensor, fmt: torch.dtype) -> Tensor:
    """Round ``x / scale`` to the nearest value of the format; larger values saturate."""
    limit = largest(fmt)
    wide = x.float()
    scaled = wide / scale if wide is x else wide.div_(scale)
    return scaled.clamp_(-limit, limit).to(fmt)


def power_of_two_scale(amax: Tensor, fmt: torch.dtype) -> Tensor:
    """Least power of two that is no less than `scale_of`; values that are not finite stay so."""
    scale = scale_of(amax, fmt)
    # Powers of two have no bits of a significand. (Not by pow, which GPUs round.)
    up = (scale.view(torch.int32) + _SIGNIFICAND).bitwise_and_(~_SIGNIFICAND).view(torch.float32)
    return torch.where(scale.isfinite(), up, scale)


class Blocks(NamedTuple):
    """Matrix in FP8 with a scale for each block."""

    values: Tensor
    """``[rows, columns]``, padded with zeros to whole blocks."""
    scales: Tensor
    """Powers of two in float32, ``[rows of blocks, columns of blocks]``."""
    block: tuple[int, int]
    """Rows and columns of a block."""
    shape: tuple[int, int]
    """Shape of the matrix without padding."""

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the dequantised values, which are exact in bfloat16 and wider."""
        height, width = self.block
        rows, columns = self.shape
        tiles = self.values.float().view(
            self.values.shape[0] // height, height, self.values.shape[1] // width, width
        )
        wide = tiles * self.scales[:, None, :, None]
        return wide.flatten(2).flatten(0, 1)[:rows, :columns].to(dtype)


def in_blocks(x: Tensor, block: tuple[int, int], fmt: torch.dtype) -> Blocks:
    """Quantise a matrix with a power-of-two scale for each block.

    Args:
        x: matrix ``[rows, columns]``; blocks at the edges may be smaller.
        block: rows and columns of a block.
        fmt: FP8 format.
    """
    rows, columns = x.shape
    height, width = block
    padded = F.pad(x.detach(), (0, -columns % width, 0, -rows % height))
    tiles = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    amax = tiles.abs().amax((1, 3), keepdim=True).float()
    scale = power_of_two_scale(amax, fmt)
    values = quantise(tiles, scale, fmt).reshape(padded.shape)
    return Blocks(values, scale[:, 0, :, 0], block, (rows, columns))
