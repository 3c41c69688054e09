"""Names of weights here and in Llama checkpoints of the Hugging Face hub.

Only names differ: both keep the projections apart, use the same rotary pairing and store
``[out, in]`` matrices. Qwen2's names are Llama's with biases. All functions take and return whole
(unpartitioned) tensors, as ``LlamaForCausalLM.state_dict()`` or a consolidated checkpoint of ours
holds them; tensors are passed on, not copied.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.models.config import TransformerConfig

_EMBEDDING, _HEAD = "trunk.embedding.tokens.weight", "trunk.head.weight"

_OUTSIDE = {
    "model.embed_tokens.weight": _EMBEDDING,
    "model.norm.weight": "trunk.norm.weight",
    "lm_head.weight": _HEAD,
}
_INSIDE = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_THEIR_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_OUR_LAYER = re.compile(r"trunk\.layers\.(\d+)\.(.+)\.(weight|bias)")


def from_hugging_face(
    state: Mapping[str, Tensor], *, tied_embeddings: bool = False
) -> dict[str, Tensor]:
    """Weights of a ``LlamaForCausalLM`` under the names of `Transformer`.

    Args:
        state: weights by Hugging Face name.
        tied_embeddings: whether a missing head is the table of embeddings.

    Raises:
        ConfigError: names that no Llama model has.
    """
    wanted = {n: t for n, t in state.items() if not n.endswith("rotary_emb.inv_freq")}
    ours = _renamed(wanted, _OUTSIDE, _THEIR_LAYER, _INSIDE, "trunk.layers")
    if tied_embeddings and _EMBEDDING in ours:
        ours.setdefault(_HEAD, ours[_EMBEDDING])
    return ours


def to_hugging_face(
    state: Mapping[str, Tensor], *, tied_embeddings: bool = False
) -> dict[str, Tensor]:
    """Weights of a `Transformer` under the names of ``LlamaForCausalLM``.

    Args:
        state: weights by our name.
        tied_embeddings: leave the head out, as checkpoints of tied models do.

    Raises:
        ConfigError: names that no Llama model has.
    """
    outside = {ours: theirs for theirs, ours in _OUTSIDE.items()}
    inside = {ours: theirs for theirs, ours in _INSIDE.items()}
    wanted = {n: t for n, t in state.items() if not (tied_embeddings and n == _HEAD)}
    return _renamed(wanted, outside, _OUR_LAYER, inside, "model.layers")


def config_from_hugging_face(config: Mapping[str, Any]) -> TransformerConfig:
    """Sizes of a Llama or Qwen2 model from its ``config.json``.

    Raises:
        ConfigError: the model has something that ours has not.
    """
    raise_if_any(_unsupported(config))
    rope = config.get("rope_parameters") or {}
    return TransformerConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        mlp_size=config["intermediate_size"],
        max_seq_len=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        rope_base=float(config.get("rope_theta") or rope.get("rope_theta", 10_000.0)),
        qkv_bias=config.get("model_type") == "qwen2",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_dropout=config.get("attention_dropout", 0.0),
        init_std=config.get("initializer_range", 0.02),
    )


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    kind = config.get("model_type")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    found = [
        (kind not in ("llama", "qwen2"), f"model_type={kind}: must be llama or qwen2"),
        (scaling != "default", f"rope_type={scaling}: scaled rotary frequencies are not supported"),
        (
            config.get("hidden_act", "silu") != "silu",
            f"hidden_act={config.get('hidden_act')}: must be silu",
        ),
        (
            bool(config.get("attention_bias")) or bool(config.get("mlp_bias")),
            "attention_bias, mlp_bias: must be false",
        ),
        (
            bool(config.get("use_sliding_window")),
            "use_sliding_window=True: attention always sees the whole sequence",
        ),
    ]
    return [problem for wrong, problem in found if wrong]


def _renamed(
    state: Mapping[str, Tensor],
    outside: Mapping[str, str],
    pattern: re.Pattern[str],
    inside: Mapping[str, str],
    layers: str,
) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    unknown: list[str] = []
    for name, tensor in state.items():
        match = pattern.fullmatch(name)
        if name in outside:
            renamed[outside[name]] = tensor
        elif match and match[2] in inside:
            renamed[f"{layers}.{match[1]}.{inside[match[2]]}.{match[3]}"] = tensor
        else:
            unknown.append(name)
    if unknown:
        raise ConfigError(
            f"{', '.join(unknown)}: not the name of a weight of a Llama-like model; "
            f"known: {', '.join(outside)} and per layer {', '.join(inside)}"
        )
    return renamed
