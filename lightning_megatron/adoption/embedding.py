"""Embeddings of other libraries, split over tp by rows or by columns, in place.

Split by rows, a table gives each rank a part of the vocabulary, and the ranks add up what they
find: the output is whole on every rank, under sequence parallelism too. Where tp does not divide
the rows, every rank holds all. Split by columns, the output is this rank's columns: those of its
heads, for a table of biases with a column for each.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.adoption.sharding import Sharded, Sharding, as_sharded
from lightning_megatron.comm.functional import reduce_from


class SplitLookup(nn.Embedding):
    """Class behind that of an embedding: the lookup in which its forward ends.

    A class of its own may do more, as Gemma's, which scales what it finds.
    """

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        assert isinstance(self, AdoptedEmbedding)
        topology = self.topology
        if topology is None or topology.tp.size == 1 or self.held == "whole" or not self.by_rows:
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


class AdoptedEmbedding(Sharded, nn.Embedding):
    """Class in front of an ``nn.Embedding`` that is split over tp."""

    behind = SplitLookup

    @property
    def by_rows(self) -> bool:
        """Whether its rows are split, and not its columns."""
        return self.sharding.dims["weight"] == 0

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        nn.init.normal_(full, generator=generator)
        if self.padding_idx is not None:
            full[self.padding_idx].zero_()


def looks_up_plainly(module: nn.Embedding) -> bool:
    """Whether a lookup neither changes rows nor needs the number of their uses for gradients."""
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def as_embedding(module: nn.Embedding, *, by_rows: bool) -> None:
    """Split the rows, or columns, of an embedding, in place."""
    rows = Sharding(dims={"weight": 0}, undivided="whole")
    columns = Sharding(dims={"weight": 1}, size="embedding_dim")
    as_sharded(module, rows if by_rows else columns, AdoptedEmbedding)
