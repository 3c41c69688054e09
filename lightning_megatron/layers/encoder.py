"""Blocks of encoders and of decoders that read an encoder.

An `EncoderBlock` is attention to all positions and an MLP, a `DecoderBlock` causal attention,
attention to a memory and an MLP, each added to the residual stream from a norm of it (pre-norm;
Vaswani et al., arXiv 1706.03762; Xiong et al., arXiv 2002.04745). As the items of a
`PipelineSequential` get one argument, an encoder-decoder passes a tuple of both residual streams
from item to item.

Legend: b batch, s sequence, t positions of the memory, h hidden size.
"""

from typing import Literal

from torch import Tensor, nn
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.alibi import Alibi
from lightning_megatron.layers.attention import CausalSelfAttention, SelfAttention
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.cross_attention import CrossAttention
from lightning_megatron.layers.dropout import Dropout
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.layers.size_checks import Activation

NormName = Literal["layernorm", "rmsnorm"]
"""Kinds of normalisation."""


class _Block(nn.Module):
    """Base of both blocks: self-attention, and an MLP.

    Args:
        hidden_size: size of the residual stream.
        num_heads: number of attention heads.
        mlp_size: hidden size of the MLP; four times ``hidden_size`` when None.
        activation: activation of the MLP.
        norm: kind of the norms.
        bias: whether projections and layer norms have a bias.
        rotary: rotary embedding of queries and keys, or `Alibi`; None for absolute positions.
        window: number of positions that each one sees; all when None.
        dropout: dropout on the output of each part of the block.
        attention_dropout: dropout on the attention weights.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
        mlp: module in place of the MLP, such as `MixtureOfExperts`.
    """

    _attention: type[SelfAttention]

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_size: int | None = None,
        *,
        activation: Activation = "gelu",
        norm: NormName = "layernorm",
        bias: bool = True,
        rotary: Rotary | Alibi | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        init_std: float | None = None,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self._norm, self._bias = norm, bias
        self.attention_norm = self._make_norm(hidden_size)
        self.attention = self._attention(
            hidden_size,
            num_heads,
            qkv_bias=bias,
            out_bias=bias,
            rotary=rotary,
            window=window,
            dropout=attention_dropout,
            init_std=init_std,
        )
        self.mlp_norm = self._make_norm(hidden_size)
        if mlp is None:
            width = 4 * hidden_size if mlp_size is None else mlp_size
            mlp = MLP(hidden_size, width, activation, bias=bias, init_std=init_std)
        elif mlp_size is not None:
            raise ConfigError(
                f"mlp_size={mlp_size}, mlp={type(mlp).__name__}: the module has its own size; "
                "nearest valid: mlp_size=None"
            )
        self.mlp = mlp
        self.dropout = Dropout(dropout)

    def _make_norm(self, hidden_size: int) -> ParallelLayer:
        if self._norm == "layernorm":
            return LayerNorm(hidden_size, bias=self._bias)
        if self._norm == "rmsnorm":
            return RMSNorm(hidden_size)
        raise ConfigError(
            f"norm={self._norm!r}: must be layernorm or rmsnorm; nearest valid: norm='layernorm'"
        )


class EncoderBlock(_Block):
    """Attention of every position to all others, and an MLP.

    Input and output ``[b, s, hidden_size]``, equal on all tp ranks; under sequence parallelism
    ``[b, s / tp, hidden_size]``.

    Args:
        hidden_size: size of the residual stream.
        num_heads: number of attention heads.
        mlp_size: hidden size of the MLP; four times ``hidden_size`` when None.
        activation: activation of the MLP.
        norm: kind of the norms.
        bias: whether projections and layer norms have a bias.
        rotary: rotary embedding of queries and keys, or `Alibi`; None for absolute positions.
        window: number of positions that each one sees on both sides, itself included; all when
            None.
        dropout: dropout on the output of each half of the block.
        attention_dropout: dropout on the attention weights.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
        mlp: module in place of the MLP, such as `MixtureOfExperts`.

    Raises:
        ConfigError: sizes do not fit each other, or a name is unknown.

    Example:
        >>> import torch
        >>> EncoderBlock(16, num_heads=4)(torch.ones(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    _attention = SelfAttention

    @override
    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
        length: int | None = None,
    ) -> Tensor:
        """``[b, s, h]`` to the same; see `SelfAttention` for the arguments."""
        y = self.attention(
            self.attention_norm(x), positions, mask, documents=documents, length=length
        )
        x = x + self.dropout(y)
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out


class DecoderBlock(_Block):
    """Causal attention, attention to a memory, and an MLP.

    Input and output ``[b, s, hidden_size]``, memory ``[b, t, memory_size]``, equal on all tp ranks;
    under sequence parallelism ``s / tp`` and ``t / tp``.

    Args:
        hidden_size: size of the residual stream.
        num_heads: number of attention heads.
        mlp_size: hidden size of the MLP; four times ``hidden_size`` when None.
        memory_size: size of the memory; ``hidden_size`` when None.
        activation: activation of the MLP.
        norm: kind of the norms.
        bias: whether projections and layer norms have a bias.
        rotary: rotary embedding of queries and keys of the causal attention, or `Alibi`; None for
            absolute positions.
        dropout: dropout on the output of each part of the block.
        attention_dropout: dropout on the attention weights.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
        mlp: module in place of the MLP, such as `MixtureOfExperts`.

    Raises:
        ConfigError: sizes do not fit each other, or a name is unknown.

    Example:
        >>> import torch
        >>> DecoderBlock(16, num_heads=4)(torch.ones(2, 5, 16), torch.ones(2, 9, 16)).shape
        torch.Size([2, 5, 16])
    """

    _attention = CausalSelfAttention

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mlp_size: int | None = None,
        *,
        memory_size: int | None = None,
        activation: Activation = "gelu",
        norm: NormName = "layernorm",
        bias: bool = True,
        rotary: Rotary | Alibi | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        init_std: float | None = None,
        mlp: nn.Module | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            mlp_size,
            activation=activation,
            norm=norm,
            bias=bias,
            rotary=rotary,
            dropout=dropout,
            attention_dropout=attention_dropout,
            init_std=init_std,
            mlp=mlp,
        )
        self.cross_norm = self._make_norm(hidden_size)
        self.cross_attention = CrossAttention(
            hidden_size,
            num_heads,
            memory_size=memory_size,
            qkv_bias=bias,
            out_bias=bias,
            dropout=attention_dropout,
            init_std=init_std,
        )

    @override
    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        memory_length: int | None = None,
    ) -> Tensor:
        """``[b, s, h]`` to the same; see `SelfAttention` and `CrossAttention` for the arguments."""
        x = x + self.dropout(self.attention(self.attention_norm(x), positions, mask))
        y = self.cross_attention(
            self.cross_norm(x), memory, memory_mask, memory_lengths, memory_length
        )
        x = x + self.dropout(y)
        out: Tensor = x + self.dropout(self.mlp(self.mlp_norm(x)))
        return out
