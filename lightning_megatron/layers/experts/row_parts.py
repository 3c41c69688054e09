"""Rows that all ranks of an axis hold alike, divided among them, where their number is any.

Without sequence parallelism every tp rank has all tokens. Each routes a part, so that no expert
computes a token twice. Parts are neighbouring rows, as many for each rank as for the first ones,
and fewer, or none, for the last.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from lightning_megatron.comm.functional import gather_from, split_to
from lightning_megatron.topology.axis import Axis


@dataclass(frozen=True)
class RowParts:
    """Division of ``n`` rows over an axis."""

    n: int
    """Rows of all ranks."""
    axis: Axis
    """Ranks that divide them."""

    @property
    def largest(self) -> int:
        """Rows of the ranks that have the most."""
        return -(-self.n // self.axis.size)

    @property
    def start(self) -> int:
        """First row of this rank."""
        return min(self.n, self.axis.rank * self.largest)

    @property
    def stop(self) -> int:
        """Row behind the last of this rank."""
        return min(self.n, self.start + self.largest)

    def own(self, x_nh: Tensor) -> Tensor:
        """Rows of this rank; the gradient is gathered."""
        missing = self.largest * self.axis.size - self.n
        if not missing:
            return split_to(x_nh, self.axis, 0)
        part = split_to(F.pad(x_nh, (0, 0, 0, missing)), self.axis, 0)
        return part[: self.stop - self.start]

    def whole(self, y_th: Tensor) -> Tensor:
        """All rows, from each rank's; the gradient is divided."""
        missing = self.largest - y_th.shape[0]
        part = F.pad(y_th, (0, 0, 0, missing)) if missing else y_th
        return gather_from(part, self.axis, 0)[: self.n]
