"""Batch normalisation of inputs of any number of dimensions."""

from torch import Tensor, nn
from typing_extensions import override


class AnyBatchNorm(nn.BatchNorm1d):
    """BatchNorm1d, BatchNorm2d and BatchNorm3d in one (2.11-2.13).

    They differ in `_check_input_dim` alone, by which `_BatchNorm.forward` checks its input.
    """

    def check_input(self, input: Tensor) -> None:
        """Raise a ValueError where there are no channels."""
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dims, got {input.dim()}")

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        self.check_input(input)
