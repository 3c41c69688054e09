"""What of PEFT has no rule, and is refused by name."""

import peft
import pytest
import torch
from torch import nn

from lightning_megatron import ConfigError
from lightning_megatron.adoption.adapter_problems import adapter_problems
from lightning_megatron.adoption.adapters import join_adapters
from lightning_megatron.adoption.adopt import adopt
from lightning_megatron.topology.degrees import infer_degrees
from tests.adoption.families import FAMILIES
from tests.adoption.harness import Training, problems_of

LINEAR = ["q_proj", "o_proj"]
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}

REFUSED = {
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=[]),
    "VERA": peft.VeraConfig(target_modules=LINEAR, r=8),
    "OFT": peft.OFTConfig(target_modules=LINEAR, r=0, oft_block_size=4),
    "LOHA": peft.LoHaConfig(target_modules=LINEAR),
    "ADALORA": peft.AdaLoraConfig(target_modules=LINEAR, total_step=10),
    "LN_TUNING": peft.LNTuningConfig(target_modules=["q_norm"]),
    "TRAINABLE_TOKENS": peft.LoraConfig(target_modules=LINEAR, trainable_token_indices=[1]),
    "MiCALinearVariant": peft.LoraConfig(target_modules=LINEAR, init_lora_weights="mica"),
    "DoraEmbeddingVariant": peft.LoraConfig(target_modules=["embed_tokens"], use_dora=True),
    "PREFIX_TUNING": peft.PrefixTuningConfig(**PROMPT),
    "PROMPT_TUNING": peft.PromptTuningConfig(**PROMPT),
    "ensure_weight_tying": peft.LoraConfig(
        target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True
    ),
}


def problems(config: peft.PeftConfig, **layout: int) -> list[str]:
    model = peft.get_peft_model(adopt(FAMILIES["qwen3"].build().float()), config)
    join_adapters(model)
    given = {"tp": 1, "pp": 1, "cp": 1, "dp_replicate": 1, "zero": 1} | layout
    return adapter_problems(model, infer_degrees(2, **given))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_rule_under_tp_is_refused_by_name(name):
    found = problems(REFUSED[name], tp=2)
    assert found
    assert all(name in problem and "nearest valid: " in problem for problem in found)


@pytest.mark.parametrize("name", ["PREFIX_TUNING", "ADALORA"])
def test_methods_that_look_at_all_layers_are_refused_under_pp(name):
    assert name in problems(REFUSED[name], pp=2)[0]


def test_methods_within_layers_run_under_pp():
    assert problems(REFUSED["VERA"], pp=2) == []


def test_layers_of_two_places_are_refused_under_pp():
    config = peft.LoraConfig(target_modules=LINEAR, layer_replication=[(0, 2), (1, 2)])
    assert "layer_replication" in problems(config, pp=2)[0]
    assert problems(config, tp=2) == []


def test_an_adapter_without_a_rule_is_found_before_a_run():
    model = peft.get_peft_model(adopt(FAMILIES["llama"].build()), REFUSED["VERA"])
    assert "VERA" in problems_of(Training(model, "causal"), {"tp": 2}, 2)


class Linear4bit(nn.Linear):
    __module__ = "bitsandbytes.nn.modules"


@pytest.mark.parametrize("name", ["bitsandbytes", "uint8"])
def test_a_quantized_model_is_refused_by_name(name):
    model = FAMILIES["llama"].build()
    layer = model.model.layers[1].mlp.up_proj
    if name == "uint8":
        layer.weight = nn.Parameter(layer.weight.to(torch.uint8), requires_grad=False)
    else:
        layer.__class__ = Linear4bit
    with pytest.raises(ConfigError, match=rf"layers.1.mlp.up_proj: .* quantized .*{name}"):
        adopt(model)
