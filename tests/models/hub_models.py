"""Small models of the Hugging Face library with random weights, of every family and option."""

from functools import cache

import torch

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
    "qwen2": ("Qwen2", {}),
    "qwen2, window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3, tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, biases": ("Qwen3", {"head_dim": 8, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 5}),
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
    config = getattr(transformers, f"{kind}Config")(**(GPT2 if kind == "GPT2" else LLAMA), **fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().double()
    # Norms and biases start out as ones and zeros, which would hide a mix-up.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return use_norms_in_full_precision(model)


def use_norms_in_full_precision(model):
    """Their RMS norm computes in float32 even in a float64 model, which costs eight digits."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and not isinstance(child, torch.nn.RMSNorm):
                norm = torch.nn.RMSNorm(child.weight.shape[0], child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def logits_of(model, tokens):
    """Of a model of the library."""
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def some_tokens():
    return torch.randint(VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
