"""Fused projections of other libraries, and their linear layers with transposed weights.

GPT-2 computes q, k and v by one matrix whose output features are ``[q; k; v]``, Phi-3 also
``[gate; up]``. Code of theirs cuts the output again. Here each rank holds its heads' rows of q, of
k and of v, one below the other, as one parameter: the output is ``[q; k; v]`` of this rank's heads,
the matrix product stays one, and so does the parameter. Name, shape and order of the whole are the
model's own everywhere outside of the rank (`topology.segments`): in checkpoints, in ``state_dict``
of one process, in exports, in groups of optimizers, and for optimizers that look at whole matrices
(Muon orthogonalises ``[q; k; v]`` as one, as it does in one process; parameters of their own for q,
k and v would have other norms).

What cuts the output uses this rank's sizes: those that an attention module has as attributes are
this rank's while it is distributed (`adoption.heads`), and where it reads the number of its heads
from the configuration of the model, it gets a view of that with this rank's (`as_local_config`).

With fewer key/value heads than ranks, every rank holds the whole parameter and computes its heads'
rows of it; gradients are then summed over tp.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.adoption.classes import become
from lightning_megatron.adoption.heads import (
    KV_COUNTS,
    QUERY_COUNTS,
    Heads,
    head_size,
    query_heads,
)
from lightning_megatron.adoption.linear import AdoptedColumn, AdoptedRow
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.degrees import Degrees, nearest_divisors
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.topology.segments import Piece, joined


@dataclass(frozen=True)
class Part:
    """One of the projections in a fused one."""

    features: int
    """Number of its output features."""
    units: int
    """Number of indivisible blocks of them: heads; the features themselves for an MLP."""

    def piece(self, ranks: int, rank: int) -> tuple[int, int]:
        """First feature of a rank, and number; ranks beyond the units share them."""
        own, each = max(1, self.units // ranks), self.features // self.units
        return rank * self.units // ranks * each, own * each


def are_shared(parts: Sequence[Part], ranks: int) -> bool:
    """Whether several ranks compute the same units of a part, so that all hold all parts."""
    return any(part.units % ranks for part in parts)


def pieces_of(parts: Sequence[Part], tp: Axis) -> list[Piece]:
    """First feature and length of the piece of each part that this rank computes."""
    found, begin = [], 0
    for part in parts:
        first, length = part.piece(tp.size, tp.rank)
        found.append((begin + first, length))
        begin += part.features
    return found


class AdoptedFused(AdoptedColumn):
    """Class in front of a linear layer whose output is that of several, one after the other.

    The output is this rank's part of each, one after the other, as a plain tensor.

    Attributes:
        parts: the projections, in order.
    """

    parts: tuple[Part, ...]

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        tp = degrees.tp
        wrong = [part.units for part in self.parts if part.units % tp and tp % part.units]
        if not wrong:
            return []
        fewest = min(part.units for part in self.parts)
        valid = " or ".join(str(d) for d in nearest_divisors(fewest, tp))
        return [
            f"tp={tp}: a fused projection of {[part.units for part in self.parts]} units (heads) "
            f"is split by whole units, and {wrong[0]} is neither a multiple nor a divisor of tp; "
            f"nearest valid: tp={valid}"
        ]

    @override
    def segments(self) -> dict[str, tuple[int, ...]]:
        if self._shared_unit is not None:
            return {}
        return dict.fromkeys(("weight", "bias"), tuple(part.features for part in self.parts))

    @override
    def distribute(self, topology: Topology) -> None:
        tp = topology.tp
        self._shared_unit = tp.rank if are_shared(self.parts, tp.size) else None
        # Not that of a column layer, which has one number of units for all features.
        ParallelLayer.distribute(self, topology)

    @override
    def withdraw(self) -> None:
        super().withdraw()
        self._shared_unit = None

    @override
    def local_parameters(self) -> tuple[Tensor, Tensor | None]:
        if self._shared_unit is None or self.topology is None:
            return self.matrix, self.bias
        pieces = pieces_of(self.parts, self.topology.tp)
        bias = None if self.bias is None else joined(self.bias, 0, pieces)
        return joined(self.matrix, 0, pieces), bias


class Transposed(AdoptedColumn):
    """Class in front of a column-parallel ``Conv1D``, whose weight is ``[in, out]``."""

    @property
    @override
    def matrix(self) -> Tensor:
        return self.weight.t()

    @override
    def shard_dims(self) -> dict[str, int]:
        return {name: dim + (name == "weight") for name, dim in super().shard_dims().items()}

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        _init_conv(name, full, generator)


class TransposedFused(AdoptedFused, Transposed):
    """Class in front of a fused ``Conv1D``."""


class TransposedRow(AdoptedRow):
    """Class in front of a row-parallel ``Conv1D``."""

    @property
    @override
    def matrix(self) -> Tensor:
        return self.weight.t()

    @override
    def shard_dims(self) -> dict[str, int]:
        return {"weight": 0}

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        _init_conv(name, full, generator)


def _init_conv(name: str, full: Tensor, generator: torch.Generator | None) -> None:
    if name == "weight":
        nn.init.normal_(full, std=0.02, generator=generator)
    else:
        nn.init.zeros_(full)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a ``Conv1D`` of transformers, whose weight is ``[in, out]``."""
    return any(
        kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
        for kind in type(module).__mro__
    )


