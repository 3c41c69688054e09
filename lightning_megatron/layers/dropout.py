"""Dropout whose masks fit the layout.

On an activation that every tp rank holds whole, all ranks must drop the same elements; on a part of
one (the residual stream under sequence parallelism) each rank must draw its own
numbers.
"""

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.mesh import Topology


class Dropout(ParallelLayer):
    """Dropout on the residual stream.

    Args:
        p: probability of an element to be zeroed.

    Raises:
        ConfigError: ``p`` is not a probability below 1.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ConfigError(f"dropout={p}: must lie in [0, 1); nearest valid: dropout=0.0")
        self.p = p

    @override
    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        topology = self.topology
        with random_stream(topology, sharded=topology is not None and topology.sequence_parallel):
            return F.dropout(x, self.p)

    @override
    def extra_repr(self) -> str:
        return f"p={self.p}"


def random_stream(topology: Topology | None, *, sharded: bool) -> AbstractContextManager[None]:
    """Context whose draws come from the stream for sharded activations, or the default one."""
    if topology is None or topology.tp.size == 1 or not sharded:
        return nullcontext()
    return topology.rng.sharded()
