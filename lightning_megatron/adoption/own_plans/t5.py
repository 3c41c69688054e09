"""T5: an encoder and a decoder, or one of them.

Items of the pipeline are the blocks, first those of the encoder. What the decoder's blocks take of
the encoder goes along from stage to stage, as do the position biases, which the first block of
each stack makes for all. The embedding is called twice, so it lies outside of the items, and the
head, which may be tied to it, does as well: every stage holds them.

Attention biases are learned, one for each head, so their table is split by heads.
"""

from torch import nn

from lightning_megatron.adoption.own_plans.by_class import Table, named, styles_of
from lightning_megatron.adoption.plan import AdoptionPlan

TABLE: Table = {
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
    """Plan of a model of the family."""
    blocks = [name for name, _ in named(model, "T5Block")]
    return AdoptionPlan(styles=styles_of(model, TABLE), items=blocks, blocks=blocks)
