"""Every number of a configuration reaches the families of Hugging Face, and comes back."""

from typing import Any

import pytest

from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.hf_config import config_from_hugging_face, config_to_hugging_face

SIZES: dict[str, Any] = {
    **{"vocab_size": 99, "hidden_size": 48, "num_layers": 3, "num_heads": 6, "mlp_size": 80},
    **{"max_seq_len": 77, "norm_eps": 3e-4, "init_std": 0.03, "attention_dropout": 0.05},
}
ROTARY = SIZES | {
    "out_bias": False,
    "mlp_bias": False,
    "num_kv_heads": 2,
    "head_dim": 10,
    "rope_base": 5000.0,
}
LLAMA3 = {
    **{"rope_scaling": "llama3", "rope_factor": 3.0, "rope_low_freq_factor": 1.5},
    **{"rope_high_freq_factor": 6.0, "rope_original_length": 33},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": ROTARY | LLAMA3 | {"qkv_bias": True, "out_bias": True, "mlp_bias": True},
    "mistral": ROTARY | {"sliding_window": 21},
    "qwen2": ROTARY | {"qkv_bias": True, "sliding_window": 13, "tied_embeddings": True},
    "qwen3": ROTARY | {"qk_norm": True, "rope_scaling": "linear", "rope_factor": 2.5},
    "gpt2": SIZES
    | {"activation": "gelu_tanh", "norm": "layernorm", "positions": "learned", "bias": True}
    | {"qkv_bias": True, "dropout": 0.15, "tied_embeddings": True},
}
NAMES = {
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
    "init_std": ("initializer_range",),
    "mlp_size": ("intermediate_size", "n_inner"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_layers": ("num_hidden_layers", "n_layer"),
    "max_seq_len": ("max_position_embeddings", "n_positions"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "rope_base": ("rope_theta",),
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "dropout": ("resid_pdrop",),
    "sliding_window": ("sliding_window",),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_numbers_that_are_not_the_defaults_come_back(kind: str) -> None:
    config = TransformerConfig(**CONFIGS[kind])
    fields = config_to_hugging_face(config, kind)
    assert config_from_hugging_face(fields) == config
    for ours, theirs in NAMES.items():
        if ours in CONFIGS[kind]:
            assert {fields[name] for name in theirs if name in fields} == {CONFIGS[kind][ours]}, (
                ours
            )
