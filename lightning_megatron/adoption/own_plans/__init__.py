"""Plans of ours, for models that carry none or whose own would compute too much alike."""

from collections.abc import Callable

from torch import nn

from lightning_megatron.adoption.own_plans.bert import bert
from lightning_megatron.adoption.own_plans.bloom import bloom
from lightning_megatron.adoption.own_plans.falcon import falcon
from lightning_megatron.adoption.own_plans.glm import glm
from lightning_megatron.adoption.own_plans.gpt2 import gpt2
from lightning_megatron.adoption.own_plans.gpt_bigcode import gpt_bigcode
from lightning_megatron.adoption.own_plans.phi3 import phi3
from lightning_megatron.adoption.own_plans.t5 import t5
from lightning_megatron.adoption.own_plans.vit import vit
from lightning_megatron.adoption.plan import AdoptionPlan

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
