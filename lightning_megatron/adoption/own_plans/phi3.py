"""Phi-3: q, k and v in one, gate and up in one."""

from torch import nn

from lightning_megatron.adoption.own_plans.decoder import decoder_plan
from lightning_megatron.adoption.plan import AdoptionPlan


def phi3(model: nn.Module) -> AdoptionPlan:
    """Return the plan of a Phi-3, whose own computes all heads on every rank."""
    styles = {
        "layers.*.self_attn.qkv_proj": "fused_qkv",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    return decoder_plan(model, styles)
