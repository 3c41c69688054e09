"""Where a sequence is cut over cp, and where it is joined.

A *splitter* takes a tensor that is whole and equal on all cp ranks and keeps this rank's part, the
chunks of `topology.context_layout`. A *joiner* returns the whole tensor, equal on all cp ranks.

=========  ==============================  ===================================
function   forward                         backward
=========  ==============================  ===================================
`split`    own positions, nothing sent     own positions among zeros, nothing sent
`join`     all-gather over cp              reduce-scatter over cp
=========  ==============================  ===================================

Gradients are means over dp x cp. So the gradient of a whole tensor may differ from cp rank to cp
rank, as long as the mean over the ranks is right, and that of a part counts cp-fold. A splitter
then need not communicate. The gradient of a joined tensor is summed over the ranks: they are equal
where the same follows on all of them, and parts of a sum where a splitter follows.

A sequence of length ``s`` is filled up with zeros behind its end. A joiner drops what was computed
there, and its gradient there is zero.

Under sequence parallelism the part of a cp rank is cut over tp once more, in the residual stream.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lightning_megatron.comm.collectives import start_gather, start_sum_scatter
from lightning_megatron.comm.functional import gather_from, split_to
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.splits import marked, own_part, split_of
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context_layout import ContextLayout


def split(x: Tensor, layout: ContextLayout, rank: int, dim: int = 1) -> Tensor:
    """Return a cp rank's part of a whole tensor, filled up with zeros.

    Args:
        x: whole tensor, equal on all cp ranks.
        layout: split of ``dim``.
        rank: cp rank.
        dim: dim of the sequence.

    Raises:
        ConfigError: ``dim`` has another size than the sequence.
    """
    dim %= x.dim()
    if x.shape[dim] != layout.length:
        raise ConfigError(
            f"cp={layout.cp}: a tensor of shape {tuple(x.shape)} belongs to a sequence of "
            f"{layout.length} positions: dim {dim} must have that size; nearest valid: the tensor "
            "of the whole sequence, which the layers cut themselves"
        )
    return _split(x, layout, rank, dim) if x.requires_grad else _part(x, layout, rank, dim)


def join(x: Tensor, layout: ContextLayout, axis: Axis, dim: int = 1) -> Tensor:
    """Return the whole tensor of which each cp rank has a part; all of them must call this."""
    return _join(x, layout, axis, dim % x.dim())


def own_positions(layout: ContextLayout, rank: int, device: torch.device | None = None) -> Tensor:
    """Positions ``[local]`` that a cp rank holds, in its order; padding comes after the end."""
    chunks = layout.chunks(rank)
    return torch.cat([torch.arange(c.start, c.stop, device=device) for c in chunks])


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
            x = split(x, context.split(x.shape[dim]), context.cp.rank, dim)
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
            part = join(part, context.layout(part.shape[dim]), context.cp, dim)
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


def _part(x: Tensor, layout: ContextLayout, rank: int, dim: int) -> Tensor:
    pieces, missing = [], layout.local
    for start, count in _own(layout, rank):
        pieces.append(x.narrow(dim, start, count))
        missing -= count
    if missing:
        pieces.append(x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :])))
    return torch.cat(pieces, dim)


def _own(layout: ContextLayout, rank: int) -> list[tuple[int, int]]:
    """First position and number of positions of each chunk, without padding."""
    ends = [(min(c.start, layout.length), min(c.stop, layout.length)) for c in layout.chunks(rank)]
    return [(start, stop - start) for start, stop in ends]


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: ContextLayout, rank: int, dim: int) -> Tensor:
        ctx.where = layout, rank, dim
        return _part(x, layout, rank, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout, rank, dim = ctx.where
        shape = (*grad.shape[:dim], layout.length, *grad.shape[dim + 1 :])
        whole, place = grad.new_zeros(shape), 0
        for start, count in _own(layout, rank):
            whole.narrow(dim, start, count).copy_(grad.narrow(dim, place, count))
            place += count
        return whole, None, None, None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: ContextLayout, axis: Axis, dim: int) -> Tensor:
        ctx.where = layout, axis, dim
        parts = start_gather(x.unsqueeze(0), axis, 0).wait()
        pieces = []
        for rank, part in enumerate(parts.unbind(0)):
            place = 0
            for start, count in _own(layout, rank):
                pieces.append((start, part.narrow(dim, place, count)))
                place += count
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout, axis, dim = ctx.where
        parts = torch.stack([_part(grad, layout, rank, dim) for rank in range(axis.size)])
        return start_sum_scatter(parts, axis, 0).wait().squeeze(0), None, None, None


_split: Callable[..., Tensor] = _Split.apply
_join: Callable[..., Tensor] = _Join.apply
