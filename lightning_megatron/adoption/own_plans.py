"""Plans of ours, for models that carry none or whose own would compute too much alike.

Plans go by the names of a decoder's parts (`decoder_plan`), or by the classes of modules
(`styles_of`), which hold whatever model has such modules, and under what name: models of one family
differ in what stands around their blocks, classification heads, poolers, an encoder alone, and
their blocks are of the same classes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_megatron.adoption.plan import AdoptionPlan, expanded
from lightning_megatron.errors import ConfigError

Table = Mapping[str, Mapping[str, str]]
"""Styles of children by their local names, by the end of the name of the class that holds them; the
module itself is ``""``."""


def styles_of(model: nn.Module, table: Table) -> dict[str, str]:
    """Return the style of each module of a model of which the table says one."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        for ending, children in table.items():
            if type(module).__name__.endswith(ending):
                for child, style in children.items():
                    if not child or _has(module, child):
                        found[".".join(filter(None, (name, child)))] = style
    return found


def named(model: nn.Module, ending: str) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the modules whose class name ends so, with their names."""
    return (
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith(ending)
    )


def _has(module: nn.Module, child: str) -> bool:
    return isinstance(getattr(module, child, None), nn.Module)


def decoder_plan(
    model: nn.Module,
    styles: Mapping[str, str],
    *,
    embedding: str = "embed_tokens",
    blocks: str = "layers",
    norm: str = "norm",
    head: str = "lm_head",
) -> AdoptionPlan:
    """Return the plan of a decoder of transformers, with any head or none.

    Args:
        model: the model.
        styles: style by pattern of names in the base model.
        embedding: name of the token embedding in the base model.
        blocks: name of the list of blocks in the base model.
        norm: name of the last norm in the base model.
        head: name of the language-model head in the model.
    """
    base = str(getattr(model, "base_model_prefix", ""))
    prefix = f"{base}." if base and hasattr(model, base) else ""
    patterns = {prefix + name: style for name, style in styles.items()}
    patterns[prefix + embedding] = "embedding_rowwise"
    stack: Any = model.get_submodule(prefix + blocks)
    names = [f"{prefix}{blocks}.{index}" for index in range(len(stack))]
    items = [prefix + embedding, *names, prefix + norm]
    if isinstance(getattr(model, head, None), nn.Linear):
        patterns[head] = "colwise_gather_output"
        items.append(head)
    return AdoptionPlan(styles=expanded(model, patterns), items=items, blocks=names)


_BERT: Table = {
    "Embeddings": {"word_embeddings": "embedding_rowwise"},
    "SelfAttention": {"query": "colwise", "key": "colwise", "value": "colwise"},
    "CrossAttention": {"query": "colwise", "key": "colwise", "value": "colwise"},
    "SelfOutput": {"dense": "rowwise"},
    "Intermediate": {"dense": "colwise"},
    "Output": {"dense": "rowwise"},
    # Its bias is that of the decoder, under a second name.
    "LMPredictionHead": {"": "tied_bias", "decoder": "colwise_gather_output"},
    "RobertaLMHead": {"": "tied_bias", "decoder": "colwise_gather_output"},
    "CamembertLMHead": {"": "tied_bias", "decoder": "colwise_gather_output"},
}


def bert(model: nn.Module) -> AdoptionPlan:
    """Plan of BERT and RoBERTa: encoders with heads of many kinds.

    Items of the pipeline are the embeddings, the layers, and the head over the vocabulary, which
    may be tied to the embeddings. Poolers and classifiers are small; every stage holds them, and
    the one that comes to them computes them.
    """
    items: list[str] = []
    blocks: list[str] = []
    for name, _ in named(model, "Embeddings"):
        items.append(name)
    for name, _ in named(model, "Layer"):
        blocks.append(name)
    items += blocks
    for name in ("cls", "lm_head"):
        if isinstance(getattr(model, name, None), nn.Module):
            items.append(name)
    return AdoptionPlan(styles=styles_of(model, _BERT), items=items, blocks=blocks)


def bloom(model: nn.Module) -> AdoptionPlan:
    """Return the plan of a BLOOM.

    Raises:
        ConfigError: its code multiplies with slices of weights, of which a rank has a part.
    """
    config: Any = model.config
    if config.slow_but_exact and config.pretraining_tp > 1:
        raise ConfigError(
            f"config.slow_but_exact=True, pretraining_tp={config.pretraining_tp}: BLOOM then "
            "computes with slices of whole weights; nearest valid: slow_but_exact=False"
        )
    styles = {
        "h.*.self_attention": "heads_of_alibi",
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    }
    return decoder_plan(model, styles, embedding="word_embeddings", blocks="h", norm="ln_f")


_FALCON_MLP = {"h.*.mlp.dense_h_to_4h": "colwise", "h.*.mlp.dense_4h_to_h": "rowwise"}


def falcon(model: nn.Module) -> AdoptionPlan:
    """Return the plan of a Falcon.

    Attention stays whole where q, k and v are in groups (``new_decoder_architecture``) and where a
    bias for each head is in the mask (``alibi``).
    """
    config: Any = model.config
    styles = dict(_FALCON_MLP)
    if not config.new_decoder_architecture and not config.alibi:
        fused = "fused_qkv" if config.multi_query else "colwise"
        styles["h.*.self_attention.query_key_value"] = fused
        styles["h.*.self_attention.dense"] = "rowwise"
    return decoder_plan(model, styles, embedding="word_embeddings", blocks="h", norm="ln_f")


def glm(model: nn.Module) -> AdoptionPlan:
    """Return the plan of a GLM, whose own computes all features of the MLP on every rank."""
    styles = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    return decoder_plan(model, styles)


def gpt2(model: nn.Module) -> AdoptionPlan:
    """Return the plan of a GPT-2.

    The positions are added to what the embedding returns, by the first stage, and are no item of
    the pipeline: every stage calls their embedding.
    """
    styles = {
        "h.*.attn.c_attn": "fused_qkv",
        "h.*.attn.c_proj": "rowwise",
        "h.*.crossattention.q_attn": "colwise",
        "h.*.crossattention.c_attn": "fused_kv",
        "h.*.crossattention.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
    return decoder_plan(model, styles, embedding="wte", blocks="h", norm="ln_f")


def gpt_bigcode(model: nn.Module) -> AdoptionPlan:
    """Return the plan of a GPTBigCode.

    With a head of keys and values for each of the queries, those of a head are next to each other.
    """
    config: Any = model.config
    fused = "fused_qkv" if config.multi_query else "colwise"
    styles = {
        "h.*.attn.c_attn": fused,
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }
    return decoder_plan(model, styles, embedding="wte", blocks="h", norm="ln_f")


def phi3(model: nn.Module) -> AdoptionPlan:
    """Return the plan of a Phi-3, whose own computes all heads on every rank."""
    styles = {
        "layers.*.self_attn.qkv_proj": "fused_qkv",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    return decoder_plan(model, styles)


_T5: Table = {
    "T5Attention": {
        "q": "colwise",
        "k": "colwise",
        "v": "colwise",
        "o": "rowwise",
        "relative_attention_bias": "embedding_colwise",
    },
    "T5DenseActDense": {"wi": "colwise", "wo": "rowwise"},
    "T5DenseGatedActDense": {"wi_0": "colwise", "wi_1": "colwise", "wo": "rowwise"},
    "T5Stack": {"embed_tokens": "embedding_rowwise"},
    "T5Model": {"shared": "embedding_rowwise"},
    "T5EncoderModel": {"shared": "embedding_rowwise"},
    "T5ForQuestionAnswering": {"shared": "embedding_rowwise"},
    "T5ForConditionalGeneration": {
        "shared": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
    },
}


def t5(model: nn.Module) -> AdoptionPlan:
    """Plan of T5: an encoder and a decoder, or one of them.

    Items of the pipeline are the blocks, first those of the encoder. What the decoder's blocks take
    of the encoder goes along from stage to stage, as do the position biases, which the first block
    of each stack makes for all. The embedding is called twice, so it lies outside of the items, and
    the head, which may be tied to it, does as well: every stage holds them.

    Attention biases are learned, one for each head, so their table is split by heads.
    """
    blocks = [name for name, _ in named(model, "T5Block")]
    return AdoptionPlan(styles=styles_of(model, _T5), items=blocks, blocks=blocks)


_VIT: Table = {
    "Attention": {
        "q_proj": "colwise",
        "k_proj": "colwise",
        "v_proj": "colwise",
        "o_proj": "rowwise",
    },
    "MLP": {"fc1": "colwise", "fc2": "rowwise"},
}


def vit(model: nn.Module) -> AdoptionPlan:
    """Plan of ViT: an encoder of patches of an image.

    Items of the pipeline are the embeddings, the layers and the last norm. Classifiers and decoders
    of pixels are small; every stage holds them, and the last one computes them.
    """
    blocks = [name for name, _ in named(model, "ViTLayer")]
    (base,) = (name for name, _ in named(model, "ViTModel"))
    prefix = f"{base}." if base else ""
    items = [f"{prefix}embeddings", *blocks, f"{prefix}layernorm"]
    return AdoptionPlan(styles=styles_of(model, _VIT), items=items, blocks=blocks)


OWN_PLANS: dict[str, Callable[[nn.Module], AdoptionPlan]] = {
    "bert": bert,
    "camembert": bert,
    "bloom": bloom,
    "falcon": falcon,
    "glm": glm,
    "glm4": glm,
    "gpt2": gpt2,
    "gpt_bigcode": gpt_bigcode,
    "phi3": phi3,
    "roberta": bert,
    "t5": t5,
    "vit": vit,
    "xlm-roberta": bert,
}
"""Plan by ``config.model_type`` of a model of transformers."""
