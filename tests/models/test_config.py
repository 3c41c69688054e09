import subprocess
import sys

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.models.config import TransformerConfig, preset_names
from lightning_megatron.models.flops import (
    block_forward_flops,
    count_parameters,
    forward_flops,
    training_flops_per_token,
)
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.topology.degrees import Degrees

KNOWN = {
    "gpt2-124m": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
}


@pytest.mark.parametrize("name", preset_names())
def test_counted_parameters_are_those_of_the_model(name):
    config = TransformerConfig.preset(name)
    with torch.device("meta"):
        actual = sum(p.numel() for p in Transformer(config).parameters())
    assert count_parameters(config).total == actual == KNOWN.get(name, actual)


@pytest.mark.parametrize(
    "fields",
    [
        {"activation": "geglu", "bias": True, "qkv_bias": True},
        {"norm": "layernorm", "activation": "relu", "head_dim": 6},
        {"qk_norm": True, "out_bias": True, "num_kv_heads": 2, "vocab_padding": 4},
        {"mlp_bias": True, "qkv_bias": True, "rope_scaling": "llama3", "sliding_window": 8},
        {"norm": "layernorm", "bias": True, "positions": "learned", "tied_embeddings": True},
    ],
)
def test_counts_cover_every_option(fields):
    config = TransformerConfig(hidden_size=64, num_layers=2, num_heads=4, **fields)
    actual = sum(p.numel() for p in Transformer(config).parameters())
    assert count_parameters(config).total == actual


def test_flops_by_hand():
    config = TransformerConfig(
        vocab_size=10, hidden_size=8, num_layers=3, num_heads=2, num_kv_heads=1, mlp_size=16
    )
    # One block, 4 tokens: q and o are 8x8, k and v 8x4, three MLP matrices 8x16;
    # 2 heads of 4x4 scores and as many products with values, of head size 4.
    projections = 2 * 4 * (2 * 64 + 2 * 32 + 3 * 128)
    attention = 2 * (2 * 2 * 4 * 4 * 4)
    assert block_forward_flops(config, 4) == projections + attention
    assert block_forward_flops(config, 4, causal="half") == projections + attention // 2
    assert forward_flops(config, 4) == 3 * (projections + attention) + 2 * 4 * 8 * 10
    assert training_flops_per_token(config, 4) == 3 * forward_flops(config, 4) / 4


def test_flops_are_six_times_the_matrix_parameters_and_attention():
    config = TransformerConfig.preset("llama3-8b")
    count = count_parameters(config)
    matrices = count.num_layers * (count.attention + count.mlp) + count.head
    attention = 12 * config.num_layers * config.hidden_size * 8192
    assert training_flops_per_token(config, 8192) == 6 * matrices + attention


def test_measured_flops_agree():
    from torch.utils.flop_counter import FlopCounterMode

    config = TransformerConfig.preset("tiny", num_layers=2)
    model = Transformer(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 16, dtype=torch.long))
    assert counter.get_total_flops() == pytest.approx(forward_flops(config, 16), rel=0.02)


def test_everything_wrong_is_reported_at_once():
    with pytest.raises(ConfigError) as error:
        TransformerConfig(hidden_size=100, num_heads=8, num_kv_heads=3)
    assert [p.split(":")[0] for p in error.value.problems] == [
        "hidden_size=100, num_heads=8",
        "num_heads=8, num_kv_heads=3",
    ]
    with pytest.raises(ConfigError) as error:
        TransformerConfig(num_layers=0, activation="tanh", dropout=1.0, mlp_size=-1)
    assert len(error.value.problems) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("huge",), "preset=huge: .*llama3-8b"),
        (("lama3-8b",), "preset=lama3-8b: .*nearest valid: 'llama3-8b'"),
        (("tiny", {"layers": 3}), "layers: .*no such field; nearest valid: num_layers"),
        (("tiny", {"head_dim": 7}), "head_dim=7, positions=rotary: .*nearest valid: head_dim=8"),
    ],
)
def test_wrong_presets(arguments, words):
    name, *overrides = arguments
    with pytest.raises(ConfigError, match=words):
        TransformerConfig.preset(name, **(overrides[0] if overrides else {}))


def test_problems_of_a_layout():
    config = TransformerConfig.preset("gpt2-124m")
    assert config.problems(Degrees(tp=1)) == []
    (problem,) = config.problems(Degrees(tp=2))
    assert problem.startswith("vocab_size=50257, tp=2: ")
    assert "vocab_size=50256 or 50258" in problem
    six = TransformerConfig(num_heads=6, num_kv_heads=3, hidden_size=192, mlp_size=512)
    assert [p.split(":")[0] for p in six.problems(Degrees(tp=4))] == [
        "num_heads=6, tp=4",
        "num_kv_heads=3, tp=4",
    ]
    assert TransformerConfig(num_kv_heads=2).problems(Degrees(tp=4)) == []


def test_planning_imports_no_torch():
    code = "import sys; import lightning_megatron.models.flops; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
