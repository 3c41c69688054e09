"""Part of a parameter that a rank of tp, or of ep, holds."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_megatron.topology.segments import Piece, Segments, joined


@dataclass(frozen=True, kw_only=True)
class TensorShard:
    """Part of the full parameter that this rank of tp, or of ep, holds."""

    full_shape: tuple[int, ...]
    """Shape of the unpartitioned parameter."""
    dim: int | None = None
    """Partitioned dimension, or None when every tp rank holds the whole parameter."""
    offset: int = 0
    """First index held along ``dim``."""
    sum_gradients: bool = False
    """Whether each tp rank computes only a part of the gradient of a parameter that all ranks hold
    whole. The parts are summed over tp after backward."""
    axis: Literal["tp", "ep"] = "tp"
    """Axis that divides the parameter; those of experts are divided over ep, also where ep is 1."""
    stacked: bool = False
    """Whether it is a stack of independent matrices along dimension 0."""
    segments: Segments | None = None
    """Segments of ``dim``, each of which is divided by itself (a fused projection); ``offset`` is
    then that of the ranks' parts one after the other."""

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """First index and length of every run that this rank holds of ``dim``, with segments."""
        if self.segments is None or self.dim is None:
            return ()
        return self.segments.pieces(self.offset * self.segments.ranks // self.full_shape[self.dim])

    def part_of(self, full: Tensor, length: int) -> Tensor:
        """Return a copy of this rank's part, of ``length`` along ``dim``, of the full parameter."""
        if self.dim is None:
            return full.clone()
        if self.segments is not None:
            return joined(full, self.dim, self.pieces)
        return full.narrow(self.dim, self.offset, length).contiguous().clone()
