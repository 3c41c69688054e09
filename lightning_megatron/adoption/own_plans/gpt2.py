"""GPT-2: ``Conv1D`` layers, q, k and v in one, learned positions."""

from torch import nn

from lightning_megatron.adoption.own_plans.decoder import decoder_plan
from lightning_megatron.adoption.plan import AdoptionPlan


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
