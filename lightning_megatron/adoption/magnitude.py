"""Magnitudes of DoRA on layers that are split over tp.

DoRA (arXiv 2402.09353) scales each output feature of ``W + s B A`` to a learned magnitude ``m``::

    y = m / |W + s B A| * (W x + s B A x)

with the norm of each row of the matrix, taken as a constant in the backward. Of a column-parallel
layer each rank has whole rows, and the magnitudes of these; of a row-parallel one it has parts of
all rows, whose squares are summed over tp.
"""

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.adoption.classes import own_class
from lightning_megatron.adoption.linear import AdoptedLinear
from lightning_megatron.adoption.sharding import Sharded, Sharding, as_sharded
from lightning_megatron.comm.functional import reduce_from
from lightning_megatron.whole.splits import own_part


class AdapterMagnitude(Sharded):
    """Class in front of PEFT's ``DoraLinearLayer``, whose weight ``[out]`` are the magnitudes.

    Attributes:
        of_rows: whether the base layer is row-parallel.
    """

    weight: nn.Parameter
    of_rows: bool

    def get_weight_norm(
        self, weight: Tensor, lora_weight: Tensor, scaling: float, adapter_name: str | None = None
    ) -> Tensor:
        """Norm of each row of ``weight + scaling * lora_weight``, of which this rank has a part."""
        own: Any = own_class(self)
        norm: Tensor = own.get_weight_norm(
            self, weight, lora_weight, scaling, adapter_name=adapter_name
        )
        return self._over_ranks(norm)

    def _over_ranks(self, norm: Tensor) -> Tensor:
        """Norm of whole rows, from that of this rank's part of them."""
        if self.topology is None or not self.of_rows:
            return norm
        return reduce_from(norm.detach().square(), self.topology.tp).sqrt()

    @override
    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,
        lora_B: Any,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """Part added to the output of ``base_layer``, split as it is.

        Args:
            x: input, after a dropout if there is one.
            lora_A: first matrix of the adapter.
            lora_B: second one.
            scaling: factor of their product.
            base_layer: layer that the adapter surrounds.
            base_result: its output; None where a dropout has changed ``x``.
            adapter_name: name of the adapter.
        """
        topology = self.topology
        if topology is None or topology.tp.size == 1 or self.held == "whole":
            plain: Tensor = own_class(self).forward(
                self,
                x,
                lora_A=lora_A,
                lora_B=lora_B,
                scaling=scaling,
                base_layer=base_layer,
                base_result=base_result,
                adapter_name=adapter_name,
            )
            return plain
        weight, bias = _local(base_layer)
        with torch.no_grad():
            low_rank = _local(lora_B)[0] @ lora_A.weight
            norm = torch.linalg.norm(weight + scaling * low_rank, dim=1)
            norm = self._over_ranks(norm.to(weight.dtype))
        scale = self.computed(self.weight) / norm
        if base_result is not None:
            result = base_result
        elif self.of_rows:
            result = base_layer(x)
        else:  # its input has been entered (`adoption.adapters.ColumnAdapter`)
            result = base_layer.own_features(x)
        added = lora_B(lora_A(x)) * scaling
        if not self.of_rows:
            result, added = own_part(result), own_part(added)
        if bias is not None:
            result = result - bias
        out = (scale - 1) * result + scale * added
        split: Tensor = out if self.of_rows else lora_B.marked_output(out)
        return split


def as_magnitude(module: nn.Module, base: AdoptedLinear) -> None:
    """Split the magnitudes of DoRA as the layer is whose features they belong to, in place."""
    of_rows = base.placement == "row"
    split = Sharding(dims={"weight": 0}, parts=base.parts, undivided=base.sharding.undivided)
    as_sharded(module, Sharding() if of_rows else split, AdapterMagnitude).of_rows = of_rows


def _local(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Weight ``[out, in]`` and bias of the features that this rank computes."""
    if isinstance(layer, AdoptedLinear):
        return layer.local_parameters()
    return layer.weight, layer.bias
