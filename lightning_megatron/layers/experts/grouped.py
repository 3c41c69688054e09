"""Products of groups of rows with a stack of matrices.

Rows are sorted by group; group ``g`` has ``counts[g]`` of them, perhaps none, and multiplies with
matrix ``g`` alone::

    y_g  = x_g w_g^T          output
    dx_g = dy_g w_g           gradient of the rows
    dw_g = f dy_g^T x_g       gradient of the matrices, zeros for a group without rows

`torch.nn.functional.grouped_mm` multiplies where it is legal and has a kernel (`has_kernel`): not
in float64, nor with sizes that are no multiple of 16 bytes, both of which it refuses. Elsewhere
there is one product for each group, written into its place. A group without rows costs no product.
Rows behind the last group are never passed: the kernel leaves their outputs uninitialised.

Shapes: ``n`` rows, ``g`` groups, ``i`` features of the rows, ``o`` features of the outputs.
"""

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_megatron._torch.devices import capability, from_host, is_cuda, on_host

_ALIGNMENT = 16
"""Divisor of the bytes of a row, as `grouped_mm` requires."""
_KERNEL_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}
_KERNEL_CAPABILITY = (9, 0)
"""First GPUs with a kernel; on others `grouped_mm` is a loop that waits for the counts."""


def has_kernel(x_ni: Tensor, out_features: int) -> bool:
    """Whether `grouped_mm` takes rows ``[n, i]`` and matrices ``[g, o, i]``, and has a kernel."""
    kind, dtype = x_ni.device.type, x_ni.dtype
    if dtype not in _KERNEL_DTYPES.get(kind, ()) or not x_ni.numel():
        return False
    if any(size * dtype.itemsize % _ALIGNMENT for size in (x_ni.shape[1], out_features)):
        return False
    return not is_cuda(x_ni.device) or capability(x_ni.device) >= _KERNEL_CAPABILITY


class RowCounts(list[int]):
    """Number of rows of each group, and on the device where they end.

    All products of a call share one, so that its numbers are sent to the device once.
    """

    _ends: Tensor | None = None

    def ends(self, device: torch.device) -> Tensor:
        """Index behind the last row of each group, ``[g]`` int32."""
        if self._ends is None:
            self._ends = from_host(list(accumulate(self)), torch.int32, device)
        return self._ends


class TorchGroupedGemm:
    """`GroupedGemm` in the format of its operands."""

    def output(self, x_ni: Tensor, weight_goi: Tensor, counts: list[int]) -> tuple[Tensor, None]:
        """See `layers.gemm`."""
        return _multiply(x_ni, weight_goi, counts), None

    def prepare_gradient(self, grad_no: Tensor, kept: Any, counts: list[int]) -> Tensor:
        """See `layers.gemm`."""
        del kept, counts
        return grad_no

    def input_gradient(
        self,
        gradient: Tensor,
        weight_goi: Tensor,
        counts: list[int],
        total_ni: Tensor | None = None,
    ) -> Tensor:
        """See `layers.gemm`."""
        weight_gio = weight_goi.transpose(1, 2)
        if total_ni is None:
            return _multiply(gradient, weight_gio, counts)
        if not on_host(gradient.device):
            return total_ni.add_(_multiply(gradient, weight_gio, counts))
        # On CPUs the product adds to what is there, and needs no memory of its own.
        parts = zip(
            torch.split(total_ni, counts),
            torch.split(gradient, counts),
            weight_goi.unbind(),
            strict=True,
        )
        for total, grad, w in parts:
            if len(total):
                torch.addmm(total, grad, w, out=total)
        return total_ni

    def weight_gradient(
        self,
        gradient: Tensor,
        x_ni: Tensor,
        counts: list[int],
        factor: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """See `layers.gemm`."""
        shape = len(counts), gradient.shape[1], x_ni.shape[1]
        if x_ni.is_meta:  # nothing to compute, but operations to count
            return gradient.t().mm(x_ni).to(dtype).expand(shape)
        if has_kernel(x_ni, gradient.shape[1]):
            found = F.grouped_mm(gradient.t(), x_ni, offs=_ends(counts, x_ni.device))
            return (found if factor == 1.0 else found.mul_(factor)).to(dtype)
        found = x_ni.new_empty(shape)
        rows = zip(
            torch.split(gradient, counts), torch.split(x_ni, counts), found.unbind(), strict=True
        )
        for grad, x, out in rows:
            if not len(x):
                out.zero_()
            elif factor == 1.0:
                torch.mm(grad.t(), x, out=out)
            else:
                torch.addmm(out, grad.t(), x, beta=0, alpha=factor, out=out)
        return found.to(dtype)


def _ends(counts: list[int], device: torch.device) -> Tensor:
    return (counts if isinstance(counts, RowCounts) else RowCounts(counts)).ends(device)


def _multiply(x_nk: Tensor, weight_gmk: Tensor, counts: list[int]) -> Tensor:
    """Compute ``[n, m]``, the rows of each group times the transpose of its matrix."""
    if x_nk.is_meta:  # nothing to compute, but operations to count
        return x_nk.mm(weight_gmk[0].t())
    if has_kernel(x_nk, weight_gmk.shape[1]):
        ends = _ends(counts, x_nk.device)
        return F.grouped_mm(x_nk, weight_gmk.transpose(1, 2), offs=ends)
    y = x_nk.new_empty(x_nk.shape[0], weight_gmk.shape[1])
    for x, w, out in zip(
        torch.split(x_nk, counts), weight_gmk.unbind(), torch.split(y, counts), strict=True
    ):
        if len(x):
            torch.mm(x, w.t(), out=out)
    return y
