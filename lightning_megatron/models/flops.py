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
    """The projections of one block's attention, and its norms."""
    mlp: int
    """The MLP of one block that has one."""
    block_norms: int
    """The two norms of one block."""
    final_norm: int
    """The norm after the last block."""
    head: int
    """The output projection; 0 when it is tied to the embedding."""
    num_layers: int
    """Number of blocks."""
    mixture: int = 0
    """The mixture of experts of one block that has one: router, all experts, shared MLP."""
    active_mixture: int = 0
    """Number of them that one token uses."""
    num_mixtures: int = 0
    """Number of blocks with a mixture in place of the MLP."""

    @property
    def block(self) -> int:
        """Parameters of one block with an MLP."""
        return self.attention + self.mlp + self.block_norms

    @property
    def total(self) -> int:
        """Parameters of the model; a tied table counts once."""
        return self._with(self.mixture)

    @property
    def active(self) -> int:
        """Parameters of the model that one token uses."""
        return self._with(self.active_mixture)

    def _with(self, mixture: int) -> int:
        dense = self.embedding + self.num_layers * self.block + self.final_norm + self.head
        return dense + self.num_mixtures * (mixture - self.mlp)


def count_parameters(config: TransformerConfig) -> ParameterCount:
    """Count the parameters of ``Transformer(config)``."""
    h = config.hidden_size
    norm = 2 * h if config.norm == "layernorm" and config.bias else h
    positions = config.max_seq_len * h if config.positions == "learned" else 0
    width, projections = config.mlp_width, 2 if config.activation in GATED else 1
    experts = config.experts
    return ParameterCount(
        embedding=config.vocab_size * h + positions,
        attention=_attention_matrices(config) + _attention_vectors(config),
        mlp=(projections + 1) * h * width + config.has_mlp_bias * (projections * width + h),
        block_norms=2 * norm,
        final_norm=norm,
        head=0 if config.tied_embeddings else config.vocab_size * h,
        num_layers=config.num_layers,
        mixture=0 if experts is None else _mixture_matrices(config, experts.num_experts),
        active_mixture=0 if experts is None else _mixture_matrices(config, experts.top_k),
        num_mixtures=config.num_mixtures,
    )


def _attention_matrices(config: TransformerConfig) -> int:
    """Parameters of the projections of one block, without biases."""
    h, sizes = config.hidden_size, config.latent
    if sizes is None:
        return 2 * h * (config.num_heads + config.kv_heads) * config.head_size
    queries = config.num_heads * sizes.key_dim
    made_from = h if sizes.q_rank is None else sizes.q_rank
    return (
        (0 if sizes.q_rank is None else h * sizes.q_rank)
        + made_from * queries
        + h * sizes.cached
        + sizes.kv_rank * config.num_heads * (sizes.nope_dim + sizes.value_dim)
        + config.num_heads * sizes.value_dim * h
    )


def _attention_vectors(config: TransformerConfig) -> int:
    """Biases and norms of the attention of one block."""
    if config.latent is not None:
        return (config.latent.q_rank or 0) + config.latent.kv_rank
    q, kv = config.num_heads * config.head_size, config.kv_heads * config.head_size
    return (
        config.qkv_bias * (q + 2 * kv)
        + config.has_out_bias * config.hidden_size
        + config.qk_norm * 2 * config.head_size
    )


def _mixture_matrices(config: TransformerConfig, used: int) -> int:
    """Parameters of one mixture with ``used`` of its experts."""
    assert config.experts is not None
    h, projections = config.hidden_size, 3 if config.activation in GATED else 2
    width = used * config.expert_width + config.experts.shared_size
    return h * (config.experts.num_experts + config.experts.shared_gate + projections * width)


def block_forward_flops(
    config: TransformerConfig, seq_len: int, *, causal: CausalCount = "full", block: int = 0
) -> int:
    """Operations of one block's forward pass over one sequence of ``seq_len`` tokens.

    Args:
        config: sizes of the model.
        seq_len: length of the sequence.
        causal: whether masked attention scores count.
        block: index of the block. In a mixture the products of the experts that a token uses count.
    """
    s = seq_len
    if config.experts is not None and config.is_mixture(block):
        mlp = _mixture_matrices(config, config.experts.top_k)
    else:
        projections = 3 if config.activation in GATED else 2
        mlp = projections * config.hidden_size * config.mlp_width
    products = 2 * s * (_attention_matrices(config) + mlp)
    values = config.head_size if config.latent is None else config.latent.value_dim
    scores_and_values = 2 * s * s * config.num_heads * (config.head_size + values)
    return products + (scores_and_values // 2 if causal == "half" else scores_and_values)


def head_forward_flops(config: TransformerConfig, seq_len: int) -> int:
    """Operations of the output projection's forward pass over one sequence."""
    return 2 * seq_len * config.hidden_size * config.vocab_size


def forward_flops(config: TransformerConfig, seq_len: int, *, causal: CausalCount = "full") -> int:
    """Operations of the model's forward pass over one sequence of ``seq_len`` tokens."""
    blocks = sum(
        block_forward_flops(config, seq_len, causal=causal, block=block)
        for block in range(config.num_layers)
    )
    return blocks + head_forward_flops(config, seq_len)


def training_flops_per_token(
    config: TransformerConfig, seq_len: int, *, causal: CausalCount = "full"
) -> float:
    """Operations of forward and backward, per token of sequences of ``seq_len`` tokens."""
    return 3 * forward_flops(config, seq_len, causal=causal) / seq_len
