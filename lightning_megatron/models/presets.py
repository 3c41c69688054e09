"""Sizes of known models, as fields of `TransformerConfig`."""

from collections.abc import Mapping
from typing import Any

from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.latent_sizes import LatentSizes
from lightning_megatron.models.mixture_config import MixtureConfig

_QWEN3: Mapping[str, Any] = {
    "vocab_size": 151_936,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_seq_len": 40_960,
    "norm_eps": 1e-6,
    "rope_base": 1_000_000.0,
    "qk_norm": True,
}

_LLAMA3: Mapping[str, Any] = {
    "vocab_size": 128_256,
    "num_kv_heads": 8,
    "max_seq_len": 8192,
    "rope_base": 500_000.0,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Bytes in, bytes out; trains to readable text within minutes on two cores.
    "tiny": {"num_kv_heads": 4, "mlp_size": 512, "max_seq_len": 512},
    # Radford et al. 2019. tp > 1 needs a padded vocabulary: vocab_size=50304.
    "gpt2-124m": {
        "vocab_size": 50_257,
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "max_seq_len": 1024,
        "activation": "gelu_tanh",
        "norm": "layernorm",
        "positions": "learned",
        "qkv_bias": True,
        "bias": True,
        "tied_embeddings": True,
    },
    # arXiv 2407.21783, table 3.
    "llama3-8b": {
        **_LLAMA3,
        "hidden_size": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "mlp_size": 14_336,
    },
    "llama3-70b": {
        **_LLAMA3,
        "hidden_size": 8192,
        "num_layers": 80,
        "num_heads": 64,
        "mlp_size": 28_672,
    },
    # arXiv 2412.15115.
    "qwen2.5-7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "num_layers": 28,
        "num_heads": 28,
        "num_kv_heads": 4,
        "mlp_size": 18_944,
        "max_seq_len": 32_768,
        "norm_eps": 1e-6,
        "rope_base": 1_000_000.0,
        "qkv_bias": True,
    },
    # arXiv 2505.09388.
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "num_layers": 28,
        "num_heads": 16,
        "mlp_size": 3072,
        "tied_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "num_layers": 36,
        "num_heads": 32,
        "mlp_size": 12_288,
    },
    # arXiv 2310.06825; since v0.2 without the sliding window of 4096.
    "mistral-7b": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "mlp_size": 14_336,
        "max_seq_len": 32_768,
        "rope_base": 1_000_000.0,
    },
    # arXiv 2401.04088.
    "mixtral-8x7b": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "mlp_size": 14_336,
        "max_seq_len": 32_768,
        "rope_base": 1_000_000.0,
        "experts": MixtureConfig(num_experts=8, router=RouterConfig(balance_weight=0.02)),
    },
    # arXiv 2505.09388: balance over the microbatch.
    "qwen3-30b-a3b": {
        **_QWEN3,
        "hidden_size": 2048,
        "num_layers": 48,
        "num_heads": 32,
        "num_kv_heads": 4,
        "mlp_size": 6144,
        "experts": MixtureConfig(
            num_experts=128,
            top_k=8,
            mlp_size=768,
            router=RouterConfig(balance="batch", balance_weight=0.001),
        ),
    },
    # arXiv 2412.19437, without the modules that predict a second token.
    "deepseek-v3": {
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "num_layers": 61,
        "num_heads": 128,
        "mlp_size": 18_432,
        "max_seq_len": 4096,
        "norm_eps": 1e-6,
        "init_std": 0.006,
        "latent": LatentSizes(q_rank=1536, kv_rank=512, rope_dim=64, nope_dim=128, value_dim=128),
        "experts": MixtureConfig(
            num_experts=256,
            top_k=8,
            mlp_size=2048,
            shared_size=2048,
            first_dense=3,
            router=RouterConfig(
                score="sigmoid",
                groups=8,
                top_groups=4,
                scale=2.5,
                bias_update=0.001,
                balance_weight=0.0001,
            ),
        ),
    },
}
