"""Calls of a trunk outside of a step: along the stages, one after the other.

In a step microbatches follow each other through the stages, and a rank sees its own part only. What
calls the network by itself, as text generation does token by token, needs the output at once and on
every rank: there the rank of a stage runs it, and broadcasts its output over pp. All ranks wait
meanwhile, so this is for looking at a network, not for training it. Per stage one activation is
sent, ``b * s * h`` numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_megatron._torch.graphs import tree_map
from lightning_megatron.comm.objects import ObjectBroadcast
from lightning_megatron.layers.sequential import Relay
from lightning_megatron.pipeline.sequence_lengths import SequenceLengths
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.split_tensor import SplitTensor
from lightning_megatron.whole.splits import marked, own_part, part_of, split_of, whole


class StageRelay(Relay):
    """Broadcasts from the rank of each stage over pp.

    Args:
        topology: the layout.
        stage_ranks: pipeline rank of every stage.
        host_group: gloo group over the pp axis, where messages between stages are not on the host.
    """

    def __init__(
        self,
        topology: Topology,
        stage_ranks: Sequence[int],
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        pp = topology.pp
        self.topology = topology
        self._lengths = SequenceLengths(topology)
        self._ranks = tuple(stage_ranks)
        self._broadcasts = {
            rank: ObjectBroadcast(pp, pp.ranks[rank], topology.device, host_group)
            for rank in set(stage_ranks)
        }
        mine = [stage for stage, rank in enumerate(stage_ranks) if rank == pp.rank]
        self._stages = [mine.index(s) if s in mine else None for s in range(len(stage_ranks))]

    @property
    @override
    def stages(self) -> Sequence[int | None]:
        return self._stages

    @override
    def begin(self) -> None:
        self._lengths.forward(0)

    @override
    def share(self, stage: int, value: Any) -> Any:
        rank = self._ranks[stage]
        if rank == self.topology.pp.rank:
            value = tree_map(_joined, value)
            self._broadcasts[rank](self._lengths.load(tree_map(_packed, value)))
            return value
        return tree_map(self._unpacked, self._lengths.unload(self._broadcasts[rank](None)))

    def _unpacked(self, leaf: Any) -> Any:
        if not isinstance(leaf, _Part):
            return leaf
        return marked(leaf.part, SplitTensor, self.topology, leaf.dim)

    def __deepcopy__(self, memo: Any) -> "StageRelay":
        """Return itself: a copy of a module is on the same stages."""
        return self


@dataclass(frozen=True)
class _Part:
    """This tp rank's part of a tensor: the ranks of the same tp coordinate have the same."""

    part: Tensor
    dim: int


def _joined(leaf: Any) -> Any:
    """Sequences that cp ranks share as whole ones."""
    return leaf if part_of(leaf) is None else whole(leaf)


def _packed(leaf: Any) -> Any:
    split = split_of(leaf)
    return leaf if split is None else _Part(own_part(leaf), split.dim)
