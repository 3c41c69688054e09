"""Families of models of the Hugging Face library that `hf_config` reads and writes.

Each has settings without a choice, and defaults of its class: files on the hub leave out settings
with the default value, so the defaults are part of the format.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ROTARY = {"norm": "rmsnorm", "positions": "rotary"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """Class of models of the library."""

    architecture: str
    """Name of the class there."""
    fixed: Mapping[str, Any]
    """Attributes of `TransformerConfig` with the only value that the family has."""
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
        activations={"silu": "swiglu", "gelu": "geglu"},
        defaults={**_DEFAULTS, "head_dim": 128, "num_key_value_heads": 32},
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
        activations={"silu": "swiglu", "gelu": "geglu"},
        defaults={**_DEFAULTS, "num_key_value_heads": 32},
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        fixed={**_ROTARY, "qk_norm": False, "sliding_window": None},
        activations={"silu": "swiglu", "gelu": "geglu"},
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
        activations={"silu": "swiglu", "gelu": "geglu"},
        defaults={**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
}
"""Families by ``model_type``, in the order in which `family_of` tries them."""
