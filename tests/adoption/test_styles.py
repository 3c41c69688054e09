"""Styles and plans of adopted models: what is refused, and what is right in spite of its look."""

from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from lightning_megatron import ConfigError, MegatronStrategy, adopt, gather
from lightning_megatron.adoption.heads import AdoptedAttention
from lightning_megatron.adoption.huggingface import plan_of
from lightning_megatron.adoption.styles import STYLES
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.sequential import StagePort
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.whole.splits import whole
from tests.adoption.families import FAMILIES
from tests.adoption.harness import KeepDouble, Training, fit, largest_difference

LAYER = "model.layers.*."
REFUSED_STYLES = {
    "all_reduce",
    "grouped_gemm",
    "moe_identity_expert",
    "packed_rowwise",
    "sequence_parallel",
}


def test_every_style_of_transformers_is_known_or_refused():
    assert set(ALL_PARALLEL_STYLES.keys()) - set(STYLES) == REFUSED_STYLES


@pytest.mark.parametrize("style", sorted(REFUSED_STYLES))
def test_unknown_style_is_refused_with_the_module(style):
    with pytest.raises(ConfigError, match=rf"layers.0.mlp.up_proj \(Linear\): style '{style}'"):
        adopt(FAMILIES["llama"].build(), tp_plan={f"{LAYER}mlp.up_proj": style})


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"model.layer.*.mlp.up_proj": "colwise"}, "'model.layer.*.mlp.up_proj' names nothing"),
        ({"model.norm": "colwise"}, "model.norm is a LlamaRMSNorm, .* a nn.Linear"),
        ({"model.norm": "embedding_rowwise"}, "model.norm is a LlamaRMSNorm"),
        ({"model.norm": "per_head", "lm_head": "rowwise", f"{LAYER}mlp": "colwise"}, "LlamaMLP"),
        ({"lm_head": "colwise", "*": "rowwise"}, "lm_head has the styles 'colwise' and 'rowwise'"),
        ({f"{LAYER}self_attn.q_proj": "colwise"}, "self_attn.k_proj.weight has no style"),
        ({f"{LAYER}mlp.up_proj.weight": "colwise"}, "is a parameter of Linear"),
    ],
)
def test_wrong_plan_is_refused_and_the_model_is_as_before(plan, words):
    model = FAMILIES["llama"].build()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=words):
        adopt(model, tp_plan=plan)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("trunk", "words"),
    [
        ("model.norm", "must be a list"),
        (["model.layer.*"], "'model.layer.*' names nothing in the model; nearest valid: "),
        (["model.norm", "model.norm"], "'model.norm' is given twice"),
        (["model", "model.norm"], "'model.norm' is a part of the item 'model'"),
        (["model.layers"], r"is a ModuleList, .* 'model.layers.\*'"),
    ],
)
def test_wrong_trunk_is_refused(trunk, words):
    with pytest.raises(ConfigError, match=words):
        adopt(FAMILIES["llama"].build(), trunk=trunk)


def test_plan_of_a_model_that_cannot_be_is_refused_under_tp_only(monkeypatch):
    monkeypatch.setitem(LlamaConfig.base_model_tp_plan, "layers.*.mlp.up_proj", "all_reduce")
    model = adopt(FAMILIES["llama"].build())
    assert not any(isinstance(module, AdoptedAttention) for module in model.modules())
    assert model.problems(Degrees(pp=2)) == []
    assert "layers.0.mlp.up_proj (Linear): style 'all_reduce'" in model.problems(Degrees(tp=2))[0]


def test_late_error_leaves_the_model_as_before():
    model = FAMILIES["llama"].build()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError):
        adopt(model, tp_plan={"model.norm": "per_head", "lm_head": "mla_kv_a_proj"})
    assert [type(module) for module in model.modules()] == before


def test_usual_items_stand_in_for_a_plan_that_a_model_lacks(monkeypatch):
    expected = plan_of(FAMILIES["llama"].build())
    monkeypatch.setattr(LlamaConfig, "base_model_pp_plan", None)
    assert plan_of(FAMILIES["llama"].build()) == expected


def test_shared_weight_is_split_in_one_way_only():
    with pytest.raises(ConfigError, match="embed_tokens 'embedding_rowwise', lm_head 'none'"):
        adopt(FAMILIES["qwen3"].build(), tp_plan={"model.embed_tokens": "embedding_rowwise"})


def test_linear_layer_that_computes_more_is_refused():
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(ConfigError, match="0 is a Doubled"):
        adopt(nn.Sequential(Doubled(4, 4)), tp_plan={"0": "colwise"})


SIX_HEADS = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}


def problems(model: nn.Module, tp: int) -> set[str]:
    layers = [m for m in model.modules() if isinstance(m, AdoptedAttention)]
    return {p for layer in layers for p in layer.problems(Degrees(tp=tp))}


def test_heads_that_tp_does_not_divide_are_refused_once_for_all_layers():
    model = adopt(FAMILIES["llama"].build(**SIX_HEADS))
    assert problems(model, 3) == set()
    assert problems(model, 2) == {
        "num_kv_heads=3, tp=2: one must be a multiple of the other; nearest valid: tp=1 or 3"
    }
    (four,) = (p for p in problems(model, 4) if p.startswith("num_heads"))
    assert "nearest valid: tp=3 or 6" in four
    # Of more ranks than heads, several would share the output projection's rows.
    assert any(p.startswith("num_heads=6, tp=12") for p in problems(model, 12))


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "bert", "t5", "phi3", "gpt2", "vit"])
def test_attention_knows_its_heads(family):
    layers = [m for m in adopt(FAMILIES[family].build()).modules() if isinstance(m, ParallelLayer)]
    heads = {(m.heads.queries, m.heads.keys) for m in layers if isinstance(m, AdoptedAttention)}
    assert heads == {(4, 2 if family in ("llama", "phi3") else 4)}


