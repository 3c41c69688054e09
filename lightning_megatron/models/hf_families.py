"""Families of models of the Hugging Face library that `hf_config` reads and writes.

Each has settings without a choice, and defaults of its class: files on the hub leave out settings
with the default value, so the defaults are part of the format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DENSE = {"experts": None, "latent": None}
_ROTARY = {**_DENSE, "norm": "rmsnorm", "positions": "rotary"}
_MIXTURE = {
    "norm": "rmsnorm",
    "positions": "rotary",
    "has_mlp_bias": False,
    "experts.shared_gate": False,
}
_SOFTMAX = {
    **_MIXTURE,
    "latent": None,
    "experts.shared_size": 0,
    "experts.router.score": "softmax",
    "experts.router.groups": 1,
    "experts.router.scale": 1.0,
    "experts.router.bias_update": 0.0,
}
_GATED: Mapping[str, str] = {"silu": "swiglu", "gelu": "geglu"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Class of models of the library."""

    architecture: str
    """Name of the class there."""
    fixed: Mapping[str, Any]
    """Attributes of `TransformerConfig` with the only value that the family has; ``a.b`` is ``b``
    of ``a``, which must be there."""
    activations: Mapping[str, str]
    """Names of activations there and here; the first of several names is written."""
    defaults: Mapping[str, Any]
    """Values of settings that a file leaves out."""


_DEFAULTS: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        fixed={
            **_DENSE,
            "norm": "layernorm",
            "positions": "learned",
            "bias": True,
            "qkv_bias": True,
            "has_out_bias": True,
            "has_mlp_bias": True,
            "qk_norm": False,
            "sliding_window": None,
        },
        activations={
            "gelu_new": "gelu_tanh",
            "gelu_pytorch_tanh": "gelu_tanh",
            "gelu": "gelu",
            "relu": "relu",
        },
        defaults={
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
        },
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        fixed={**_ROTARY, "has_mlp_bias": False, "qk_norm": True},
        activations=_GATED,
        defaults={
            **_DEFAULTS,
            "head_dim": 128,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
        },
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        fixed={
            **_ROTARY,
            "has_out_bias": False,
            "has_mlp_bias": False,
            "qkv_bias": True,
            "qk_norm": False,
        },
        activations=_GATED,
        defaults={**_DEFAULTS, "num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        fixed={**_ROTARY, "qk_norm": False, "sliding_window": None},
        activations=_GATED,
        defaults=_DEFAULTS,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        fixed={
            **_ROTARY,
            "has_out_bias": False,
            "has_mlp_bias": False,
            "qkv_bias": False,
            "qk_norm": False,
        },
        activations=_GATED,
        defaults={**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        fixed={
            **_ROTARY,
            "has_out_bias": False,
            "has_mlp_bias": False,
            "qkv_bias": False,
            "qk_norm": False,
            "rope_scaling": "none",
            "dropout": 0.0,
        },
        activations=_GATED,
        defaults={
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": None,
            "sliding_window": None,
            "resid_pdrop": 0.0,
        },
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        fixed={
            **_SOFTMAX,
            "has_out_bias": False,
            "qkv_bias": False,
            "qk_norm": False,
            "experts.router.normalize": True,
            "experts.first_dense": 0,
            "experts.every": 1,
        },
        activations=_GATED,
        defaults={
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        fixed={**_SOFTMAX, "qk_norm": True},
        activations=_GATED,
        defaults={
            **_DEFAULTS,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "router_aux_loss_coef": 0.001,
        },
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        fixed={
            **_MIXTURE,
            "has_out_bias": False,
            "sliding_window": None,
            "experts.router.score": "sigmoid",
            "experts.every": 1,
        },
        activations=_GATED,
        defaults={
            **_DEFAULTS,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
            "aux_loss_alpha": 0.0001,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "rope_interleave": True,
        },
    ),
}
"""Families by ``model_type``, in the order in which `family_of` tries them."""
