"""Places of weights: the whole, and the part of it that this rank has."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_megatron.comm.collectives import start_gather
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.tensor_shard import TensorShard
from lightning_megatron.whole.part_norms import groups_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Whole weight, and the part of it that this rank has."""

    name: str
    topology: Topology
    shape: torch.Size
    """Shape of the whole."""
    shard: TensorShard | None = None
    """Slice that this rank of tp or ep has; None for a weight of an ordinary layer."""
    axis: Axis | None = None
    """Axis over which the weight is sliced; None if it is not."""
    rows: DTensor | None = None
    """The weight, where ZeRO 3 shares out what the axis leaves."""
    copies: int = 1
    """Ranks that hold the same, and over which gradients are summed."""
    learners: dist.ProcessGroup | None = None
    """Ranks whose losses a part learns from, and that do not average its gradients."""
    stages: Any = None
    """`whole.stage_weights.StageWeights` of a pipeline; None without one."""
    owner: int = 0
    """First rank of the pipeline that has it."""

    @property
    def dim(self) -> int | None:
        """Dim along which the weight is sliced."""
        return None if self.shard is None or self.axis is None else self.shard.dim

    @property
    def split_dim(self) -> int | None:
        """Dim of a slice over tp that is one interval of it, and a plain tensor; else None."""
        shard = self.shard
        plain = self.rows is None and shard is not None and shard.segments is None
        return self.dim if plain and self.axis is self.topology.tp else None

    @property
    def is_cut(self) -> bool:
        """Whether other ranks have other elements."""
        return self.axis is not None or self.rows is not None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups whose ranks have the other parts."""
        of_axis = () if self.axis is None or self.axis.group is None else (self.axis.group,)
        return (*of_axis, *(() if self.rows is None else groups_of(self.rows)))

    def is_like(self, other: "Place") -> bool:
        """Whether a tensor there is cut as one here."""
        mine, its = self.rows, other.rows
        rows = mine is its or (
            mine is not None
            and its is not None
            and (mine.device_mesh, mine.placements) == (its.device_mesh, its.placements)
        )
        return (
            rows
            and (self.shape, self.axis, self.dim) == (other.shape, other.axis, other.dim)
            and (self.shard is None or other.shard is None or self.shard == other.shard)
        )

    def without_rows(self) -> "Place":
        """Place of the same slice, of which this rank has all rows."""
        learners = self.axis.group if self.axis is self.topology.ep and self.axis else None
        return replace(self, rows=None, learners=learners)

    def gather(self, part: Tensor) -> Tensor:
        """Return the whole of which all ranks have their ``part``: a DTensor or a plain tensor."""
        x = part.full_tensor() if isinstance(part, DTensor) else part
        if self.axis is None or self.shard is None or self.shard.dim is None:
            return x
        x = start_gather(x.contiguous(), self.axis, self.shard.dim).wait()
        segments = self.shard.segments
        return x if segments is None else segments.in_canonical_order(x, self.shard.dim)

    def own_part(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's part of ``whole``: a DTensor or a plain tensor."""
        if self.axis is None or self.shard is None or self.shard.dim is None:
            x = whole.clone()
        else:
            x = self.shard.part_of(whole, self.shape[self.shard.dim] // self.axis.size)
        if self.rows is None:
            return x
        mesh = self.rows.device_mesh
        everywhere = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return everywhere.redistribute(mesh, self.rows.placements)
