"""FP8 products whose operands have a scale for each block, by kernels where there are any.

Both operands of a product are quantised along its sum, ``[rows, K]``. The recipes differ in the
layout of the scales that kernels expect (cuBLASLt: "1D block scaling", "128-element 1D and
128x128 2D block scaling")::

    recipe      blocks of left, right    scales                 in memory
    blockwise   1 x 128, 128 x 128       float32                columns of rows; squares: columns
                1 x 128, 1 x 128                                of blocks, their number along K
                                                                padded to a multiple of 4
    mxfp8       1 x 32,  1 x 32          e8m0 (the exponent)    tiles of 128 rows x 4 blocks, see
                                                                `swizzled`

Hopper multiplies the former (since CUDA 12.9), Blackwell the latter, by the public
``torch.nn.functional.scaled_mm``. Elsewhere, as on CPUs, products are *emulated*: computed on
dequantised values in bfloat16, which holds them exactly. The two differ by the order of their sums.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron._torch.devices import capability, is_cuda
from lightning_megatron.precision.scaling import ALIGNMENT, BLOCK, E4M3, MX_BLOCK, Blocks, in_blocks

_TILE_ROWS, _TILE_BLOCKS = 128, 4
"""Rows and blocks of a tile of ``mxfp8`` scales."""


def lack_of_kernels(recipe: str, device: torch.device) -> str | None:
    """Reason why products of ``blockwise`` or ``mxfp8`` must be emulated; None for kernels."""
    if not is_cuda(device):
        return "there are kernels for GPUs only"
    if torch.version.cuda is None:
        return "there are kernels for CUDA only"
    if not hasattr(F, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    cuda, major = _numbers(torch.version.cuda), capability(device)[0]
    if recipe == "mxfp8":
        if major < 10:
            return f"its kernels need a Blackwell (10.0), this is a {major}.x"
        return None if cuda >= (12, 8) else f"its kernels need CUDA 12.8, this is {cuda}"
    if major != 9:
        return f"its kernels need a Hopper (9.0), this is a {major}.x"
    return None if cuda >= (12, 9) else f"its kernels need CUDA 12.9, this is {cuda}"


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


class BlockwiseGemm:
    """`GemmBackend` with power-of-two scales for blocks.

    Args:
        gradient_format: FP8 format of gradients; values are e4m3.
        length: number of elements along the sum that share a scale.
        square: whether blocks of the weight are as high as they are long.
        native: whether kernels multiply (`lack_of_kernels`); else products are emulated.
    """

    def __init__(
        self, gradient_format: torch.dtype, length: int, square: bool, native: bool = False
    ) -> None:
        self._gradient_format = gradient_format
        self._row = (1, length)
        self._weight = (length if square else 1, length)
        self._native = native

    def output(self, x_ni: Tensor, weight_oi: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """See `layers.gemm`."""
        return self._product(x_ni, E4M3, weight_oi, self._weight), ()

    def prepare_gradient(self, grad_no: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
        """See `layers.gemm`."""
        del kept
        return grad_no

    def input_gradient(self, gradient: Tensor, weight_oi: Tensor) -> Tensor:
        """See `layers.gemm`."""
        return self._product(gradient, self._gradient_format, weight_oi.t(), self._weight)

    def weight_gradient(self, gradient: Tensor, x_ni: Tensor) -> Tensor:
        """See `layers.gemm`."""
        return self._product(gradient.t(), self._gradient_format, x_ni.t(), self._row)

    def _product(
        self,
        left_mk: Tensor,
        left_format: torch.dtype,
        right_nk: Tensor,
        right_block: tuple[int, int],
    ) -> Tensor:
        """Compute ``left @ right.t()``, in the format of ``left``."""
        left = in_blocks(left_mk, self._row, left_format)
        right = in_blocks(right_nk, right_block, E4M3)
        if self._native:
            return multiply(left, right, left_mk.dtype)
        return left.dequantised(left_mk.dtype).mm(right.dequantised(right_nk.dtype).t())


def multiply(left: Blocks, right: Blocks, dtype: torch.dtype) -> Tensor:
    """Compute ``left @ right.t()`` by a kernel, of matrices that are quantised along the sum."""
    product: Tensor = F.scaled_mm(**call(left, right, dtype)._asdict())
    m, n = left.shape[0], right.shape[0]
    return product if product.shape == (m, n) else product[:m, :n].contiguous()


class ScaledMm(NamedTuple):
    """Arguments of ``torch.nn.functional.scaled_mm`` (2.11-2.13)."""

    mat_a: Tensor
    """``[M, K]``, stored by rows."""
    mat_b: Tensor
    """``[K, N]``, stored by columns."""
    scale_a: Tensor
    scale_recipe_a: Any
    scale_b: Tensor
    scale_recipe_b: Any
    swizzle_a: Any
    swizzle_b: Any
    output_dtype: torch.dtype


def call(left: Blocks, right: Blocks, dtype: torch.dtype) -> ScaledMm:
    """Arguments of the kernel; sizes are padded with zeros to multiples that it takes."""
    a, scale_a = _padded(left)
    b, scale_b = _padded(right)
    kinds, swizzles = F.ScalingType, F.SwizzleType
    if left.block[1] == MX_BLOCK:
        kind, how = kinds.BlockWise1x32, swizzles.SWIZZLE_32_4_4
        return ScaledMm(a, b.t(), swizzled(scale_a), kind, swizzled(scale_b), kind, how, how, dtype)
    kind_b, how = kinds.BlockWise1x128, swizzles.NO_SWIZZLE
    if right.block[0] == 1:
        scale_b = _by_columns(scale_b)
    else:
        kind_b = kinds.BlockWise128x128
        scale_b = F.pad(scale_b, (0, -scale_b.shape[1] % _TILE_BLOCKS)).t()
    kind_a = kinds.BlockWise1x128
    return ScaledMm(a, b.t(), _by_columns(scale_a), kind_a, scale_b, kind_b, how, how, dtype)


def _by_columns(scales: Tensor) -> Tensor:
    return scales.t().contiguous().t()


def _padded(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Values and scales, padded to a multiple of `ALIGNMENT` rows and of 128 columns."""
    values, scales, (height, length) = blocks.values.contiguous(), blocks.scales, blocks.block
    columns, rows = -values.shape[1] % BLOCK, -values.shape[0] % ALIGNMENT
    if columns or rows:  # rows of squares are a multiple already
        # Padding knows no FP8, in which a byte of zero is zero.
        padded = F.pad(values.view(torch.uint8), (0, columns, 0, rows))
        values = padded.view(values.dtype)
        scales = F.pad(scales, (0, columns // length, 0, rows // height), value=1.0)
    return values, scales


def swizzled(scales: Tensor) -> Tensor:
    """Power-of-two scales ``[rows, blocks]`` in the layout of ``mxfp8`` kernels, in e8m0.

    Tiles of 128 rows and 4 blocks lie one after another, row by row; in a tile the scale of row
    ``r`` and block ``b`` is element ``16 (r mod 32) + 4 (r div 32) + b``.

    Returns:
        Scales in one dimension; the rest of the last tiles is 1.
    """
    missing = (0, -scales.shape[1] % _TILE_BLOCKS, 0, -scales.shape[0] % _TILE_ROWS)
    whole = F.pad(scales, missing, value=1.0)
    tiles = whole.view(whole.shape[0] // _TILE_ROWS, 4, 32, -1, _TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).flatten().to(torch.float8_e8m0fnu)
