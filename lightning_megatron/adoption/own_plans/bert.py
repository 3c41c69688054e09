"""BERT and RoBERTa: encoders with heads of many kinds.

Items of the pipeline are the embeddings, the layers, and the head over the vocabulary, which may be
tied to the embeddings. Poolers and classifiers are small; every stage holds them, and the one that
comes to them computes them.
"""

from torch import nn

from lightning_megatron.adoption.own_plans.by_class import Table, named, styles_of
from lightning_megatron.adoption.plan import AdoptionPlan

TABLE: Table = {
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
    """Plan of a model of the family."""
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
    return AdoptionPlan(styles=styles_of(model, TABLE), items=items, blocks=blocks)
