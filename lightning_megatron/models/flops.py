"""Numbers of parameters and floating-point operations of a transformer.

A product of ``[m, k]`` and ``[k, n]`` is ``2 m k n`` operations; its two gradients cost as much
each, so a training step is three forward passes (recomputed activations are not counted: this is
*model* FLOPs, the numerator of MFU). Only matrix products count: norms, activations, softmax and
the lookup of embeddings are left out, as in PaLM (arXiv 2204.02311, appendix B).

Attention over ``s`` tokens makes ``s`` scores per token and head. Under a causal mask half of them
are never used, and good kernels do not compute them. Tables in the literature differ:
``causal="full"`` counts all of them (PaLM, Megatron-LM, nanoGPT), ``causal="half"`` counts
``s^2 / 2`` (FlashAttention). A sliding window makes no difference to either: its
mask is applied to all scores. At ``s = 2048`` and 7 billion parameters the choice changes MFU by
some 3 %, at 32k tokens by a third, so reports must name it.
"""

from dataclasses import dataclass
from typing import Literal

from lightning_megatron.layers.size_checks import GATED
from lightning_megatron.models.config import TransformerConfig

CausalCount = Literal["full", "half"]
"""Whether masked attention scores count."""


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Numbers of parameters of a whole model."""

    embedding: int
    """Tables of tokens and, where learned, positions."""
    attention: int
    """The four projections of one block, and its norms of queries and keys."""
    mlp: int
    """The MLP of one block."""
    block_norms: int
    """The two norms of one block."""
    final_norm: int
    """The norm after the last block."""
    head: int
    """The output projection; 0 when it is tied to the embedding."""
    num_layers: int
    """Number of blocks."""

    @property
    def block(self) -> int:
        """Parameters of one block."""
        return self.attention + self.mlp + self.block_norms

    @property
    def total(self) -> int:
        """Parameters of the model; a tied table counts once."""
        return self.embedding + self.num_layers * self.block + self.final_norm + self.head


def count_parameters(config: TransformerConfig) -> ParameterCount:
    """Count the parameters of ``Transformer(config)``."""
    h = config.hidden_size
    q, kv = config.num_heads * config.head_size, config.kv_heads * config.head_size
    width, projections = config.mlp_width, 2 if config.activation in GATED else 1
    norm = 2 * h if config.norm == "layernorm" and config.bias else h
    positions = config.max_seq_len * h if config.positions == "learned" else 0
    return ParameterCount(
        embedding=config.vocab_size * h + positions,
        attention=2 * h * (q + kv)
        + config.qkv_bias * (q + 2 * kv)
        + config.has_out_bias * h
        + config.qk_norm * 2 * config.head_size,
        mlp=(projections + 1) * h * width + config.has_mlp_bias * (projections * width + h),
        block_norms=2 * norm,
        final_norm=norm,
        head=0 if config.tied_embeddings else config.vocab_size * h,
        num_layers=config.num_layers,
    )


def block_forward_flops(
    config: TransformerConfig, seq_len: int, *, causal: CausalCount = "full"
) -> int:
    """Operations of one block's forward pass over one sequence of ``seq_len`` tokens."""
    h, s = config.hidden_size, seq_len
    q, kv = config.num_heads * config.head_size, config.kv_heads * config.head_size
    projections = 3 if config.activation in GATED else 2
    products = 2 * s * (2 * h * (q + kv) + projections * h * config.mlp_width)
    scores_and_values = 4 * s * s * q
    return products + (scores_and_values // 2 if causal == "half" else scores_and_values)


def head_forward_flops(config: TransformerConfig, seq_len: int) -> int:
    """Operations of the output projection's forward pass over one sequence."""
    return 2 * seq_len * config.hidden_size * config.vocab_size


def forward_flops(config: TransformerConfig, seq_len: int, *, causal: CausalCount = "full") -> int:
    """Operations of the model's forward pass over one sequence of ``seq_len`` tokens."""
    blocks = config.num_layers * block_forward_flops(config, seq_len, causal=causal)
    return blocks + head_forward_flops(config, seq_len)


def training_flops_per_token(
    config: TransformerConfig, seq_len: int, *, causal: CausalCount = "full"
) -> float:
    """Operations of forward and backward, per token of sequences of ``seq_len`` tokens."""
    return 3 * forward_flops(config, seq_len, causal=causal) / seq_len
