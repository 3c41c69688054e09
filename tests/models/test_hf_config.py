"""Every number of a configuration reaches the families of Hugging Face, and comes back."""

from typing import Any

import pytest

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.latent_sizes import LatentSizes
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.hf_config import (
    config_from_hugging_face,
    config_to_hugging_face,
    family_of,
)
from lightning_megatron.models.hf_mixture import BIAS_UPDATE
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.models.yarn_config import YarnConfig

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
    "phi3": ROTARY | {"sliding_window": 22},
    "qwen2": ROTARY | {"qkv_bias": True, "sliding_window": 13, "tied_embeddings": True},
    "qwen3": ROTARY | {"qk_norm": True, "rope_scaling": "linear", "rope_factor": 2.5},
    "mixtral": ROTARY
    | {
        "sliding_window": 17,
        "experts": MixtureConfig(num_experts=6, top_k=3, router=RouterConfig(balance_weight=0.3)),
    },
    "qwen3_moe": ROTARY
    | {
        "num_layers": 5,
        "qk_norm": True,
        "sliding_window": 19,
        "experts": MixtureConfig(
            **{"num_experts": 7, "top_k": 5, "mlp_size": 12, "first_dense": 1, "every": 2},
            router=RouterConfig(normalize=False, balance_weight=0.3),
        ),
    },
    "deepseek_v3": SIZES
    | {
        **{"rope_scaling": "yarn", "rope_factor": 3.0, "rope_original_length": 33},
        **{"rope_base": 5000.0, "out_bias": False, "mlp_bias": False},
        "yarn": YarnConfig(
            **{"beta_fast": 9.0, "beta_slow": 2.0, "truncate": False},
            **{"attention_factor": 1.5, "mscale": 0.6, "mscale_all_dim": 0.8},
        ),
        "latent": LatentSizes(q_rank=9, kv_rank=11, rope_dim=6, nope_dim=5, value_dim=7),
        "experts": MixtureConfig(
            **{"num_experts": 12, "top_k": 4, "mlp_size": 13, "shared_size": 39},
            first_dense=2,
            router=RouterConfig(
                **{"score": "sigmoid", "groups": 3, "top_groups": 2, "scale": 1.7},
                **{"bias_update": BIAS_UPDATE, "balance_weight": 0.4},
            ),
        ),
    },
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


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_a_window_without_a_size_has_that_of_the_family(kind: str) -> None:
    fields = config_to_hugging_face(TransformerConfig(**CONFIGS[kind]), kind)
    del fields["sliding_window"]
    assert config_from_hugging_face(fields).sliding_window == 4096
    assert config_from_hugging_face(fields | {"use_sliding_window": False}).sliding_window is None


def test_older_files_of_deepseek_v3() -> None:
    fields = config_to_hugging_face(TransformerConfig(**CONFIGS["deepseek_v3"]))
    rope = fields.pop("rope_parameters")
    older = {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": {"type": rope.pop("rope_type"), **rope},
    }
    assert config_from_hugging_face(fields | older) == TransformerConfig(**CONFIGS["deepseek_v3"])


@pytest.mark.parametrize(
    ("step", "dense", "mixtures"),
    [
        (1, [], [0, 1, 2, 3, 4, 5]),
        (2, [], [1, 3, 5]),
        (3, None, [2, 5]),
        (1, [0, 1], [2, 3, 4, 5]),
        (2, [1], [3, 5]),
        (1, [0, 2, 4], [1, 3, 5]),
        (6, [], [5]),
        (1, [1, 3, 5], [0, 2, 4]),
    ],
)
def test_places_of_mixtures(step: int, dense: list[int] | None, mixtures: list[int]) -> None:
    fields = config_to_hugging_face(TransformerConfig(**CONFIGS["qwen3_moe"] | {"num_layers": 6}))
    fields |= {"decoder_sparse_step": step, "mlp_only_layers": dense}
    config = config_from_hugging_face(fields)
    assert [i for i in range(6) if config.is_mixture(i)] == mixtures
    assert config_from_hugging_face(config_to_hugging_face(config)) == config


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ("mixtral", {"attention_bias": True}, "attention_bias=True: mixtral has none"),
        ("qwen3_moe", {"num_hidden_layers": 6, "mlp_only_layers": [3]}, "at equal distances"),
        ("qwen3_moe", {"decoder_sparse_step": 9}, "at equal distances"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True: deepseek_v3 has none"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func=softmax: must be sigmoid"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2: must be 1"),
        ("deepseek_v3", {"first_k_dense_replace": 3}, "experts.first_dense=3"),
    ],
)
def test_mixtures_that_are_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    fields = config_to_hugging_face(TransformerConfig(**CONFIGS[kind]), kind)
    if "decoder_sparse_step" not in changes and kind == "qwen3_moe":
        fields["decoder_sparse_step"] = 1
    with pytest.raises(ConfigError, match=words):
        config_from_hugging_face(fields | changes)


def test_options_that_no_family_of_mixtures_has() -> None:
    config = TransformerConfig(experts=MixtureConfig(num_experts=4, shared_size=8))
    with pytest.raises(ConfigError) as error:
        family_of(config)
    (text,) = error.value.problems
    assert "mixtral: experts.shared_size=8: mixtral needs 0" in text
    assert "llama: experts=MixtureConfig" in text
    with pytest.raises(ConfigError) as error:
        config_to_hugging_face(TransformerConfig(), "mixtral")
    assert list(error.value.problems) == [
        "--model-type mixtral: experts=None: mixtral has mixtures of experts"
    ]
