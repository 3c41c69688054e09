"""FP8 products of the experts of a mixture: each expert is a linear layer for itself.

The rows of an expert are those that the tokens of all ranks of ep sent to it, and its matrices are
whole (tp does not cut experts). So each expert has scales of its own for its rows, its matrices and
its gradients, found on this rank alone; ranks with other tokens for the same expert scale theirs,
as data-parallel ranks do in other layers. ``delayed`` keeps a history for each expert and matrix;
an expert without tokens keeps its last one.

There is one product for each expert and not one kernel for all: right wherever the backend is,
and fast where experts have hundreds of rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.layers.gemm import GemmBackend
from lightning_megatron.topology.mesh import Topology


class EachExpert:
    """`GroupedGemm` that gives the rows of each expert to a `GemmBackend`.

    Args:
        backends: that of each expert of this rank.
    """

    def __init__(self, backends: Sequence[GemmBackend]) -> None:
        self._backends = tuple(backends)

    def output(
        self, x_ni: Tensor, weight_goi: Tensor, counts: list[int]
    ) -> tuple[Tensor, list[Any]]:
        """See `layers.gemm`."""
        y_no = x_ni.new_empty(x_ni.shape[0], weight_goi.shape[1])
        kept: list[Any] = []
        places = zip(
            self._backends,
            torch.split(x_ni, counts),
            weight_goi.unbind(),
            torch.split(y_no, counts),
            strict=True,
        )
        for gemm, x, weight, out in places:
            needed = None
            if len(x):
                y, needed = gemm.output(x, weight)
                out.copy_(y)
            kept.append(needed)
        return y_no, kept

    def prepare_gradient(self, grad_no: Tensor, kept: list[Any], counts: list[int]) -> "_Prepared":
        """See `layers.gemm`."""
        places = zip(self._backends, torch.split(grad_no, counts), kept, strict=True)
        prepared = [
            gemm.prepare_gradient(grad, needed) if len(grad) else None
            for gemm, grad, needed in places
        ]
        return _Prepared(prepared, grad_no.shape[1])

    def input_gradient(
        self,
        gradient: "_Prepared",
        weight_goi: Tensor,
        counts: list[int],
        total_ni: Tensor | None = None,
    ) -> Tensor:
        """See `layers.gemm`."""
        grad_ni = weight_goi.new_empty(sum(counts), weight_goi.shape[2])
        places = zip(
            self._backends,
            gradient.of_experts,
            weight_goi.unbind(),
            torch.split(grad_ni, counts),
            strict=True,
        )
        for gemm, grad, weight, out in places:
            if len(out):
                out.copy_(gemm.input_gradient(grad, weight))
        return grad_ni if total_ni is None else total_ni.add_(grad_ni)

    def weight_gradient(
        self,
        gradient: "_Prepared",
        x_ni: Tensor,
        counts: list[int],
        factor: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """See `layers.gemm`."""
        shape = len(counts), gradient.out_features, x_ni.shape[1]
        grad_goi = x_ni.new_empty(shape, dtype=dtype)
        places = zip(
            self._backends,
            gradient.of_experts,
            torch.split(x_ni, counts),
            grad_goi.unbind(),
            strict=True,
        )
        for gemm, grad, x, out in places:
            if len(x):
                found = gemm.weight_gradient(grad, x)
                out.copy_(found if factor == 1.0 else found * factor)
            else:
                out.zero_()
        return grad_goi


class _Prepared(NamedTuple):
    """Gradients of an output, each in the form that the expert's backend takes."""

    of_experts: list[Any]
    """None for an expert without rows."""
    out_features: int


def held_experts(experts: Experts, topology: Topology) -> range:
    """Numbers of the experts that this rank holds."""
    count = experts.num_experts // topology.ep.size
    return range(topology.ep.rank * count, (topology.ep.rank + 1) * count)
