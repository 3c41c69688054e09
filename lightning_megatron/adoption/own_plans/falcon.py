"""Falcon: q, k and v in one, in one of three orders."""

from typing import Any

from torch import nn

from lightning_megatron.adoption.own_plans.decoder import decoder_plan
from lightning_megatron.adoption.plan import AdoptionPlan

_MLP = {"h.*.mlp.dense_h_to_4h": "colwise", "h.*.mlp.dense_4h_to_h": "rowwise"}


def falcon(model: nn.Module) -> AdoptionPlan:
    """Return the plan of a Falcon.

    Attention stays whole where q, k and v are in groups (``new_decoder_architecture``) and where a
    bias for each head is in the mask (``alibi``).
    """
    config: Any = model.config
    styles = dict(_MLP)
    if not config.new_decoder_architecture and not config.alibi:
        fused = "fused_qkv" if config.multi_query else "colwise"
        styles["h.*.self_attention.query_key_value"] = fused
        styles["h.*.self_attention.dense"] = "rowwise"
    return decoder_plan(model, styles, embedding="word_embeddings", blocks="h", norm="ln_f")