def as_fused(module: nn.Module, parts: Sequence[Part], name: str = "") -> None:
    """Make a fused linear layer or ``Conv1D`` column-parallel, part by part, in place.

    Args:
        module: the layer.
        parts: the projections in it, in order.
        name: name of the module, for the message.

    Raises:
        ConfigError: the parts are not all of the layer's output features.
    """
    out_features = _sizes(module, name)[1]
    if sum(part.features for part in parts) != out_features:
        raise ConfigError(
            f"{name or type(module).__name__} has {out_features} output features, but parts of "
            f"{[part.features for part in parts]}; nearest valid: parts that add up to "
            f"{out_features}"
        )
    kind = TransposedFused if is_transposed(module) else AdoptedFused
    fused = _column(module, kind)
    fused.parts = tuple(parts)
    fused.units = sum(part.units for part in parts)  # its output is a plain tensor


def as_transposed_column(module: nn.Module, *, units: int | None = None) -> None:
    """Make a ``Conv1D`` column-parallel, in place; ``units`` are those of `as_column`."""
    _column(module, Transposed).units = units


def as_transposed_row(module: nn.Module, *, of_heads: bool = False) -> None:
    """Make a ``Conv1D`` row-parallel, in place; ``of_heads`` is that of `as_row`."""
    sizes = _sizes(module)
    row = become(module, TransposedRow)
    row.in_features, row.out_features = sizes
    row.tensor_shards = {}
    row.init_std = None
    row.input_is_parallel = True
    row.of_heads = of_heads


def _column(module: nn.Module, kind: type[Any]) -> Any:
    sizes = _sizes(module)
    column = become(module, kind)
    column.in_features, column.out_features = sizes
    column.tensor_shards = {}
    column.init_std = None
    column.gather_output = False
    column._shared_unit = None
    column.may_stay_whole = column.is_whole = False
    return column


def out_features(module: nn.Module, name: str = "") -> int:
    """Number of output features of a linear layer or ``Conv1D``."""
    return _sizes(module, name)[1]


def _sizes(module: nn.Module, name: str = "") -> tuple[int, int]:
    if is_transposed(module):
        return int(module.nx), int(module.nf)  # type: ignore[arg-type]
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    raise ConfigError(
        f"{name or type(module).__name__} is a {type(module).__name__}, which cannot be split as a "
        "fused projection; nearest valid: an nn.Linear or a Conv1D of transformers"
    )


