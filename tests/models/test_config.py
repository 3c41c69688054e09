import subprocess
import sys
from dataclasses import asdict, replace

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.latent_sizes import LatentSizes
from lightning_megatron.models.config import TransformerConfig, preset_names
from lightning_megatron.models.flops import (
    block_forward_flops,
    count_parameters,
    forward_flops,
    training_flops_per_token,
)
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.topology.degrees import Degrees

LATENT = LatentSizes(q_rank=12, kv_rank=10, rope_dim=4, nope_dim=6, value_dim=5)
KNOWN = {
    "gpt2-124m": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v3": 671_026_404_352,  # 671B (arXiv 2412.19437), without biases of the choice
}
ACTIVE = {
    "mixtral-8x7b": 12_879_925_248,
    "qwen3-30b-a3b": 3_349_000_000,
    "deepseek-v3": 37_000_000_000,
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
        {
            "experts": MixtureConfig(
                **{"num_experts": 6, "mlp_size": 24, "shared_size": 40, "shared_gate": True},
                first_dense=1,
            ),
        },
        {"experts": MixtureConfig(num_experts=4), "activation": "gelu"},
        {"latent": LatentSizes(q_rank=12, kv_rank=10, rope_dim=4, nope_dim=6, value_dim=5)},
        {"latent": LatentSizes(kv_rank=10, rope_dim=4, nope_dim=6, value_dim=5)},
    ],
)
def test_counts_cover_every_option(fields):
    config = TransformerConfig(hidden_size=64, num_layers=2, num_heads=4, **fields)
    actual = sum(p.numel() for p in Transformer(config).parameters())
    assert count_parameters(config).total == actual


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_uses_some_of_the_experts(name):
    count = count_parameters(TransformerConfig.preset(name))
    assert count.active == pytest.approx(ACTIVE[name], rel=0.02)
    assert (
        count_parameters(TransformerConfig()).active == count_parameters(TransformerConfig()).total
    )


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


def test_flops_of_a_mixture_by_hand():
    experts = MixtureConfig(
        **{"num_experts": 10, "top_k": 3, "mlp_size": 5, "shared_size": 7, "shared_gate": True},
        first_dense=1,
    )
    config = TransformerConfig(hidden_size=8, num_layers=3, num_heads=2, experts=experts)
    plain = TransformerConfig(hidden_size=8, num_layers=3, num_heads=2)
    assert block_forward_flops(config, 4) == block_forward_flops(plain, 4)
    mlp = 3 * 8 * config.mlp_width
    mixture = 10 * 8 + 8 + 3 * 8 * (3 * 5 + 7)
    more = forward_flops(config, 4) - forward_flops(plain, 4)
    assert more == 2 * 2 * 4 * (mixture - mlp)


def test_flops_are_six_times_the_matrix_parameters_and_attention():
    config = TransformerConfig.preset("llama3-8b")
    count = count_parameters(config)
    matrices = count.num_layers * (count.attention + count.mlp) + count.head
    attention = 12 * config.num_layers * config.hidden_size * 8192
    assert training_flops_per_token(config, 8192) == 6 * matrices + attention


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"latent": LatentSizes(q_rank=48, kv_rank=64, rope_dim=16, nope_dim=32, value_dim=32)},
    ],
)
def test_measured_flops_agree(fields):
    from torch.utils.flop_counter import FlopCounterMode

    config = TransformerConfig.preset("tiny", num_layers=2, num_kv_heads=None, **fields)
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


MIXTURE = MixtureConfig(num_experts=6)


def test_parts_are_configurations_of_their_own():
    with pytest.raises(ConfigError, match=r"experts=.*: must be a MixtureConfig") as error:
        TransformerConfig(experts={"num_experts": 4}, latent="mla")
    assert len(error.value.problems) == 2
    with pytest.raises(ConfigError, match=r"experts.router=.*: must be a RouterConfig"):
        TransformerConfig(experts=MixtureConfig(router={"z_loss": 0.1}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"experts": {"num_experts": 4, "topk": 2}}, "experts.topk: .*valid: experts.top_k"),
        ({"latent": {"kv_rank": 8}}, "latent.rope_dim: LatentSizes needs a value"),
        ({"experts.top_k": "x"}, "experts.top_k='x': cannot be read as int"),
        ({"experts.topk": 2}, "experts.topk: MixtureConfig has no .*valid: experts.top_k"),
        ({"experts.router.scores": 2}, "experts.router.scores: Router.*experts.router.score"),
        (
            {"experts": {"num_experts": 4, "router": {"scale": 1.0, "score_": "s"}}},
            "experts.router.score_: RouterConfig has no such field",
        ),
        ({"experts": {"num_experts": 0}}, "experts.num_experts=0: .*at least 1"),
        ({"experts": {"num_experts": 2, "top_k": 3}}, "top_k=3"),
        ({"experts": {"num_experts": 2, "first_dense": 4}}, "no block would be a mixture"),
        ({"experts": {"num_experts": 2, "every": 0}}, "experts.every=0: .*at least 1"),
        ({"experts": {"num_experts": 2, "shared_gate": True}}, "there is no MLP to weigh"),
        ({"experts": MIXTURE, "mlp_bias": True}, "mlp_bias=True with experts"),
        ({"latent": {"kv_rank": 8, "rope_dim": 3, "nope_dim": 4, "value_dim": 4}}, "rope_dim=3"),
        ({"latent": LATENT, "num_kv_heads": 2}, "num_kv_heads=2 with latent"),
        ({"latent": LATENT, "positions": "learned"}, "positions=learned with latent"),
        ({"latent": LATENT, "qk_norm": True}, "qk_norm=True with latent"),
        ({"yarn": {"beta_fast": 9.0}}, "rope_scaling=none: it would have no effect"),
        ({"yarn": {"beta_slow": 64.0}, "rope_scaling": "yarn"}, "beta_slow=64.0: the second"),
    ],
)
def test_wrong_parts(fields, words):
    with pytest.raises(ConfigError, match=words):
        TransformerConfig.from_fields(fields)


def test_parts_come_back_from_plain_values():
    config = TransformerConfig(experts=MIXTURE, latent=LATENT, rope_scaling="yarn")
    plain = asdict(config)
    assert isinstance(plain["experts"]["router"], dict)
    assert TransformerConfig.from_fields(plain) == config
    assert TransformerConfig.preset("tiny", experts={"num_experts": 6}).experts == MIXTURE


def test_problems_of_experts_in_a_layout():
    config = TransformerConfig(experts=replace(MIXTURE, shared_size=9), mlp_size=15)
    assert config.problems(Degrees(ep=2, dp_shard=2)) == []
    problems = config.problems(Degrees(tp=2, ep=4, dp_shard=4))
    assert [p.split(":")[0] for p in problems] == [
        "experts.num_experts=6, ep=4",
        "experts.shared_size=9, tp=2",
    ]


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
