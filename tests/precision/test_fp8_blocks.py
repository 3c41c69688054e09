"""What kernels for block scales are called with, read back as the kernels would read it."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.precision import fp8_blocks
from lightning_megatron.precision.fp8_blocks import BlockwiseGemm, lack_of_kernels, swizzled
from lightning_megatron.precision.scaling import E4M3

RECIPES = {"blockwise": (128, True), "mxfp8": (32, False)}
# Tokens, features in and out: multiples of all blocks, and of none (layers have multiples of 16).
SIZES = [(128, 256, 384), (37, 144, 80), (1, 528, 16)]


def tile_scales(scales: Tensor, rows: int, blocks: int) -> Tensor:
    """Where cuBLASLt says that the scales of 1D blocks of 32 are."""
    found, tiles_in_a_row = torch.empty(rows, blocks), -(-blocks // 4)
    for r in range(rows):
        for b in range(blocks):
            tile = (r // 128) * tiles_in_a_row + b // 4
            found[r, b] = scales[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + b % 4].float()
    return found


def kernel(**given: Any) -> Tensor:
    """The product, in float64, of what the arguments mean by cuBLASLt's documentation."""
    bound = inspect.signature(SCALED_MM).bind(**given).arguments
    a, b, kind_b = bound["mat_a"], bound["mat_b"], bound["scale_recipe_b"]
    scale_a, scale_b = bound["scale_a"], bound["scale_b"]
    (m, k), n = a.shape, b.shape[1]
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert (m % 16, n % 16, k % 128) == (0, 0, 0)
    if bound["scale_recipe_a"] is F.ScalingType.BlockWise1x32:
        assert kind_b is F.ScalingType.BlockWise1x32
        assert bound["swizzle_a"] is bound["swizzle_b"] is F.SwizzleType.SWIZZLE_32_4_4
        for scale, rows in ((scale_a, m), (scale_b, n)):
            assert scale.dtype == torch.float8_e8m0fnu
            assert scale.is_contiguous()
            assert scale.numel() == -(-rows // 128) * 128 * -(-k // 128) * 4
        wide_a = tile_scales(scale_a, m, k // 32).repeat_interleave(32, 1)
        wide_b = tile_scales(scale_b, n, k // 32).repeat_interleave(32, 1)
    else:
        assert bound["scale_recipe_a"] is F.ScalingType.BlockWise1x128
        assert bound["swizzle_a"] is bound["swizzle_b"] is F.SwizzleType.NO_SWIZZLE
        along = k // 128
        wide_a = one_by_128(scale_a, m, along)
        if kind_b is F.ScalingType.BlockWise128x128:
            stored = -(-along // 4) * 4
            assert scale_b.shape == (stored, -(-n // 128))
            assert scale_b.t().is_contiguous()
            wide_b = scale_b[:along].t().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        else:
            assert kind_b is F.ScalingType.BlockWise1x128
            wide_b = one_by_128(scale_b, n, along)
        torch_agrees(given)
    product = (a.double() * wide_a) @ (b.t().double() * wide_b).t()
    return product.to(bound["output_dtype"])


def one_by_128(scales: Tensor, rows: int, blocks: int) -> Tensor:
    assert scales.dtype == torch.float32
    assert scales.shape == (rows, blocks)
    assert scales.t().is_contiguous()
    return scales.repeat_interleave(128, 1)


def torch_agrees(given: dict[str, Any]) -> None:
    """Torch's own check of shapes and strides, which needs no device."""
    on_meta = {
        name: torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, Tensor)
        else value
        for name, value in given.items()
    }
    product = SCALED_MM(**on_meta)
    assert product.shape == (given["mat_a"].shape[0], given["mat_b"].shape[1])
    assert product.dtype == given["output_dtype"]


SCALED_MM = F.scaled_mm


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_are_told_what_emulation_multiplies(
    monkeypatch: pytest.MonkeyPatch, recipe: str, sizes: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(fp8_blocks.F, "scaled_mm", kernel)
    tokens, columns, rows = sizes
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, columns, generator=draw) * torch.logspace(-3, 3, columns)
    weight = torch.randn(rows, columns, generator=draw) * torch.logspace(-2, 2, rows)[:, None]
    grad = torch.randn(tokens, rows, generator=draw) * torch.logspace(2, -6, tokens)[:, None]
    length, square = RECIPES[recipe]
    native, emulated = (BlockwiseGemm(E4M3, length, square, native) for native in (True, False))
    for found, expected in (
        (native.output(x, weight)[0], emulated.output(x, weight)[0]),
        (native.input_gradient(grad, weight), emulated.input_gradient(grad, weight)),
        (native.weight_gradient(grad, x), emulated.weight_gradient(grad, x)),
    ):
        assert found.dtype == expected.dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=float(expected.std()) * 1e-5)


def test_scales_keep_their_values_in_one_byte() -> None:
    scales = torch.tensor([[2.0**-120, 1.0, 2.0**100], [8.0, 0.5, 2.0]])
    assert torch.equal(tile_scales(swizzled(scales), 2, 3), scales)


def test_what_cannot_be_used_is_named() -> None:
    """That it is what a device has, the tests marked gpu say."""
    for recipe in RECIPES:
        assert lack_of_kernels(recipe, torch.device("cpu")) == "there are kernels for GPUs only"


@pytest.mark.parametrize(
    ("cuda", "major", "able"),
    [("12.8", 9, []), ("12.9", 9, ["blockwise"]), ("13.0", 10, ["mxfp8"]), ("13.0", 8, [])],
)
def test_each_generation_has_kernels_for_one_recipe(
    monkeypatch: pytest.MonkeyPatch, cuda: str, major: int, able: list[str]
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    device = torch.device("cuda")
    assert [recipe for recipe in RECIPES if lack_of_kernels(recipe, device) is None] == able
