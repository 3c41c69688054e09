"""BLOOM: q, k and v of a head next to each other, and a bias of positions for each head."""

from typing import Any

from torch import nn

from lightning_megatron.adoption.own_plans.decoder import decoder_plan
from lightning_megatron.adoption.plan import AdoptionPlan
from lightning_megatron.errors import ConfigError


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