def fused_heads(module: nn.Module, columns: Mapping[str, nn.Module]) -> Heads:
    """Find the heads of an attention module with a fused projection.

    Args:
        module: the attention module.
        columns: its other column-parallel projections, by name.

    Raises:
        ConfigError: nothing tells the number of its heads.
    """
    queries, size = query_heads(module), head_size(module)
    if queries is None or size is None:
        raise ConfigError(
            f"{type(module).__name__} says nowhere how many heads its fused projection has; "
            f"nearest valid: an attribute {QUERY_COUNTS[0]}, or 'colwise_gather_output' for it"
        )
    keys = _count(module, KV_COUNTS) or _count(getattr(module, "config", None), KV_COUNTS)
    units = {name: out_features(column) // size for name, column in columns.items()}
    return Heads(queries, keys or queries, units)


def _count(holder: Any, names: Sequence[str]) -> int | None:
    found = (getattr(holder, name, None) for name in names)
    return next((count for count in found if isinstance(count, int) and count > 0), None)


def fused_parts(
    owner: nn.Module, heads: Heads, features: int, name: str, *, queries: bool = True
) -> list[Part]:
    """Return the parts of a fused projection: queries, keys, values, or the last two.

    Args:
        owner: the attention module.
        heads: its heads.
        features: output features of the projection.
        name: name of the projection.
        queries: whether queries are in it.

    Raises:
        ConfigError: the features are no such parts.
    """
    size = head_size(owner)
    assert size is not None
    query, key = Part(heads.queries * size, heads.queries), Part(heads.keys * size, heads.keys)
    parts = [query, key, key] if queries else [key, key]
    if sum(part.features for part in parts) == features:
        return parts
    of_queries = f"queries of {heads.queries} heads, " if queries else ""
    raise ConfigError(
        f"tp_plan: {name} has {features} output features, which are not {of_queries}keys and "
        f"values of {heads.keys} heads, with {size} features each; nearest valid: "
        "'colwise_gather_output'"
    )


class LocalConfig:
    """View of the configuration of a model, with some numbers of its own.

    Args:
        config: configuration that all other attributes are read from and written to.
        numbers: attributes with other values.
    """

    def __init__(self, config: Any, numbers: Mapping[str, int]) -> None:
        self.__dict__["_config"] = config
        self.__dict__["_numbers"] = dict(numbers)

    def __getattr__(self, name: str) -> Any:
        numbers = self.__dict__["_numbers"]
        return numbers[name] if name in numbers else getattr(self.__dict__["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_config"], name, value)


class Configured(ParallelLayer):
    """Class in front of a module that reads the number of its heads from its ``config``.

    Attributes:
        counts: attributes of the configuration, with their values over all ranks.
    """

    counts: Mapping[str, int]
    _whole_config: Any

    @override
    def distribute(self, topology: Topology) -> None:
        super().distribute(topology)
        self._restore()
        tp = topology.tp.size
        if tp > 1:
            numbers = {name: max(count // tp, 1) for name, count in self.counts.items()}
            self.__dict__["_whole_config"] = self.__dict__["config"]
            self.__dict__["config"] = LocalConfig(self.__dict__["config"], numbers)

    @override
    def withdraw(self) -> None:
        super().withdraw()
        self._restore()

    def _restore(self) -> None:
        if "_whole_config" in self.__dict__:
            self.__dict__["config"] = self.__dict__.pop("_whole_config")


def as_local_config(module: nn.Module, heads: Heads) -> None:
    """Have a module that counts its heads in ``config`` alone find this rank's there, in place."""
    config = vars(module).get("config")
    if config is None or _count(module, QUERY_COUNTS) is not None:
        return
    counts = {name: heads.queries for name in QUERY_COUNTS if hasattr(config, name)}
    counts |= {name: heads.keys for name in KV_COUNTS if hasattr(config, name)}
    configured = become(module, Configured)
    configured.tensor_shards = {}
    configured.counts = counts
