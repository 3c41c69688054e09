"""Grouped products equal one dense product for each group, whatever the groups."""

import pytest
import torch
from torch import Tensor

from lightning_megatron.layers.experts.grouped import TorchGroupedGemm, has_kernel

GROUPS = {
    "uneven": [3, 1, 4, 2],
    "some without rows": [0, 5, 0, 2],
    "all rows to one": [0, 0, 9, 0],
    "no rows": [0, 0, 0, 0],
}
FORMATS = {
    "float64": (torch.float64, 6, 5, 1e-13),
    "float32, odd sizes": (torch.float32, 7, 9, 1e-5),
    "float32, by the kernel": (torch.float32, 8, 12, 1e-5),
    "bfloat16, odd sizes": (torch.bfloat16, 7, 9, 3e-2),
    "bfloat16, by the kernel": (torch.bfloat16, 16, 8, 3e-2),
}


def tensors(counts: list[int], dtype: torch.dtype, i: int, o: int) -> list[Tensor]:
    """Rows, a stack, and gradients of their product."""
    draw = torch.Generator().manual_seed(1)
    shapes = [(sum(counts), i), (len(counts), o, i), (sum(counts), o)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", FORMATS)
def test_products_equal_dense_ones(name: str, groups: str) -> None:
    dtype, i, o, tolerance = FORMATS[name]
    counts, gemm = GROUPS[groups], TorchGroupedGemm()
    x, weight, grad = tensors(counts, dtype, i, o)
    assert has_kernel(x, o) == ("kernel" in name and groups != "no rows")

    y, kept = gemm.output(x, weight, counts)
    prepared = gemm.prepare_gradient(grad, kept, counts)
    found = (
        y,
        gemm.input_gradient(prepared, weight, counts),
        gemm.weight_gradient(prepared, x, counts, 0.25, dtype),
    )

    rows = zip(*(t.double().split(counts) for t in (x, grad)), weight.double(), strict=True)
    outputs, of_rows, of_weights = [], [], []
    for x_ni, grad_no, w_oi in rows:
        outputs.append(x_ni @ w_oi.T)
        of_rows.append(grad_no @ w_oi)
        of_weights.append(grad_no.T @ x_ni * 0.25)  # of no rows: zeros
    expected = torch.cat(outputs), torch.cat(of_rows), torch.stack(of_weights)
    for ours, dense in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), dense, rtol=tolerance, atol=4 * tolerance)


def test_gradients_of_stacks_come_in_the_format_of_the_stack() -> None:
    counts, gemm = [3, 4], TorchGroupedGemm()
    for i in (7, 8):
        x, _, grad = tensors(counts, torch.bfloat16, i, 16)
        found = gemm.weight_gradient(grad, x, counts, 1.0, torch.float32)
        assert found.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_of_rows_add_to_a_total(dtype: torch.dtype) -> None:
    counts, gemm = [3, 0, 4], TorchGroupedGemm()
    _, weight, grad = tensors(counts, dtype, 8, 12)
    total = torch.ones(7, 8, dtype=dtype)
    expected = total + gemm.input_gradient(grad, weight, counts)
    assert gemm.input_gradient(grad, weight, counts, total) is total
    torch.testing.assert_close(total, expected)
