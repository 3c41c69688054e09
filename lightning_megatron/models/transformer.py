"""A decoder-only transformer assembled from the parallel layers.

Everything is one `PipelineSequential`: embedding, blocks, norm, head. Pre-norm residual blocks, as
GPT-2, Llama and Qwen have them (`TransformerConfig` chooses). Alone it is an ordinary module; under
``MegatronStrategy`` the same object is split over tp, pp and dp.

Parameter names are ``trunk.embedding.tokens.weight``, ``trunk.layers.<i>.attention.wq.weight`` and
so on in every layout.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.layers.alibi import Alibi
from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.kv_cache import KeyValueCache
from lightning_megatron.layers.latent_attention import LatentAttention
from lightning_megatron.layers.latent_sizes import LatentSizes
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.packed_documents import restarted_positions
from lightning_megatron.layers.rotary import RopeScaling, Rotary, yarn_mscale
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.layers.size_checks import vocabulary_problems
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.yarn_config import YarnConfig
from lightning_megatron.topology.degrees import Degrees


class InputEmbedding(nn.Module):
    """Embedding of tokens ``[b, s]`` into the residual stream ``[b, s, h]``.

    Args:
        config: sizes of the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        h, std = config.hidden_size, config.init_std
        self.tokens = VocabParallelEmbedding(
            config.vocab_size, h, num_tokens=config.num_tokens, init_std=std
        )
        self.positions: PositionEmbedding | None = None
        if config.positions == "learned":
            self.positions = PositionEmbedding(config.max_seq_len, h, init_std=std)
        self.dropout = Dropout(config.dropout)

    def problems(self, degrees: Degrees) -> list[str]:
        """Reasons why the embedding cannot be split over ``degrees``."""
        return vocabulary_problems(self.tokens.num_embeddings, degrees)

    @override
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Embed tokens; ``positions`` and ``documents`` count where positions are learned."""
        x = self.tokens(tokens)
        if self.positions is not None:
            if positions is None and documents is not None:
                positions = restarted_positions(documents)
            x = x + self.positions(tokens, positions)
        out: Tensor = self.dropout(x)
        return out


class TransformerBlock(nn.Module):
    """Attention and MLP, or mixture of experts, each added to the residual stream from its norm.

    Args:
        config: sizes of the model.
        rotary: rotary embedding shared by the blocks, or ALiBi; None for learned positions.
        index: index of the block, by which ``config.experts`` tells whether it is a mixture.
    """

    mlp: MLP | MixtureOfExperts

    def __init__(
        self, config: TransformerConfig, rotary: Rotary | Alibi | None, index: int = 0
    ) -> None:
        super().__init__()
        std = config.init_std
        out_std = std / math.sqrt(2 * config.num_layers)
        self.attention_norm = _norm(config)
        self.attention = _attention(config, rotary, std, out_std)
        self.attention.backend = config.attention_backend
        self.mlp_norm = _norm(config)
        if config.is_mixture(index):
            self.mlp = _mixture(config, std, out_std)
        else:
            self.mlp = MLP(
                config.hidden_size,
                config.mlp_width,
                config.activation,
                bias=config.has_mlp_bias,
                init_std=std,
                out_init_std=out_std,
            )
        self.dropout = Dropout(config.dropout)

    @override
    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        documents: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> Tensor:
        """``[b, s, h]`` to the same.

        See `CausalSelfAttention` for the arguments, and `MixtureOfExperts` for ``token_mask``,
        which says nothing to an MLP.
        """
        y = self.attention(self.attention_norm(x), positions, mask, cache, documents)
        x = x + self.dropout(y)
        h = self.mlp_norm(x)
        y = self.mlp(h) if isinstance(self.mlp, MLP) else self.mlp(h, token_mask)
        out: Tensor = x + self.dropout(y)
        return out


def _attention(
    config: TransformerConfig, rotary: Rotary | Alibi | None, std: float, out_std: float
) -> CausalSelfAttention | LatentAttention:
    if config.latent is not None:
        assert isinstance(rotary, Rotary)
        return LatentAttention(
            config.hidden_size,
            config.num_heads,
            config.latent,
            rotary=rotary,
            window=config.sliding_window,
            score_scale=_score_scale(config, config.latent),
            dropout=config.attention_dropout,
            init_std=std,
            out_init_std=out_std,
        )
    return CausalSelfAttention(
        config.hidden_size,
        config.num_heads,
        config.kv_heads,
        head_dim=config.head_size,
        qkv_bias=config.qkv_bias,
        out_bias=config.has_out_bias,
        rotary=rotary,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
        window=config.sliding_window,
        dropout=config.attention_dropout,
        init_std=std,
        out_init_std=out_std,
    )


def _mixture(config: TransformerConfig, std: float, out_std: float) -> MixtureOfExperts:
    assert config.experts is not None
    return MixtureOfExperts(
        config.hidden_size,
        config.expert_width,
        config.experts.num_experts,
        config.experts.top_k,
        config.activation,
        shared_size=config.experts.shared_size,
        shared_gate=config.experts.shared_gate,
        router=config.experts.router,
        init_std=std,
        out_init_std=out_std,
    )


class Head(ColumnParallelLinear):
    """Output projection: ``[b, s, h]`` to logits ``[b, s, vocab_size]``, split over tp.

    Where the last columns stand for no token (``vocab_padding``), their logits are the smallest
    number there is, so that they have no probability and no gradient in any loss that is a function
    of the softmax.

    Args:
        config: sizes of the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, config.vocab_size, False, init_std=config.init_std)
        self.num_tokens = config.num_tokens

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        return vocabulary_problems(self.out_features, degrees)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Project."""
        logits = self.own_output(x)
        width = logits.shape[-1]
        first = 0 if self.topology is None else width * self.topology.tp.rank
        if first + width > self.num_tokens:
            column = torch.arange(first, first + width, device=logits.device)
            logits = logits.masked_fill(column >= self.num_tokens, torch.finfo(logits.dtype).min)
        return self.marked_output(logits)


class Transformer(nn.Module):
    """Language model: tokens ``[b, s]`` to logits ``[b, s, vocab_size]``, split over tp.

    Args:
        config: sizes of the model.

    Example:
        >>> import torch
        >>> model = Transformer(TransformerConfig.preset("tiny", num_layers=1))
        >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 256])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.trunk = build_trunk(config)

    @override
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits of the next token at every position.

        Args:
            tokens: ``[b, s]``.
            positions: ``[s]`` or ``[b, s]``; ``0 .. s - 1`` when None, and from 0 in each document
                where there are some.
            mask: mask in place of the causal one; see `CausalSelfAttention`.
            documents: number of the document of each position, ``[b, s]``; none sees another
                (`layers.packed_documents`).
            token_mask: which tokens count, ``[b, s]`` booleans; others go to no expert and into no
                count of one. All if None.
        """
        given = {
            "positions": positions,
            "mask": mask,
            "documents": documents,
            "token_mask": token_mask,
        }
        kwargs = {name: value for name, value in given.items() if value is not None}
        logits: Tensor = self.trunk(tokens, **kwargs)
        return logits


def build_trunk(
    config: TransformerConfig, make_head: Callable[[], ColumnParallelLinear] | None = None
) -> PipelineSequential:
    """Build the items of `Transformer`, which a pipeline divides into stages.

    Args:
        config: sizes of the model.
        make_head: function that makes another output projection, with the same parameters.
    """
    rotary = _rotary(config)
    embedding = InputEmbedding(config)
    head = Head(config) if make_head is None else make_head()
    if config.tied_embeddings:
        head.weight = embedding.tokens.weight
    return PipelineSequential(
        embedding=embedding,
        layers=[TransformerBlock(config, rotary, i) for i in range(config.num_layers)],
        norm=_norm(config),
        head=head,
    )


def _rotary(config: TransformerConfig) -> Rotary | Alibi | None:
    if config.positions != "rotary":
        return Alibi() if config.positions == "alibi" else None
    turned = config.head_size if config.latent is None else config.latent.rope_dim
    if config.rope_scaling == "none":
        return Rotary(turned, config.rope_base)
    yarn = config.yarn or YarnConfig()
    scaling = RopeScaling(
        kind=config.rope_scaling,
        factor=config.rope_factor,
        low_freq_factor=config.rope_low_freq_factor,
        high_freq_factor=config.rope_high_freq_factor,
        original_length=config.rope_original_length,
        beta_fast=yarn.beta_fast,
        beta_slow=yarn.beta_slow,
        truncate=yarn.truncate,
        attention_factor=_yarn_amplitude(config.rope_factor, yarn),
    )
    return Rotary(turned, config.rope_base, scaling)


def _yarn_amplitude(factor: float, yarn: YarnConfig) -> float | None:
    """Factor of rotated queries and keys; None for that of the paper."""
    if yarn.attention_factor is not None or not (yarn.mscale and yarn.mscale_all_dim):
        return yarn.attention_factor
    return yarn_mscale(factor, yarn.mscale) / yarn_mscale(factor, yarn.mscale_all_dim)


def _score_scale(config: TransformerConfig, sizes: LatentSizes) -> float:
    """Factor of the scores of latent attention."""
    scale = 1 / math.sqrt(sizes.key_dim)
    if config.yarn is None or not config.yarn.mscale_all_dim:
        return scale
    return scale * yarn_mscale(config.rope_factor, config.yarn.mscale_all_dim) ** 2


def _norm(config: TransformerConfig) -> ParallelLayer:
    if config.norm == "layernorm":
        return LayerNorm(config.hidden_size, config.norm_eps, bias=config.bias)
    return RMSNorm(config.hidden_size, config.norm_eps)
