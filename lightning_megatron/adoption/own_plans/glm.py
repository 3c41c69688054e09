"""GLM and GLM-4: gate and up in one."""

from torch import nn

from lightning_megatron.adoption.own_plans.decoder import decoder_plan
from lightning_megatron.adoption.plan import AdoptionPlan


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
