"""A decoder-only transformer assembled from the parallel layers.

Everything is one `PipelineSequential`: embedding, blocks, norm, head. Pre-norm residual blocks, as
GPT-2, Llama and Qwen have them (`TransformerConfig` chooses). Alone it is an ordinary module; under
``MegatronStrategy`` the same object is split over tp, pp and dp.

Parameter names are ``trunk.embedding.tokens.weight``, ``trunk.layers.<i>.attention.wq.weight`` and
so on in every layout.
"""

import math

from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.layers.attention import CausalSelfAttention
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.pipeline.sequential import PipelineSequential


class InputEmbedding(nn.Module):
    """Tokens to the residual stream: ``[b, s]`` to ``[b, s, h]``.

    Args:
        config: sizes of the model.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        h, std = config.hidden_size, config.init_std
        self.tokens = VocabParallelEmbedding(config.vocab_size, h, init_std=std)
        self.positions: PositionEmbedding | None = None
        if config.positions == "learned":
            self.positions = PositionEmbedding(config.max_seq_len, h, init_std=std)
        self.dropout = Dropout(config.dropout)

    @override
    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed; ``positions`` matter where they are learned."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(tokens, positions)
        out: Tensor = self.dropout(x)
        return out


class TransformerBlock(nn.Module):
    """Attention and MLP, each added to the residual stream from a norm of it.

    Args:
        config: sizes of the model.
        rotary: rotary embedding shared by the blocks; None for learned positions.
    """

    def __init__(self, config: TransformerConfig, rotary: Rotary | None) -> None:
        super().__init__()
        std = config.init_std
        out_std = std / math.sqrt(2 * config.num_layers)
        self.attention_norm = _norm(config)
        self.attention = CausalSelfAttention(
            config.hidden_size,
            config.num_heads,
            config.kv_heads,
            head_dim=config.head_size,
            qkv_bias=config.qkv_bias,
            out_bias=config.bias,
            rotary=rotary,
            dropout=config.attention_dropout,
            init_std=std,
            out_init_std=out_std,
        )
        self.mlp_norm = _norm(config)
        self.mlp = MLP(
            config.hidden_size,
            config.mlp_width,
            config.activation,
            bias=config.bias,
            init_std=std,
            out_init_std=out_std,
        )
        self.dropout = Dropout(config.dropout)

    @override
    def forward(
        self, x: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """``[b, s, h]`` to the same; see `CausalSelfAttention` for the arguments."""
        x = x + self.dropout(self.attention(self.attention_norm(x), positions, mask))
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class Transformer(nn.Module):
    """A language model: tokens ``[b, s]`` to logits ``[b, s, vocab_size / tp]``.

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
        self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Logits of the next token at every position.

        Args:
            tokens: ``[b, s]``.
            positions: ``[s]`` or ``[b, s]``; ``0 .. s - 1`` when None.
            mask: in place of the causal mask; see `CausalSelfAttention`.
        """
        given = {"positions": positions, "mask": mask}
        kwargs = {name: value for name, value in given.items() if value is not None}
        logits: Tensor = self.trunk(tokens, **kwargs)
        return logits


def build_trunk(config: TransformerConfig) -> PipelineSequential:
    """The items of `Transformer`, ready to be cut into pipeline stages."""
    rotary = Rotary(config.head_size, config.rope_base) if config.positions == "rotary" else None
    embedding = InputEmbedding(config)
    head = ColumnParallelLinear(
        config.hidden_size, config.vocab_size, bias=False, init_std=config.init_std
    )
    if config.tied_embeddings:
        head.weight = embedding.tokens.weight
    return PipelineSequential(
        embedding=embedding,
        layers=[TransformerBlock(config, rotary) for _ in range(config.num_layers)],
        norm=_norm(config),
        head=head,
    )


def _norm(config: TransformerConfig) -> ParallelLayer:
    if config.norm == "layernorm":
        return LayerNorm(config.hidden_size, config.norm_eps, bias=config.bias)
    return RMSNorm(config.hidden_size, config.norm_eps)
