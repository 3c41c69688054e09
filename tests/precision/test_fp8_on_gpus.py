"""What FP8 kernels of GPUs are called with: layouts, formats and shapes of scales, by every recipe.

Tensors on the meta device have no values and stand for those of a GPU: torch's own check of a call
is that of CUDA there. It is laxer than the kernels in places; `demands` adds what they look at
(torch 2.11-2.13, ``ScaledBlas.cpp``, and cuBLASLt's "scaling factors layouts").
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.layers.delayed_wgrad import set_gemm_backend
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import TransformerBlock
from lightning_megatron.precision.fp8_blocks import BlockwiseGemm
from lightning_megatron.precision.fp8_gemm import DelayedGemm, RowwiseGemm, TensorwiseGemm
from lightning_megatron.precision.scaling import E4M3, E5M2

META = torch.device("meta")
WHOLE = (False, False, False)
RECIPES: dict[str, Callable[[], Any]] = {
    "tensorwise": lambda: TensorwiseGemm(E5M2, None, WHOLE),
    "delayed": lambda: DelayedGemm(E5M2, None, WHOLE, 4, META),
    "rowwise": lambda: RowwiseGemm(E5M2),
    "blockwise": lambda: BlockwiseGemm(E4M3, 128, square=True, native=True),
    "mxfp8": lambda: BlockwiseGemm(E4M3, 32, square=False, native=True),
}
# Tokens, features in and out: of Llama (1B: 2048, 8192; 8B: 4096, 14336), one block of 128, one
# token, and multiples of nothing but 16.
SIZES = [(4096, 2048, 8192), (4096, 14336, 4096)]
SIZES += [(128, 128, 128), (1, 4096, 4096), (1, 128, 16), (37, 144, 80)]


def demands(
    kernel: str, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> None:
    """Hold a call against what the kernels read, beyond torch's check without a device."""
    (m, k), n = a.shape, b.shape[1]
    assert b.shape[0] == k
    assert k % 16 == n % 16 == 0
    assert {a.dtype, b.dtype} in ({E4M3}, {E4M3, E5M2})  # there is no product of e5m2 by itself
    assert dtype in (torch.bfloat16, torch.float16, torch.float32)
    # cuBLASLt multiplies rows by columns only; torch reads off the strides what is which.
    assert a.stride() == (k, 1)
    assert b.stride() == (1, k)
    along = -(-k // 128)
    if kernel == "_scaled_mm":
        shapes = (scale_a.shape, scale_b.shape)
        assert shapes == ((m, 1), (1, n)) or scale_a.numel() == scale_b.numel() == 1
    if kernel in ("_scaled_mm", "BlockWise1x32"):
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        return
    squares = kernel == "BlockWise128x128"
    shape = (-(-along // 4) * 4, -(-n // 128)) if squares else (n, along)
    for scale, expected in ((scale_a, (m, along)), (scale_b, shape)):
        assert scale.shape == expected
        assert scale.stride(0) == 1
        assert scale.stride(1) == expected[0] or expected[1] == scale.stride(1) == 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were called, each call held against what they demand."""
    found: list[str] = []
    plain, blocks = torch._scaled_mm, F.scaled_mm

    def scaled_mm(a: Tensor, b: Tensor, one: Tensor, other: Tensor, **options: Any) -> Tensor:
        demands("_scaled_mm", a, b, one, other, options["out_dtype"])
        found.append("_scaled_mm")
        return plain(a, b, one, other, **options)

    def scaled_mm_of_blocks(**given: Any) -> Tensor:
        kernel = given["scale_recipe_b"].name
        operands = ("mat_a", "mat_b", "scale_a", "scale_b", "output_dtype")
        demands(kernel, *(given[name] for name in operands))
        found.append(kernel)
        return blocks(**given)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm_of_blocks)
    return found


def matrix(rows: int, columns: int, stored_by: str) -> Tensor:
    if stored_by == "rows":
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=META)
    return torch.empty(columns, rows, dtype=torch.bfloat16, device=META).t()


@pytest.mark.parametrize("stored_by", ["rows", "columns"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_accept_all_three_products(
    calls: list[str], recipe: str, sizes: tuple[int, int, int], stored_by: str
) -> None:
    tokens, columns, rows = sizes
    x, grad = matrix(tokens, columns, stored_by), matrix(tokens, rows, stored_by)
    weight = matrix(rows, columns, stored_by)
    gemm = RECIPES[recipe]()
    y, kept = gemm.output(x, weight)
    gradient = gemm.prepare_gradient(grad, kept)
    found = (
        y,
        gemm.input_gradient(gradient, weight),
        gemm.weight_gradient(gradient, x),
    )
    assert [f.shape for f in found] == [(tokens, rows), (tokens, columns), (rows, columns)]
    assert [f.dtype for f in found[:2]] == [torch.bfloat16] * 2
    kinds = {"blockwise": ["BlockWise128x128"] * 2 + ["BlockWise1x128"]}
    kinds["mxfp8"] = ["BlockWise1x32"] * 3
    assert calls == kinds.get(recipe, ["_scaled_mm"] * 3)


@pytest.mark.parametrize("model", ["1b", "8b"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_accept_what_a_block_of_llama_multiplies(
    calls: list[str], recipe: str, model: str
) -> None:
    sizes = {} if model == "8b" else {"hidden_size": 2048, "mlp_size": 8192}
    config = TransformerConfig.preset("llama3-8b", num_layers=1, **sizes)
    with META:
        block = TransformerBlock(config, None).to(torch.bfloat16)
    layers = [m for m in block.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]
    for layer in layers:
        set_gemm_backend(layer, RECIPES[recipe]())
    x = torch.empty(
        1, 4096, config.hidden_size, dtype=torch.bfloat16, device=META, requires_grad=True
    )
    block(x).sum().backward()
    assert len(layers) == 7
    assert len(calls) == 3 * len(layers)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in block.parameters())
