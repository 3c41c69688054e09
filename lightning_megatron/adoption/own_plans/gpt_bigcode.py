"""GPTBigCode (StarCoder): one head of keys and values for all queries, in one with them."""

from typing import Any

from torch import nn

from lightning_megatron.adoption.own_plans.decoder import decoder_plan
from lightning_megatron.adoption.plan import AdoptionPlan


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
