"""Layers of other libraries as parallel layers, in place.

An ``nn.Linear`` becomes column- or row-parallel and an ``nn.Embedding`` vocabulary-parallel by a
change of its class (`adoption.classes`): its parameters, names, hooks and identity stay.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import TensorWeakRef
from typing_extensions import override

from lightning_megatron.adoption.classes import become
from lightning_megatron.adoption.gathered import gathered, linear_of_gathered
from lightning_megatron.adoption.sequences import divides
from lightning_megatron.comm.functional import copy_to, reduce_from, split_to
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.context_tensor import on_rows
from lightning_megatron.layers.delayed_wgrad import linear
from lightning_megatron.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    row_parallel,
)
from lightning_megatron.layers.linear_functions import SEQUENCE_DIM
from lightning_megatron.layers.split_tensor import SplitTensor
from lightning_megatron.layers.splits import marked, own_part, part_of, split_of, whole
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology

_ENTERED = "_entered_tp"
_IS_ENTERED = "_is_entered_tp"


def entered(x: Tensor, tp: Axis) -> Tensor:
    """Return the whole of ``x`` with gradients that are summed over tp.

    Column-parallel layers that take the same tensor one after the other share one sum, and of a
    sequence that is split over tp one gather.
    """
    if getattr(x, _IS_ENTERED, None) is tp:
        return x
    # A parameter outlives its step. The reference is weak: the result is a view of x, so that the
    # two would keep each other. What learns keeps the result for the backward.
    shares = torch.is_grad_enabled() and x.requires_grad and not x.is_leaf
    known = _known(x, tp) if shares else None
    if known is None:
        split = split_of(x)
        if split is None or split.dim == x.dim() - 1:
            known = copy_to(whole(x), tp)
        else:
            known = gathered(own_part(x), tp, split.dim)
        if shares:
            # A compiler sees through a plain attribute, and keeps none of it.
            traced = torch.compiler.is_compiling()
            found = known if traced else (TensorWeakRef(known), tp, x._version)
            setattr(x, _ENTERED, found)
    return known


def _known(x: Tensor, tp: Axis) -> Tensor | None:
    """Result of `entered` for ``x``, which has not changed since."""
    found = getattr(x, _ENTERED, None)
    if found is None or torch.compiler.is_compiling():
        return found
    reference, axis, version = found
    known: Tensor | None = reference()
    return known if axis is tp and version == x._version else None


def entered_once(x: Tensor, tp: Axis) -> Tensor:
    """Return `entered` of ``x`` such that column-parallel layers take it as it is."""
    x = entered(x, tp)
    setattr(x, _IS_ENTERED, tp)
    return x


class AdoptedColumn(ColumnParallelLinear):
    """Class in front of an ``nn.Linear`` whose output features are split over tp.

    Attributes:
        may_stay_whole: whether every rank holds and computes all features where tp does not divide
            their number (a vocabulary, for example).
        is_whole: whether it does.
    """

    may_stay_whole: bool = False
    is_whole: bool = False

    @override
    def shard_dims(self) -> dict[str, int]:
        return {} if self.is_whole else super().shard_dims()

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        return [] if self.may_stay_whole else super().problems(degrees)

    @override
    def distribute(self, topology: Topology) -> None:
        self.is_whole = self.may_stay_whole and self.out_features % topology.tp.size > 0
        super().distribute(topology)

    @override
    def forward(self, x: Tensor) -> Tensor:
        if part_of(x) is not None:
            of_rows: Tensor = on_rows(self.forward, x)
            return of_rows
        return super().forward(x)

    @override
    def own_output(self, x: Tensor) -> Tensor:
        topology = self.topology
        if topology is None or topology.tp.size == 1 or self.is_whole:
            return linear(whole(x), self.matrix, self.bias, self.wgrad_queue, self.gemm)
        return self.own_features(entered(x, topology.tp))

    @override
    def own_features(self, x: Tensor) -> Tensor:
        weight, bias = self.local_parameters()
        return linear_of_gathered(x, weight, bias, self.wgrad_queue, self.gemm)


class AdoptedRow(RowParallelLinear):
    """Class in front of an ``nn.Linear`` whose input features are split over tp.

    A plain input is of the whole sequence, under sequence parallelism too. The output is then a
    `SplitTensor`, divided along the sequence, where tp divides its length.

    Attributes:
        of_heads: whether it takes this rank's heads as a plain tensor, and no whole one.
    """

    of_heads: bool = False

    @override
    def forward(self, x: Tensor) -> Tensor:
        topology = self.topology
        if topology is None or topology.tp.size == 1:
            return linear(x, self.matrix, self.bias, self.wgrad_queue, self.gemm)
        split, tp = split_of(x), topology.tp
        if self.of_heads and split is None:
            self._check_heads(x.shape[-1], tp.size)
        if split is not None and split.dim == x.dim() - 1:
            x = own_part(x)
        else:
            x = whole(x)
            if x.shape[-1] == self.in_features:
                x = split_to(x, tp, -1)
        scatters = (
            topology.sequence_parallel
            and x.dim() > SEQUENCE_DIM + 1
            and divides(tp.size, x.shape[SEQUENCE_DIM])
        )
        y = row_parallel(x, topology, self, sequence=scatters)
        return marked(y, SplitTensor, topology, SEQUENCE_DIM) if scatters else y

    def _check_heads(self, features: int, tp: int) -> None:
        if features * tp == self.in_features:
            return
        raise ConfigError(
            f"tp={tp}: an output projection ({self.in_features} features) of attention got "
            f"{features} features on a rank, where its heads have {self.in_features // tp}: "
            "code of the attention has made others of them; nearest valid: tp=1, or styles "
            "'colwise_gather_output' for its projections and 'rowwise_split_input' for this one"
        )


class AdoptedLatent(ParallelLayer, nn.Linear):
    """Class in front of the whole ``nn.Linear`` that makes the latent of keys and values.

    The latent goes to a column-parallel projection, which sums its gradient. The positional
    features, the last ones, go to every rank's heads as they are, so that their gradient is summed
    here (DeepSeek-V2, arXiv 2405.04434, section 2.1).
    """

    positional: int

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        bound = self.in_features**-0.5
        nn.init.uniform_(full, -bound, bound, generator=generator)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(whole(x), self.weight, self.bias)
        topology = self.topology
        if topology is None or topology.tp.size == 1:
            return y
        latent, positions = y.tensor_split([self.out_features - self.positional], -1)
        return torch.cat((latent, copy_to(positions, topology.tp)), -1)


class SplitLookup(nn.Embedding):
    """Class behind that of an embedding: the lookup in which its forward ends.

    A class of its own may do more, as Gemma's, which scales what it finds.
    """

    topology: Topology | None
    is_whole: bool

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        topology = self.topology
        if topology is None or topology.tp.size == 1 or self.is_whole:
            return super().forward(tokens)
        rows, first = self.weight.shape[0], self.weight.shape[0] * topology.tp.rank
        local = tokens - first
        foreign = (local < 0) | (local >= rows)
        of_others = foreign & (tokens >= 0) & (tokens < self.num_embeddings)
        padding = self.padding_idx
        own_padding = None
        if padding is not None and first <= padding < first + rows:
            own_padding = padding - first
        x = F.embedding(local.masked_fill(of_others, 0), self.weight, own_padding)
        return reduce_from(x.masked_fill(foreign.unsqueeze(-1), 0), topology.tp)


class AdoptedEmbedding(ParallelLayer, nn.Embedding):
    """Class in front of an ``nn.Embedding`` whose rows are split over tp.

    Its output is whole on every rank, under sequence parallelism too.

    Attributes:
        is_whole: whether every rank holds all rows, as tp does not divide their number.
    """

    behind = SplitLookup
    is_whole: bool = False

    @override
    def shard_dims(self) -> dict[str, int]:
        return {} if self.is_whole else {"weight": 0}

    @override
    def distribute(self, topology: Topology) -> None:
        self.is_whole = self.num_embeddings % topology.tp.size > 0
        super().distribute(topology)

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        nn.init.normal_(full, generator=generator)
        if self.padding_idx is not None:
            full[self.padding_idx].zero_()


class Summed(ParallelLayer):
    """Class in front of a module of which each tp rank sees a part of what it is applied to.

    Its parameters are whole on every rank, and their gradients are parts of a sum.
    """

    sequence_only: bool = False
    """Whether it sees a part under sequence parallelism only."""

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        if self.sequence_only and not topology.sequence_parallel:
            return frozenset()
        return frozenset(name for name, _ in self.named_parameters(recurse=False))


def as_column(
    module: nn.Linear,
    *,
    units: int | None = None,
    gather: bool = False,
    may_stay_whole: bool = False,
) -> None:
    """Make a linear layer column-parallel, in place.

    Args:
        module: the layer.
        units: number of indivisible blocks of output features (heads): the output is then this
            rank's part as a plain tensor.
        gather: whether every rank returns all features.
        may_stay_whole: whether it is held whole where tp does not divide its features.
    """
    column = become(module, AdoptedColumn)
    column.tensor_shards = {}
    column.init_std = None
    column.gather_output = gather
    column.units = units
    column._shared_unit = None
    column.may_stay_whole = may_stay_whole
    column.is_whole = False


def as_latent(module: nn.Linear, positional: int) -> None:
    """Sum the gradients of the last ``positional`` features of a linear layer, in place."""
    latent = become(module, AdoptedLatent)
    latent.tensor_shards = {}
    latent.positional = positional


def as_row(module: nn.Linear, *, input_is_parallel: bool = True, of_heads: bool = False) -> None:
    """Make a linear layer row-parallel, in place.

    Args:
        module: the layer.
        input_is_parallel: whether a plain input is this rank's features.
        of_heads: whether every input is this rank's heads, as a plain tensor.
    """
    row = become(module, AdoptedRow)
    row.tensor_shards = {}
    row.init_std = None
    row.input_is_parallel = input_is_parallel
    row.of_heads = of_heads


def as_embedding(module: nn.Embedding) -> None:
    """Make an embedding vocabulary-parallel, in place."""
    embedding = become(module, AdoptedEmbedding)
    embedding.tensor_shards = {}
    embedding.is_whole = False


def as_summed(module: nn.Module, *, sequence_only: bool = False) -> None:
    """Sum the gradients of the parameters of a module over tp."""
    summed = become(module, Summed)
    summed.tensor_shards = {}
    summed.sequence_only = sequence_only
