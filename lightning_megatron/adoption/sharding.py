"""How tp divides an adopted module, as data beside it.

A module of another library becomes parallel by a change of its class (`adoption.classes`). What tp
does with its parameters is its `Sharding`: which dimension of each is divided, in which parts, and
what becomes of parts that tp does not divide::

    linear layer, by columns    Sharding(dims={"weight": 0, "bias": 0})
    four heads of keys          Sharding(dims=..., parts=(Part(64, 4),), undivided="shared")
    fused [q; k; v]             the same with three parts
    vocabulary of any size      Sharding(dims={"weight": 0}, undivided="whole")
    norm inside of heads        Sharding(sums="always")

The features of a *fused* projection ``[q; k; v]`` are three parts, each divided by itself. A rank
holds its heads' rows of q, of k and of v, one below the other, as one parameter. Name, shape and
order of the whole are the model's own everywhere outside of the rank (`topology.segments`): in
checkpoints, in ``state_dict`` of one process, in exports, in groups of optimizers, and for
optimizers that look at whole matrices (Muon orthogonalises ``[q; k; v]`` as one, as it does in one
process; parameters of their own for q, k and v would have other norms).

With fewer units (key/value heads) than ranks, every rank holds the whole parameter and computes its
heads' rows of it; gradients are then summed over tp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.adoption.classes import become
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.degrees import Degrees, divisibility_problem, nearest_divisors
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.segments import Piece, joined

Held = Literal["divided", "shared", "whole"]
"""Whether a rank holds a part; or all, and computes a part; or all, and computes all."""


@dataclass(frozen=True)
class Part:
    """One of the projections in a fused one; of any other layer there is one part."""

    features: int
    """Number of its features."""
    units: int
    """Number of indivisible blocks of them: heads; the features themselves for an MLP."""

    def piece(self, ranks: int, rank: int) -> Piece:
        """First feature of a rank, and number; ranks beyond the units share them."""
        own, each = max(1, self.units // ranks), self.features // self.units
        return rank * self.units // ranks * each, own * each


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What tp does with the parameters of one module."""

    dims: Mapping[str, int] = field(default_factory=dict)
    """Dimension of each parameter that is divided; all others are whole on every rank."""
    parts: tuple[Part, ...] = ()
    """Parts of that dimension, in order, each of which is divided by itself; empty: one part,
    which may be divided anywhere."""
    undivided: Literal["refused", "shared", "whole"] = "refused"
    """What becomes of parts that tp does not divide: an error; or ranks beyond the units share
    these; or every rank computes everything, as with a vocabulary."""
    sums: Literal["never", "always", "sequence"] = "never"
    """Whether a rank applies whole parameters to a part of what the whole is applied to, so that
    their gradients are summed over tp: under sequence parallelism only, or always."""
    size: str = ""
    """What errors call the divided size; empty where another module refuses the degree."""


class Sharded(ParallelLayer):
    """Class in front of a module that is split as its `Sharding` says.

    Attributes:
        sharding: how.
        held: what this rank holds.
    """

    sharding: Sharding
    held: Held = "divided"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Parts of the divided dimension, over all ranks."""
        if self.sharding.parts or not self.sharding.dims:
            return self.sharding.parts
        name, dim = next(iter(self.sharding.dims.items()))
        shard = self.tensor_shards.get(name)
        shape = self.get_parameter(name).shape if shard is None else shard.full_shape
        return (Part(shape[dim], shape[dim]),)

    @override
    def shard_dims(self) -> dict[str, int]:
        return dict(self.sharding.dims) if self.held == "divided" else {}

    @override
    def segments(self) -> dict[str, tuple[int, ...]]:
        parts = self.sharding.parts
        if self.held != "divided" or len(parts) < 2:
            return {}
        return dict.fromkeys(self.sharding.dims, tuple(part.features for part in parts))

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        sums = self.sharding.sums
        if self.held == "whole":
            return frozenset()
        if sums == "always" or (sums == "sequence" and topology.sequence_parallel):
            return frozenset(name for name, _ in self.named_parameters(recurse=False))
        return frozenset(self.sharding.dims if self.held == "shared" else ())

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        tp, sharding = degrees.tp, self.sharding
        if not sharding.size or sharding.undivided == "whole":
            return []
        if sharding.undivided == "refused":
            found = (
                divisibility_problem(sharding.size, part.features, "tp", tp) for part in self.parts
            )
            return [problem for problem in found if problem]
        units = [part.units for part in self.parts]
        wrong = [count for count in units if count % tp and tp % count]
        if not wrong:
            return []
        valid = " or ".join(str(d) for d in nearest_divisors(min(units), tp))
        return [
            f"tp={tp}: a projection of {units} units (heads) is split by whole units, and "
            f"{wrong[0]} is neither a multiple nor a divisor of tp; nearest valid: tp={valid}"
        ]

    @override
    def distribute(self, topology: Topology) -> None:
        tp, undivided = topology.tp.size, self.sharding.undivided
        self.held = "divided"
        if undivided != "refused" and any(part.units % tp for part in self.parts):
            self.held = undivided
        super().distribute(topology)

    @override
    def withdraw(self) -> None:
        super().withdraw()
        self.held = "divided"

    def computed(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return what this rank computes with of a parameter that it holds."""
        if self.held != "shared" or self.topology is None:
            return x
        pieces = pieces_of(self.parts, self.topology.tp)
        return x.narrow(dim, *pieces[0]) if len(pieces) == 1 else joined(x, dim, pieces)


def pieces_of(parts: Sequence[Part], tp: Axis) -> list[Piece]:
    """First index and length of the piece of each part that this rank computes."""
    found, begin = [], 0
    for part in parts:
        first, length = part.piece(tp.size, tp.rank)
        found.append((begin + first, length))
        begin += part.features
    return found


S = TypeVar("S", bound=Sharded)


def as_sharded(module: nn.Module, sharding: Sharding, front: type[S]) -> S:
    """Put ``front`` in front of the class of a module, split as ``sharding`` says; returns it."""
    sharded = become(module, front)
    sharded.sharding = sharding
    return sharded
