"""Small models of the Hugging Face library with random weights, of every family and option."""

import inspect
import re
import tempfile
import textwrap
import types
from functools import cache

import torch
from safetensors.torch import load_file

VOCABULARY = 37
LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,  # some frequencies are kept, some mixed, some slowed
    "rope_theta": 10_000.0,
}
YARN = {
    **{"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    "llama, scaled positions, biases": (
        "Llama",
        {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "head_dim": 16},
    ),
    "llama, linear positions, tied": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama, yarn": ("Llama", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0}}),
    "qwen2": ("Qwen2", {}),
    "qwen2, window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3, tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 5}),
    "phi3": ("Phi3", {"pad_token_id": 0, "sliding_window": None}),
    "phi3, window": ("Phi3", {"pad_token_id": 0, "sliding_window": 5}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 7}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **{"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 24, "num_hidden_layers": 3, "mlp_only_layers": [0]},
        },
    ),
    "qwen3_moe, renormalised, every second": (
        "Qwen3Moe",
        {
            **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"norm_topk_prob": True, "decoder_sparse_step": 2, "tie_word_embeddings": True},
            "num_hidden_layers": 4,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
            **{"moe_intermediate_size": 16, "n_shared_experts": 2, "first_k_dense_replace": 1},
            **{"q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
            **{"qk_nope_head_dim": 6, "num_key_value_heads": 4},
        },
    ),
    "deepseek_v3, queries of the input, one group, yarn": (
        "DeepseekV3",
        {
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
            **{"moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 0},
            **{"q_lora_rank": None, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 8},
            **{"qk_nope_head_dim": 8, "num_key_value_heads": 4, "norm_topk_prob": False},
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        },
    ),
    "gpt2": ("GPT2", {}),
    "gpt2, not tied": (
        "GPT2",
        {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "gelu"},
    ),
}


@cache
def hub_model(name):
    """One of `MODELS`, float64; not to be changed."""
    import transformers

    kind, fields = MODELS[name]
    torch.manual_seed(0)
    given = {**(GPT2 if kind == "GPT2" else LLAMA), **fields}
    config = getattr(transformers, f"{kind}Config")(**given)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().double()
    # Norms and biases start out as ones and zeros, which would hide a mix-up.
    with torch.no_grad():
        for tensor in (*model.parameters(), *_biases_of_choice(model)):
            tensor.add_(0.1 * torch.randn_like(tensor))
    # In a model that it loads, transformers 5.24 has routers in float32, whatever is asked for.
    for module in filter(_is_router, model.modules()):
        module.float().double()
    return use_full_precision(model)


def _biases_of_choice(model):
    return (b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))


def _is_router(module):
    return type(module).__name__.lower().endswith("topkrouter")


def use_full_precision(model):
    """Their RMS norms and routers compute in float32 even in a float64 model: eight digits less."""
    model.double()
    model.config._experts_implementation = "eager"
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, torch.nn.RMSNorm):
                norm = torch.nn.RMSNorm(child.weight.shape[0], child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
            elif _is_router(child):
                child.forward = types.MethodType(_in_float64(type(child)), child)
    return model


@cache
def _in_float64(router):
    """The forward of a router, as written there but for its format."""
    text = textwrap.dedent(inspect.getsource(router.forward))
    for before, after in (("torch.float32", "torch.float64"), (".float()", ".double()")):
        text = text.replace(before, after)
    text = re.sub(r"dtype=torch\.float\b", "dtype=torch.float64", text)
    names = dict(vars(inspect.getmodule(router)))
    exec(text, names)
    return names["forward"]


@cache
def file_state(name):
    """Weights of one of `MODELS` by the names of its files."""
    with tempfile.TemporaryDirectory() as directory:
        hub_model(name).save_pretrained(directory)
        return load_file(f"{directory}/model.safetensors")


def logits_of(model, tokens):
    """Of a model of the library."""
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def some_tokens():
    return torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
