"""Embeddings of tokens, split over the vocabulary, and of positions.

Each tp rank holds the rows of a part of the vocabulary. It looks up the tokens that it owns, puts
zeros for the others, and the sum over the ranks is the embedding of every token (Megatron-LM,
arXiv 1909.08053, section 3). Under sequence parallelism that sum is scattered, so the residual
stream starts out as ``[b, s / tp, h]``.

Here a sequence is cut over cp, too: tokens and positions are whole, and the embeddings are those of
this rank's part (`layers.context_split`).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.comm.collectives import own_slice
from lightning_megatron.comm.functional import reduce_from, reduce_scatter
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.linear_functions import SEQUENCE_DIM
from lightning_megatron.topology.degrees import Degrees, divisibility_problem
from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.context_rows import own_positions, split


class VocabParallelEmbedding(ParallelLayer):
    """Table of token embeddings whose rows are split over tp.

    Input: token indices ``[b, s]``, equal on all tp ranks. Output ``[b, s, embedding_dim]``, equal
    on all tp ranks; under sequence parallelism this rank's part ``[b, s / tp, embedding_dim]``.
    Inside of a `PipelineSequential` it cuts the sequence over cp: tokens are whole, and the output
    is this cp rank's part.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: size of each embedding.
        num_tokens: size of the vocabulary without padding at its end; ``num_embeddings`` when None.
        init_std: standard deviation of the initial values; 1 as in ``nn.Embedding``.
        device: device of the table.
        dtype: number format of the table.

    Raises:
        ConfigError: ``num_tokens`` lies outside of the vocabulary.
    """

    splits_context = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        num_tokens: int | None = None,
        init_std: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_tokens is not None and not 0 < num_tokens <= num_embeddings:
            nearest = min(max(1, num_tokens), num_embeddings)
            raise ConfigError(
                f"num_tokens={num_tokens}, num_embeddings={num_embeddings}: must lie in "
                f"[1, num_embeddings]; nearest valid: num_tokens={nearest}"
            )
        self.num_embeddings = num_embeddings
        self.num_tokens = num_embeddings if num_tokens is None else num_tokens
        self.embedding_dim = embedding_dim
        self.init_std = init_std
        table = torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(table)
        self.reset_parameters()

    @override
    def shard_dims(self) -> dict[str, int]:
        return {"weight": 0}

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        problem = divisibility_problem("num_embeddings", self.num_embeddings, "tp", degrees.tp)
        return [problem] if problem else []

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        nn.init.normal_(full, std=self.init_std, generator=generator)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        """Look tokens up.

        Raises:
            ConfigError: the length of the sequence is not divisible by tp, under sequence
                parallelism.
            IndexError: a token lies outside the vocabulary, on CPU. On a GPU it fails an assertion
                on the device, as with ``nn.Embedding``.
        """
        topology, context = self.topology, self.context
        if context is not None:
            tokens = split(tokens, context.split(tokens.shape[1]), context.cp.rank)
        if self.num_tokens < self.num_embeddings:
            tokens = tokens.masked_fill(tokens >= self.num_tokens, self.num_embeddings)
        if topology is None or topology.tp.size == 1:
            return F.embedding(tokens, self.weight)
        rows = self.weight.shape[0]
        local = tokens - rows * topology.tp.rank
        foreign = (local < 0) | (local >= rows)
        # What no rank holds lies outside of every rank's rows, and torch is left to find it there.
        of_others = foreign & (tokens >= 0) & (tokens < self.num_embeddings)
        x = F.embedding(local.masked_fill(of_others, 0), self.weight)
        x = x.masked_fill(foreign.unsqueeze(-1), 0)
        if topology.sequence_parallel:
            return reduce_scatter(x, topology.tp, SEQUENCE_DIM)
        return reduce_from(x, topology.tp)

    @override
    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {super().extra_repr()}"


class PositionEmbedding(ParallelLayer):
    """Learned table of absolute positions, added to the residual stream; whole on every rank.

    Inside of a `PipelineSequential` it returns this cp rank's part, as the embedding of tokens.

    Args:
        max_seq_len: number of positions.
        embedding_dim: size of each embedding.
        init_std: standard deviation of the initial values.
    """

    splits_context = True

    def __init__(self, max_seq_len: int, embedding_dim: int, *, init_std: float = 1.0) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(max_seq_len, embedding_dim))
        self.reset_parameters()

    @override
    def summed_parameters(self, topology: Topology) -> frozenset[str]:
        return frozenset({"weight"} if topology.sequence_parallel else ())

    @override
    def init_parameter(
        self, name: str, full: Tensor, generator: torch.Generator | None = None
    ) -> None:
        nn.init.normal_(full, std=self.init_std, generator=generator)

    @override
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the embeddings to add to those of ``tokens``.

        Args:
            tokens: tokens ``[b, s]``, of which only the length counts.
            positions: positions ``[s]`` or ``[b, s]``; ``0 .. s - 1`` when None.

        Returns:
            ``[s, h]`` or ``[b, s, h]``; under sequence parallelism this rank's part of ``s``.
        """
        context, length = self.context, tokens.shape[-1]
        if context is not None:
            layout, rank = context.split(length), context.cp.rank
            if positions is None:
                positions = own_positions(layout, rank, tokens.device).clamp(max=length - 1)
            else:
                positions = split(positions, layout, rank, -1)
        elif positions is None:
            positions = torch.arange(length, device=tokens.device)
        topology = self.topology
        if topology is not None and topology.tp.size > 1 and topology.sequence_parallel:
            batched = positions if positions.dim() == 2 else positions.unsqueeze(0)
            positions = own_slice(batched, topology.tp, SEQUENCE_DIM).view(
                *positions.shape[:-1], -1
            )
        return F.embedding(positions, self.weight)
