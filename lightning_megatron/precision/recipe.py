"""FP8 recipes: which elements share a scale, and when it is found.

============  ====================================  ============  =======================
recipe        elements that share a scale           found         formats
============  ====================================  ============  =======================
tensorwise    a whole tensor, over all tp ranks     when used     e4m3, gradients e5m2
rowwise       a row of each operand                 when used     e4m3, gradients e5m2
delayed       a whole tensor, over all ranks        steps before  e4m3, gradients e5m2
blockwise     1 x 128; weights 128 x 128            when used     e4m3
mxfp8         1 x 32 along the sum                  when used     e4m3
============  ====================================  ============  =======================

``tensorwise`` reads each tensor twice. ``delayed`` (Transformer Engine's first recipe) reads it
once, with the largest magnitude of the last ``history`` steps, and takes on trust that the next
step's is no larger: what is saturates. ``blockwise`` is DeepSeek-V3's (arXiv 2412.19437), with
scales rounded up to powers of two, ``mxfp8`` NVIDIA's way of microscaling (arXiv 2506.08027).

`torch._scaled_mm` multiplies FP8 operands with tensor and row scales, on CPUs and on GPUs from
Hopper on. For blocks there are kernels on Hopper (``blockwise``) and Blackwell (``mxfp8``), see
`precision.fp8_blocks`; elsewhere these are *emulated*: operands are quantised and dequantised,
exactly, and multiplied in bfloat16. The numbers are those of the recipe; the speed is bfloat16's.
"""

from typing import Literal, get_args

Recipe = Literal["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"]
RECIPES: tuple[str, ...] = get_args(Recipe)

Backend = Literal["auto", "torch", "te", "torchao"]
BACKENDS: tuple[str, ...] = get_args(Backend)

BACKEND_RECIPES = {
    "te": ("tensorwise", "blockwise", "mxfp8"),
    "torchao": ("tensorwise", "rowwise"),
}
"""What the backends compute that do not compute all."""

IN_BLOCKS = ("blockwise", "mxfp8")
"""Recipes whose products are computed on dequantised values where there are no kernels."""

BLOCK, MX_BLOCK = 128, 32
"""Elements along the sum that share a scale, in ``blockwise`` and ``mxfp8``."""

ALIGNMENT = 16
"""Sizes of a product must be multiples of this: FP8 kernels load 16 bytes at a time."""
