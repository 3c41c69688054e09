"""ViT: an encoder of patches of an image.

Items of the pipeline are the embeddings, the layers and the last norm. Classifiers and decoders of
pixels are small; every stage holds them, and the last one computes them.
"""

from torch import nn

from lightning_megatron.adoption.own_plans.by_class import Table, named, styles_of
from lightning_megatron.adoption.plan import AdoptionPlan

TABLE: Table = {
    "Attention": {
        "q_proj": "colwise",
        "k_proj": "colwise",
        "v_proj": "colwise",
        "o_proj": "rowwise",
    },
    "MLP": {"fc1": "colwise", "fc2": "rowwise"},
}


def vit(model: nn.Module) -> AdoptionPlan:
    """Plan of a model of the family."""
    blocks = [name for name, _ in named(model, "ViTLayer")]
    (base,) = (name for name, _ in named(model, "ViTModel"))
    prefix = f"{base}." if base else ""
    items = [f"{prefix}embeddings", *blocks, f"{prefix}layernorm"]
    return AdoptionPlan(styles=styles_of(model, TABLE), items=items, blocks=blocks)
