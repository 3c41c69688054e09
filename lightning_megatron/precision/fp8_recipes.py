"""FP8 recipes (which elements share a scale, and when it is computed), and checks of options.

============  ====================================  ============  =======================
recipe        elements that share a scale           computed      formats
============  ====================================  ============  =======================
tensorwise    a whole tensor, over all tp ranks     when used     e4m3, gradients e5m2
rowwise       a row of each operand                 when used     e4m3, gradients e5m2
delayed       a whole tensor, over all ranks        steps before  e4m3, gradients e5m2
blockwise     1 x 128; weights 128 x 128            when used     e4m3
mxfp8         1 x 32 along the sum                  when used     e4m3
============  ====================================  ============  =======================

``tensorwise`` reads each tensor twice. ``delayed`` (Transformer Engine's first recipe) reads it
once, with the largest magnitude of the last ``history`` steps; larger values of the next step
saturate. ``blockwise`` is DeepSeek-V3's (arXiv 2412.19437), with
scales rounded up to powers of two, ``mxfp8`` NVIDIA's way of microscaling (arXiv 2506.08027).

`torch._scaled_mm` multiplies FP8 operands with tensor and row scales, on CPUs and on GPUs from
Ada (8.9) on. For blocks there are kernels on Hopper (``blockwise``) and Blackwell (``mxfp8``), see
`precision.fp8_blocks`; elsewhere these are *emulated*: operands are quantised and dequantised,
exactly, and multiplied in bfloat16. The numbers are those of the recipe; the speed is bfloat16's.
"""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch

from lightning_megatron._torch.devices import in_host_memory
from lightning_megatron.precision.fp8_gemm import lack_of_units
from lightning_megatron.precision.fp8_te import missing as te_missing
from lightning_megatron.precision.fp8_torchao import missing as torchao_missing

Recipe = Literal["tensorwise", "rowwise", "delayed", "blockwise", "mxfp8"]
RECIPES: tuple[str, ...] = get_args(Recipe)

Backend = Literal["auto", "torch", "te", "torchao"]
BACKENDS: tuple[str, ...] = get_args(Backend)

BACKEND_RECIPES = {
    "te": ("tensorwise", "blockwise", "mxfp8"),
    "torchao": ("tensorwise", "rowwise"),
}
"""Recipes of the backends that do not compute all."""

IN_BLOCKS = ("blockwise", "mxfp8")
"""Recipes whose products are computed on dequantised values where there are no kernels."""


def option_problems(recipe: str, backend: str) -> list[str]:
    """Problems of ``recipe`` and ``backend``: unknown names, pairs, missing packages."""
    problems = []
    if recipe not in RECIPES:
        problems.append(
            f"recipe={recipe!r}: must be one of {', '.join(RECIPES)}; nearest valid: "
            "recipe='tensorwise'"
        )
    if backend not in BACKENDS:
        problems.append(
            f"backend={backend!r}: must be one of {', '.join(BACKENDS)}; nearest valid: "
            "backend='torch'"
        )
    known = BACKEND_RECIPES.get(backend, RECIPES)
    if recipe in RECIPES and recipe not in known:
        problems.append(
            f"recipe={recipe!r}, backend={backend!r}: runs only {', '.join(known)}; nearest valid: "
            "backend='torch', which runs every recipe"
        )
    lack = {"te": te_missing, "torchao": torchao_missing}.get(backend, lambda: None)()
    if lack is not None:
        problems.append(f"backend={backend!r}: {lack}; nearest valid: backend='torch'")
    return problems


def gather_problems(gather: str, recipe: str, backend: str) -> list[str]:
    """Problems of ``gather`` with the recipe and the backend."""
    if gather not in ("bf16", "fp8"):
        return [f"gather={gather!r}: must be 'bf16' or 'fp8'; nearest valid: gather='bf16'"]
    if gather == "fp8" and (recipe != "tensorwise" or backend not in ("auto", "torch")):
        return [
            f"gather='fp8', recipe={recipe!r}, backend={backend!r}: only a scale for the whole "
            "tensor can be applied before gathering; nearest valid: recipe='tensorwise', "
            "backend='torch', or gather='bf16'"
        ]
    return []


def device_problems(recipe: str, backend: str, device: torch.device) -> list[str]:
    """Problems of the recipe and the backend on the device of this process."""
    lack = lack_of_units(device)
    if lack is None or (backend == "torch" and recipe in IN_BLOCKS):
        return []
    return [
        f"recipe={recipe!r}, backend={backend!r}: {lack}; nearest valid: precision="
        "'bf16-mixed', or, for the numbers without the speed, recipe='blockwise', backend='torch'"
    ]


def offload_problems(gather: str, offload: bool, device: torch.device) -> list[str]:
    """Problems of ``gather`` with shards in host memory."""
    if gather != "fp8" or not offload or in_host_memory(device):
        return []
    # FSDP2 brings shards to the device first, and does not find there how to send them.
    return [
        "gather='fp8', zero.offload_parameters=True: weights are rounded where their shards "
        "are, which must be the GPU; nearest valid: gather='bf16', or offload_parameters=False"
    ]


def unmatched(names: Sequence[str], **patterns: Sequence[str]) -> list[str]:
    """Problems of patterns that match no layer.

    Args:
        names: names of all layers of the network, on every rank.
        patterns: patterns of each option.
    """
    return [
        f"{option}={pattern!r}: no layer of the module has such a name; nearest valid: "
        + repr(next(iter(difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)), "*"))
        for option, chosen in patterns.items()
        for pattern in chosen
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
