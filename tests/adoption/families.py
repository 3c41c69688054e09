"""Small random models of transformers, by family."""

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER = ("num_key_value_heads", "use_cache")
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        model: class of transformers.
        config: class of its configuration.
        options: what differs from `SIZES`.
        without: names of `SIZES` that the configuration does not have.
        batch: kind of the batches (`harness.BATCHES`).
    """

    model: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    batch: str = "causal"

    def build(self, attention: str | None = None, **changes: Any) -> torch.nn.Module:
        """Return a model with the same random weights at every call, in float64.

        Args:
            attention: implementation of attention; that of `options`, or the default one, when
                None.
            **changes: further options of the configuration.
        """
        sizes = {name: value for name, value in SIZES.items() if name not in self.without}
        config = getattr(transformers, self.config)(**{**sizes, **self.options, **changes})
        if attention is not None:
            config._attn_implementation = attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            return getattr(transformers, self.model)(config).double()


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": Family(
        "Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}
    ),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {"sliding_window": 5}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"head_dim": 8, "sliding_window": 5, "attn_implementation": "eager"},
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config"),
    "granite": Family(
        "GraniteForCausalLM",
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.25,
        },
    ),
    "cohere": Family("CohereForCausalLM", "CohereConfig", {"use_qk_norm": True}),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        "Cohere2Config",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        "Starcoder2Config",
        {"sliding_window": 5, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "granite_swa": Family("GraniteSWAForCausalLM", "GraniteSWAConfig", {"sliding_window": 5}),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "first_k_dense_replace": 2,
        },
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", without=("num_key_value_heads",)),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {"num_local_experts": 4, "experts_implementation": "eager"},
    ),
    "qwen3 moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "experts_implementation": "eager",
        },
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_inner": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        without=("intermediate_size", "num_key_value_heads"),
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "experts_implementation": "eager",
        },
    ),
    "mixtral balanced": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        {
            "num_local_experts": 4,
            "experts_implementation": "eager",
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
        },
    ),
    "falcon": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {"ffn_hidden_size": 48},
        ("intermediate_size", "num_key_value_heads"),
    ),
    "gpt2 classes": Family(
        "GPT2ForSequenceClassification",
        "GPT2Config",
        {
            "n_inner": 48,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "num_labels": 3,
            "pad_token_id": 0,
        },
        ("intermediate_size", "num_key_value_heads"),
        "classes",
    ),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", {"pad_token_id": 0}),
    "glm": Family("GlmForCausalLM", "GlmConfig", {"head_dim": 8, "pad_token_id": 0}),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        "GPTBigCodeConfig",
        {"n_inner": 48, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        without=("intermediate_size", "num_key_value_heads"),
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        without=(
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
        ),
    ),
    "bert": Family("BertForMaskedLM", "BertConfig", NO_DROPOUT, ENCODER, "masked"),
    "bert classes": Family(
        "BertForSequenceClassification",
        "BertConfig",
        {**NO_DROPOUT, "num_labels": 3},
        ENCODER,
        "classes",
    ),
    "bert pretraining": Family(
        "BertForPreTraining",
        "BertConfig",
        {**NO_DROPOUT, "attn_implementation": "eager"},
        ENCODER,
        "sentences",
    ),
    "roberta": Family(
        "RobertaForMaskedLM",
        "RobertaConfig",
        {**NO_DROPOUT, "pad_token_id": 1, "type_vocab_size": 2},
        ENCODER,
        "masked",
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {**NO_DROPOUT, "image_size": 8, "patch_size": 4, "num_labels": 3},
        (*ENCODER, "vocab_size", "max_position_embeddings"),
        "images",
    ),
    "vit pixels": Family(
        "ViTForMaskedImageModeling",
        "ViTConfig",
        {**NO_DROPOUT, "image_size": 8, "patch_size": 4, "encoder_stride": 4},
        (*ENCODER, "vocab_size", "max_position_embeddings"),
        "hidden pixels",
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "resid_pdrop": 0.0}
        | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False},
        tuple(SIZES)[1:],
    ),
    "electra": Family(
        "ElectraForMaskedLM",
        "ElectraConfig",
        {**NO_DROPOUT, "embedding_size": 16},
        ENCODER,
        "masked",
    ),
    "bart": Family(
        "BartForConditionalGeneration",
        "BartConfig",
        {"d_model": 32, "dropout": 0.0, "max_position_embeddings": 64, "use_cache": False}
        | {f"{stack}_layers": 2 for stack in ("encoder", "decoder")}
        | {f"{stack}_attention_heads": 4 for stack in ("encoder", "decoder")}
        | {f"{stack}_ffn_dim": 48 for stack in ("encoder", "decoder")},
        tuple(SIZES)[1:],
        "translation",
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32},
        ("intermediate_size", "num_key_value_heads"),
    ),
    "distilbert": Family(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.0}
        | {"attention_dropout": 0.0},
        tuple(SIZES)[1:6],
        "hidden",
    ),
    "t5": Family("T5ForConditionalGeneration", "T5Config", T5, tuple(SIZES)[1:], "translation"),
    "t5 gated": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        tuple(SIZES)[1:],
        "translation",
    ),
    "window": Family("MistralForCausalLM", "MistralConfig", {"sliding_window": 5}),
    "odd": Family("LlamaForCausalLM", "LlamaConfig", {"num_attention_heads": 2}),
}
