"""Layers that cut a sequence over cp, and that join it (`whole.context_rows`)."""

from torch import Tensor
from typing_extensions import override

from lightning_megatron.comm.functional import gather_from, split_to
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.axis import Axis
from lightning_megatron.whole.context_rows import join, mean_gradient, only_layout, split
from lightning_megatron.whole.splits import marked, own_part, part_of, split_of, whole


class SplitContext(ParallelLayer):
    """Layer that cuts the sequence of its input: each cp rank goes on with its own part.

    It belongs inside of a `PipelineSequential`, in front of the layers that work on parts, where
    the sequence does not come from a `VocabParallelEmbedding`, which cuts by itself. Without
    context parallelism, and outside of a `PipelineSequential`, it returns its input.

    Args:
        dim: dim of the sequence.
        residual: whether the residual stream begins here, of which each tp rank has a part under
            sequence parallelism. False in front of a layer that divides it over tp by itself (a
            `RowParallelLinear`).
    """

    splits_context = True

    def __init__(self, dim: int = 1, *, residual: bool = True) -> None:
        super().__init__()
        self.dim = dim
        self.residual = residual

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Keep this rank's part of ``x``, which is whole."""
        context, dim = self.context, self.dim % x.dim()
        if context is not None:
            layout = context.split(x.shape[dim])
            if part_of(x) is None:
                x = mean_gradient(whole(x), context.cp)
            x = split(x, layout, context.cp.rank, dim)
        axis = _residual_axis(self, self.residual)
        return x if axis is None else split_to(x, axis, dim)

    @override
    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class GatherContext(ParallelLayer):
    """Layer that joins the sequence: each cp rank goes on with the whole, equal to all others'.

    It belongs in front of what mixes positions without exchanging them, as a mean over the sequence
    or a convolution, or changes their number. What follows is computed by all cp ranks alike, until
    a `SplitContext`. Without context parallelism it returns its input.

    Args:
        dim: dim of the sequence.
        residual: whether the input is the residual stream, of which each tp rank has a part under
            sequence parallelism. False behind a column-parallel layer.
    """

    joins_context = True

    def __init__(self, dim: int = 1, *, residual: bool = True) -> None:
        super().__init__()
        self.dim = dim
        self.residual = residual

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the whole of ``x``, of which each rank has a part.

        Raises:
            ConfigError: the size of the dim is not that of a part of a sequence.
        """
        features, part, dim = split_of(x), own_part(x), self.dim % x.dim()
        axis = _residual_axis(self, self.residual and features is None)
        if axis is not None:
            part = gather_from(part, axis, dim)
        context = self.context
        if context is not None:
            layout = only_layout(context, part.shape[dim], "GatherContext")
            part = join(part, layout, context.cp, dim)
            context.join()
        if features is None or part is x:
            return part
        return marked(part, type(x), features.topology, features.dim)

    @override
    def extra_repr(self) -> str:
        return f"dim={self.dim}"


def _residual_axis(layer: ParallelLayer, residual: bool) -> Axis | None:
    """Axis over which sequence parallelism divides the residual stream; None if it is whole."""
    topology = layer.topology
    if topology is None or not residual or not layer.in_trunk:
        return None
    return topology.tp if topology.sequence_parallel and topology.tp.size > 1 else None
