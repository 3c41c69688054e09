"""``config.json`` of the Hugging Face library, to and from `TransformerConfig`; arithmetic only.

The library has a class for every family of models; this package has one class with options. Options
that the other side cannot express are refused by name, all at once: a weight that is left out or a
setting that is overlooked makes a model that is slightly wrong, which nobody notices.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Any

from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.layers.latent_sizes import LatentSizes
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.hf_families import FAMILIES, Family
from lightning_megatron.models.hf_mixture import mixture_fields, mixture_problems, read_mixture
from lightning_megatron.models.yarn_config import YarnConfig

# Ours, by the family's name of it; what every model of the family has.
_NAMES: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_size",
    "max_position_embeddings": "max_seq_len",
}
_GPT2_NAMES: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "max_seq_len",
}
_LATENT_NAMES: Mapping[str, str] = {
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_rope_head_dim": "rope_dim",
    "qk_nope_head_dim": "nope_dim",
    "v_head_dim": "value_dim",
}
_ROPE_NAMES: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_original_length",
    },
    "yarn": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_length",
    },
}
_WITH_ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe")
"""Families with a choice of biases of queries, keys, values and output, all or none."""
_ALWAYS_SLIDING = ("mistral", "mixtral", "phi3")
"""Families with a window wherever there is a size of it."""
_GPT2_FIXED: Mapping[str, Any] = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def family_of(config: TransformerConfig) -> str:
    """Return the ``model_type`` that a model can be written as.

    Raises:
        ConfigError: no family has all of its options; lists the problems of each family.
    """
    found = {name: misfits(config, name) for name in FAMILIES}
    for name, problems in found.items():
        if not problems:
            return name
    lines = [f"{name}: {'; '.join(problems)}" for name, problems in found.items()]
    raise ConfigError(f"no family of Hugging Face models has these options: {', '.join(lines)}")


def misfits(config: TransformerConfig, model_type: str) -> list[str]:
    """Return the options of a model that a family cannot express."""
    family = FAMILIES[_known(model_type)]
    problems = [
        f"{name}={_option(config, name)}: {model_type} needs {value}"
        for name, value in family.fixed.items()
        if _has(config, name) and _option(config, name) != value
    ]
    for part, what in (("experts", "mixtures of experts"), ("latent", "latent attention")):
        if getattr(config, part) is None and part not in family.fixed:
            problems.append(f"{part}=None: {model_type} has {what}")
    problems += mixture_problems(config, model_type)
    if config.activation not in family.activations.values():
        valid = ", ".join(dict.fromkeys(family.activations.values()))
        problems.append(f"activation={config.activation}: {model_type} has {valid}")
    if "has_out_bias" not in family.fixed and config.has_out_bias != config.qkv_bias:
        problems.append(
            f"qkv_bias={config.qkv_bias}, out_bias={config.has_out_bias}: {model_type} has both or "
            "neither"
        )
    if model_type == "gpt2":
        whole = config.num_heads * config.head_size == config.hidden_size
        if not whole or config.kv_heads != config.num_heads:
            problems.append("gpt2 has as many key-value heads as heads, of hidden_size together")
    return problems


def _option(config: TransformerConfig, name: str) -> Any:
    """Value of an option, or of one of a part (``a.b``)."""
    return reduce(getattr, name.split("."), config)


def _has(config: TransformerConfig, name: str) -> bool:
    """Whether the part of an option is there."""
    part, dot, _ = name.partition(".")
    return not dot or getattr(config, part) is not None


def config_to_hugging_face(
    config: TransformerConfig, model_type: str | None = None
) -> dict[str, Any]:
    """Return the ``config.json`` of a model.

    Args:
        config: sizes of the model; the padding of its vocabulary is left out.
        model_type: one of `FAMILIES`; the one that fits when None.

    Raises:
        ConfigError: the family cannot express an option.
    """
    kind = family_of(config) if model_type is None else _known(model_type)
    raise_if_any([f"--model-type {kind}: {problem}" for problem in misfits(config, kind)])
    family = FAMILIES[kind]
    activation = next(a for a, ours in family.activations.items() if ours == config.activation)
    # The family's classes have token ids of their own as defaults, which mean nothing here.
    head = {
        "architectures": [family.architecture],
        "model_type": kind,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tied_embeddings,
        "vocab_size": config.num_tokens,
    }
    if kind == "gpt2":
        return head | _gpt2_fields(config, activation)
    return head | _rotary_fields(config, kind, activation) | mixture_fields(config, kind)


def _gpt2_fields(config: TransformerConfig, activation: str) -> dict[str, Any]:
    sizes = {t: getattr(config, o) for t, o in _GPT2_NAMES.items() if t != "vocab_size"}
    return {
        **sizes,
        "n_inner": config.mlp_width,
        "activation_function": activation,
        "layer_norm_epsilon": config.norm_eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.attention_dropout,
        **_GPT2_FIXED,
    }


def _rotary_fields(config: TransformerConfig, kind: str, activation: str) -> dict[str, Any]:
    sizes = {t: getattr(config, o) for t, o in _NAMES.items() if t != "vocab_size"}
    scaling = _rope_to_hugging_face(config)
    fields = {
        **sizes,
        "intermediate_size": config.mlp_width,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": activation,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.attention_dropout,
        # Newer versions read rope_parameters, older ones the other two.
        "rope_parameters": {
            "rope_theta": config.rope_base,
            **(scaling or {"rope_type": "default"}),
        },
        "rope_theta": config.rope_base,
        "rope_scaling": scaling,
    }
    if config.latent is not None:
        fields |= _latent_to_hugging_face(config.latent)
        del fields["head_dim"]  # there it is the number of turned channels
    if kind in _WITH_ATTENTION_BIAS:
        fields["attention_bias"] = config.qkv_bias
    if kind == "llama":
        fields["mlp_bias"] = config.has_mlp_bias
    if kind == "phi3":
        fields["resid_pdrop"] = fields["embd_pdrop"] = config.dropout
        fields["pad_token_id"] = None  # a row of the table by default
    if kind in _ALWAYS_SLIDING:
        fields["sliding_window"] = config.sliding_window
    if kind in ("qwen2", "qwen3", "qwen3_moe"):
        slides = config.sliding_window is not None
        fields |= {"use_sliding_window": slides, "sliding_window": config.sliding_window}
    if kind in ("qwen2", "qwen3"):
        fields |= {
            "max_window_layers": 0 if slides else config.num_layers,
            "layer_types": [f"{'sliding' if slides else 'full'}_attention"] * config.num_layers,
        }
    return fields


def _latent_to_hugging_face(sizes: LatentSizes) -> dict[str, Any]:
    return {theirs: getattr(sizes, ours) for theirs, ours in _LATENT_NAMES.items()} | {
        "qk_head_dim": sizes.key_dim,
        "rope_interleave": True,
    }


def _rope_to_hugging_face(config: TransformerConfig) -> dict[str, Any] | None:
    if config.rope_scaling == "none":
        return None
    scaling = {"rope_type": config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "linear":
        return scaling
    if config.rope_scaling == "yarn":
        given = vars(config.yarn or YarnConfig())
        further = {name: value for name, value in given.items() if value is not None}
        return {
            **scaling,
            **further,
            "original_max_position_embeddings": config.rope_original_length,
        }
    return scaling | {
        "low_freq_factor": config.rope_low_freq_factor,
        "high_freq_factor": config.rope_high_freq_factor,
        "original_max_position_embeddings": config.rope_original_length,
    }


def config_from_hugging_face(
    config: Mapping[str, Any], *, pad_vocab_to_multiple: int = 1
) -> TransformerConfig:
    """Return the sizes of a model from its ``config.json``.

    Args:
        config: content of the file.
        pad_vocab_to_multiple: divisor to which the vocabulary is padded, so that tp divides it.

    Raises:
        ConfigError: the model has settings that `TransformerConfig` has not; lists all.
    """
    kind = str(config.get("model_type"))
    family = FAMILIES[_known(kind)]
    names = _GPT2_NAMES if kind == "gpt2" else _NAMES
    problems = [f"config.json has no {name}" for name in names if name not in config]
    problems += _common_problems(config)
    if pad_vocab_to_multiple < 1:
        problems.append(
            f"pad_vocab_to_multiple={pad_vocab_to_multiple}: must be at least 1; "
            "nearest valid: pad_vocab_to_multiple=1"
        )
    raise_if_any(problems)
    fields = {ours: config[theirs] for theirs, ours in names.items()}
    read = _read_gpt2 if kind == "gpt2" else _read_rotary
    given = {**family.defaults, **config}
    fields |= read(given, kind, family)
    padding = -fields["vocab_size"] % pad_vocab_to_multiple
    return TransformerConfig(
        **{
            **fields,
            "vocab_size": fields["vocab_size"] + padding,
            "vocab_padding": padding,
            "tied_embeddings": bool(given["tie_word_embeddings"]),
            "init_std": given.get("initializer_range", 0.02),
        }
    )


def _common_problems(config: Mapping[str, Any]) -> list[str]:
    found = []
    if config.get("quantization_config"):
        found.append("quantization_config: quantised weights are not read")
    if config.get("is_encoder_decoder"):
        found.append("is_encoder_decoder=True: the model must be a decoder")
    return found


def _read_gpt2(given: Mapping[str, Any], kind: str, family: Family) -> dict[str, Any]:
    del kind
    problems = _activation_problems(given, "activation_function", family)
    problems += [
        f"{name}={given[name]}: must be {value}"
        for name, value in _GPT2_FIXED.items()
        if given.get(name, value) != value
    ]
    if given["resid_pdrop"] != given["embd_pdrop"]:
        problems.append(
            f"resid_pdrop={given['resid_pdrop']}, embd_pdrop={given['embd_pdrop']}: must be equal"
        )
    raise_if_any(problems)
    return {
        "norm": "layernorm",
        "positions": "learned",
        "bias": True,
        "qkv_bias": True,
        "mlp_size": given.get("n_inner") or 4 * given["n_embd"],
        "activation": family.activations[given["activation_function"]],
        "norm_eps": given["layer_norm_epsilon"],
        "dropout": given["resid_pdrop"],
        "attention_dropout": given["attn_pdrop"],
    }


def _read_rotary(given: Mapping[str, Any], kind: str, family: Family) -> dict[str, Any]:
    rope, rope_problems = _rope(given)
    window, window_problems = _window(given, kind)
    experts, expert_problems = read_mixture(given, kind)
    problems = _activation_problems(given, "hidden_act", family) + rope_problems + window_problems
    problems += expert_problems
    has_both = kind in _WITH_ATTENTION_BIAS  # attention_bias is a bias of the output as well
    if not has_both and kind != "qwen2" and given["attention_bias"]:
        problems.append(f"attention_bias=True: {kind} has none")
    if kind != "llama" and given["mlp_bias"]:
        problems.append(f"mlp_bias=True: {kind} has none")
    if kind == "phi3" and given["resid_pdrop"]:
        problems.append(f"resid_pdrop={given['resid_pdrop']}: must be 0.0")
    if kind == "deepseek_v3" and not given["rope_interleave"]:
        problems.append("rope_interleave=False: turned channels must come in pairs")
    raise_if_any(problems)
    latent = None
    if kind == "deepseek_v3":
        latent = LatentSizes(**{ours: given[theirs] for theirs, ours in _LATENT_NAMES.items()})
        given = {**given, "head_dim": None, "num_key_value_heads": None}
    head_dim = given.get("head_dim")
    if head_dim == given["hidden_size"] / given["num_attention_heads"]:
        head_dim = None
    return {
        "activation": family.activations[given["hidden_act"]],
        "num_kv_heads": given.get("num_key_value_heads"),
        "head_dim": head_dim,
        "norm_eps": given["rms_norm_eps"],
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "qkv_bias": kind == "qwen2" or (has_both and bool(given["attention_bias"])),
        "out_bias": has_both and bool(given["attention_bias"]),
        "mlp_bias": bool(given["mlp_bias"]),
        "sliding_window": window,
        "attention_dropout": given.get("attention_dropout", 0.0),
        "latent": latent,
        **rope,
        **experts,
    }


def _activation_problems(given: Mapping[str, Any], name: str, family: Family) -> list[str]:
    if given[name] in family.activations:
        return []
    return [f"{name}={given[name]}: must be one of {', '.join(family.activations)}"]


def _rope(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = rope.get("rope_theta", given.get("rope_theta", 10_000.0))
    fields: dict[str, Any] = {"rope_base": float(base)}
    problems = []
    if kind not in ("default", "linear", "llama3", "yarn"):
        problems.append(
            f"rope_type={kind}: these scaled rotary frequencies are not supported; valid: default, "
            "linear, llama3, yarn"
        )
    if given.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
        problems.append("partial_rotary_factor: heads are turned whole or not at all")
    names = _ROPE_NAMES.get(kind, {})
    problems += [f"rope_type={kind}: there is no {n}" for n in names if n not in rope]
    if not problems and names:
        fields |= {"rope_scaling": kind, **{o: rope[theirs] for theirs, o in names.items()}}
    if kind == "yarn":
        known = YarnConfig.__dataclass_fields__
        given = {name: rope[name] for name in known if rope.get(name) is not None}
        fields["yarn"] = YarnConfig(**given)
    return fields, problems


def _window(given: Mapping[str, Any], kind: str) -> tuple[int | None, list[str]]:
    """Sliding window of all layers, and problems."""
    window = given.get("sliding_window")
    if kind in ("llama", "deepseek_v3") or window is None:
        return None, []
    if kind in _ALWAYS_SLIDING:
        return window, []
    if not given.get("use_sliding_window"):
        return None, []
    if kind == "qwen3_moe":  # which has no max_window_layers
        return window, []
    layers = given["num_hidden_layers"]
    first = given.get("max_window_layers", 28)
    kinds = given.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    if set(kinds) == {"full_attention"}:
        return None, []
    if set(kinds) == {"sliding_attention"}:
        return window, []
    return None, [f"sliding_window={window}: a window on some of the layers only is not supported"]


def _known(model_type: str) -> str:
    if model_type not in FAMILIES:
        raise ConfigError(
            f"model_type={model_type}: there is no such family here; valid: {', '.join(FAMILIES)}; "
            "nearest valid: lightning_megatron.adopt(DIRECTORY), which splits models of other "
            "families as they are"
        )
    return model_type