class Outputs(Training):
    """Keeps what a model returns beside its logits."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        out = self.lm(**batch, output_hidden_states=True, output_attentions=True)
        found = (*out.hidden_states, *out.attentions)
        self.found = [whole(x.detach()).clone() for x in found]
        self.shapes = [tuple(x.shape) for x in found]

    val_dataloader = Training.train_dataloader


def _outputs(family: str, layout: dict[str, Any] | None) -> Any:
    model = FAMILIES[family].build("eager")
    module = Outputs(model if layout is None else adopt(model), FAMILIES[family].batch)
    strategy: Any = "auto" if layout is None else MegatronStrategy(**layout)
    world = 1 if layout is None else layout["tp"] * layout.get("pp", 1)
    with KeepDouble():
        fit(module, strategy, world, limit_train_batches=1, limit_val_batches=1)
    return module.found, module.shapes


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_states_and_attention_weights_are_those_of_one_process(pool, family):
    found, shapes = pool.run(2, _outputs, family, {"tp": 2})[0]
    expected, all_shapes = _outputs(family, None)
    assert shapes == all_shapes
    assert len(found) == 5
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
@pytest.mark.parametrize("of_config", [False, True])
def test_outputs_of_layers_are_refused_under_a_pipeline(name, of_config):
    model = adopt(FAMILIES["llama"].build("eager"))
    given = {} if of_config else {name: True}
    if of_config:
        setattr(model.config, name, True)
    model.connect(Mock(StagePort))
    with pytest.raises(ConfigError, match=f"{name}=True: a pipeline stage has the outputs"):
        model(torch.ones(1, 4, dtype=torch.long), **given)


class Attention(nn.Module):
    """Attention whose count of heads has a name that nobody knows."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.head_dim, self.nh = size // count, count
        self.q, self.k, self.v, self.o = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(len(x), -1, self.nh, self.head_dim).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).flatten(2))


class Cosine(Attention):
    """Attention of known names, whose queries and keys are normalised over all heads."""

    def __init__(self, size: int, count: int) -> None:
        super().__init__(size, count)
        self.num_heads = count

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k = (nn.functional.normalize(f(x), dim=-1) * 4 for f in (self.q, self.k))
        q, k, v = (
            y.view(b, s, self.num_heads, self.head_dim).transpose(1, 2) for y in (q, k, self.v(x))
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class Plain(L.LightningModule):
    """Attention, and an MLP whose hidden features a softmax couples."""

    plan = {
        "attention.[qkv]": "colwise",
        "attention.o": "rowwise",
        "up": "colwise",
        "down": "rowwise",
        "table": "embedding_rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, adopted: bool, attention: type[Attention] = Attention) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(9, 8)  # tp does not divide its rows
        self.attention = attention(8, 4)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 9)
        self.double()
        if adopted:
            adopt(self, tp_plan=self.plan)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.attention(self.table(batch))
        x = x + self.down(self.up(x).softmax(-1))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3, eps=1e-5)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(48).view(8, 6) % 9, batch_size=4)


def _plain(tp: int, attention: type[Attention] = Attention) -> Any:
    module = Plain(adopted=tp > 1, attention=attention)
    fit(module, MegatronStrategy(tp=tp) if tp > 1 else "auto", tp)
    return gather(module) if tp > 1 else module.state_dict()


def test_code_that_nobody_knows_is_right_under_colwise(pool):
    assert largest_difference(pool.run(2, _plain, 2)[0], _plain(1)) < 1e-9


@pytest.mark.parametrize("tp", [2, 4])
def test_own_attention_that_couples_its_heads_is_right(pool, tp):
    found = pool.run(tp, _plain, tp, Cosine)[0]
    assert largest_difference(found, _plain(1, Cosine)) < 1e-9


def test_attention_that_is_the_model_itself_is_split():
    of_library = FAMILIES["llama"].build().model.layers[0].self_attn
    plan = {"[qkv]_proj": "colwise", "o_proj": "rowwise"}
    adopted = adopt(of_library, tp_plan=plan, trunk=[])
    assert isinstance(adopted, AdoptedAttention)
    assert (adopted.heads.queries, adopted.heads.keys) == (4, 2)
    own = adopt(Cosine(8, 4), tp_plan={"[qkv]": "colwise", "o": "rowwise"}, trunk=[])
    assert isinstance(own.q, ParallelLayer)
    assert not isinstance(own, AdoptedAttention)


def _masks() -> Any:
    """Attention weights and residual streams of a step with dropout."""
    module = Outputs(FAMILIES["starcoder2"].build("eager", attention_dropout=0.5), "causal")
    module.lm.config.use_cache = False
    for layer in module.lm.model.layers:
        layer.self_attn.residual_dropout = 0.5
    kept = []
    adopt(module.lm)

    def keep(attention: nn.Module, args: Any, out: Any) -> None:
        kept.append((out[1].detach() == 0).as_subclass(Tensor))
        kept.append((out[0].detach() == 0).as_subclass(Tensor))

    module.lm.model.layers[0].self_attn.register_forward_hook(keep)
    fit(module, MegatronStrategy(tp=2), 2, limit_train_batches=1, limit_val_batches=0)
    return kept


def test_ranks_drop_other_weights_of_their_heads_and_the_same_of_the_stream(pool):
    (heads, stream), (other_heads, other_stream) = pool.run(2, _masks)[:2]
    assert heads.shape == other_heads.shape
    assert not torch.equal(heads, other_heads)
    assert torch.equal(stream, other_stream)
    assert stream.any()
