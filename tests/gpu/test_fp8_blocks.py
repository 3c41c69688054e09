"""Kernels for block scales against the emulation of their products."""

from typing import Any

import pytest
import torch

from lightning_megatron.precision.fp8_blocks import BlockwiseGemm, lack_of_kernels
from lightning_megatron.precision.scaling import E4M3
from tests.precision.test_fp8_blocks import RECIPES, SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (4096, 1024, 2816)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_multiply_what_is_emulated(
    recipe: str, sizes: tuple[int, int, int], dtype: Any
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    lack = lack_of_kernels(recipe, device)
    if lack is not None:
        pytest.skip(lack)
    tokens, columns, rows = sizes
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, columns, generator=draw, device=device).to(dtype)
    weight = torch.randn(rows, columns, generator=draw, device=device).to(dtype)
    grad = torch.randn(tokens, rows, generator=draw, device=device).to(dtype)
    length, square = RECIPES[recipe]
    native, emulated = (BlockwiseGemm(E4M3, length, square, n) for n in (True, False))
    for found, expected in (
        (native.output(x, weight)[0], emulated.output(x, weight)[0]),
        (native.input_gradient(grad, weight), emulated.input_gradient(grad, weight)),
        (native.weight_gradient(grad, x), emulated.weight_gradient(grad, x)),
    ):
        assert found.dtype == expected.dtype
        difference = (found.double() - expected.double()).norm() / expected.double().norm()
        # Sums in another order, of which Hopper keeps 14 bits in between, and a rounding of the
        # result: a scale that belongs to another block would be another tenth.
        assert difference < 1e-2


def test_a_hopper_and_a_blackwell_have_kernels() -> None:
    major = torch.cuda.get_device_capability()[0]
    version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    device = torch.device("cuda")
    if major not in (9, 10) or version < (12, 9):
        pytest.skip("neither")
    assert lack_of_kernels({9: "blockwise", 10: "mxfp8"}[major], device) is None
