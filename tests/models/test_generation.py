"""Text is continued as the Hugging Face library continues it, token by token."""

import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.generation import generate
from lightning_megatron.models.hf_config import config_from_hugging_face
from lightning_megatron.models.mixture_config import MixtureConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.models.weights import from_hugging_face
from tests.layers.parity import distribute, make_topology
from tests.models.hub_models import hub_model

TINY = {"vocab_size": 16, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_seq_len": 32}


def model_like(name, multiple=1):
    theirs = hub_model(name)
    config = config_from_hugging_face(theirs.config.to_dict(), pad_vocab_to_multiple=multiple)
    model = Transformer(config).double()
    model.load_state_dict(from_hugging_face(theirs.state_dict(), config))
    return model


def prompts():
    """Tokens and where they are no padding: one prompt is shorter."""
    tokens = torch.randint(3, 37, (3, 7), generator=torch.Generator().manual_seed(2))
    kept = torch.ones_like(tokens, dtype=torch.bool)
    kept[1, :3] = False
    return tokens.masked_fill(~kept, 0), kept


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3, tied", "mistral, window", "gpt2", "qwen2"),
        *("mixtral", "qwen3_moe", "deepseek_v3"),
    ],
)
def test_greedy_is_that_of_the_library(name):
    pytest.importorskip("transformers")
    tokens, kept = prompts()
    theirs = hub_model(name).generate(
        tokens, attention_mask=kept.long(), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    ours = generate(model_like(name, 4), tokens, 12, is_token=kept)
    assert torch.equal(ours, theirs)


def tiny(**fields):
    torch.manual_seed(0)
    return Transformer(TransformerConfig(**{**TINY, "init_std": 0.5, **fields})).double()


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"sliding_window": 3}, {"positions": "learned"}, {"positions": "alibi"}),
        {"experts": MixtureConfig(num_experts=4, router=RouterConfig(capacity_factor=1.0))},
    ],
)
def test_the_cache_changes_nothing(fields):
    model, tokens = tiny(**fields).eval(), torch.randint(16, (2, 5))
    found = generate(model, tokens, 9)
    for _ in range(9):
        likeliest = model(tokens)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat((tokens, likeliest), dim=1)
    assert torch.equal(found, tokens)


def test_draws_follow_the_distribution():
    model, prompt = tiny(), torch.zeros(4000, 1, dtype=torch.long)
    with torch.no_grad():
        logits = model(prompt[:1])[0, -1]

    def frequencies(**options):
        draw = torch.Generator().manual_seed(0)
        drawn = generate(model, prompt, 1, generator=draw, **options)[:, -1]
        return torch.bincount(drawn, minlength=16) / 4000

    cold = (logits / 0.5).softmax(-1)
    assert (frequencies(temperature=0.5) - cold).abs().max() < 0.04
    best = logits.argsort(descending=True)
    assert set(frequencies(temperature=1.0, top_k=3).nonzero().flatten().tolist()) == set(
        best[:3].tolist()
    )
    sums = logits.softmax(-1)[best].cumsum(0)
    few = int((sums < 0.6).sum()) + 1
    kept = frequencies(temperature=1.0, top_p=0.6)
    assert set(kept.nonzero().flatten().tolist()) == set(best[:few].tolist())
    again = generate(model, prompt, 3, temperature=1.0, generator=torch.Generator().manual_seed(3))
    same = generate(model, prompt, 3, temperature=1.0, generator=torch.Generator().manual_seed(3))
    assert torch.equal(again, same)


def test_finished_prompts_are_filled_up():
    model, tokens = tiny(), torch.arange(8).view(4, 2)
    free = generate(model, tokens, 10)
    stop = int(free[0, 4])
    stopped = generate(model, tokens, 10, stop_token=stop)
    for row, whole in zip(stopped, free, strict=True):
        at = (whole[2:] == stop).nonzero().flatten()
        end = 2 + int(at[0]) + 1 if len(at) else stopped.shape[1]
        assert torch.equal(row[:end], whole[:end])
        assert (row[end:] == stop).all()
    alone = generate(model, tokens[:1], 10, stop_token=stop)
    assert alone.shape[1] <= 5
    assert alone[0, -1] == stop


def test_modes_are_as_before():
    model = tiny(dropout=0.5)
    model.trunk.layers[1].eval()
    before = [m.training for m in model.modules()]
    tokens = torch.zeros(1, 2, dtype=torch.long)
    assert torch.equal(generate(model, tokens, 4), generate(model, tokens, 4))
    assert before == [m.training for m in model.modules()]


def test_mistakes_are_named_at_once():
    model, tokens = tiny(positions="learned"), torch.zeros(1, 30, dtype=torch.long)
    with pytest.raises(ConfigError) as error:
        generate(model, tokens, 3, temperature=-1.0, top_k=0, top_p=2.0)
    assert len(error.value.problems) == 4
    with pytest.raises(ConfigError, match="padding must be on the left"):
        generate(model, tokens[:, :2], 3, is_token=torch.tensor([[True, False]]))
    with pytest.raises(ConfigError, match="model=Linear"):
        generate(torch.nn.Linear(1, 1), tokens, 3)


def _split(tp, cp, state, config, tokens, kept):
    topology = make_topology(tp, cp=cp)
    model = Transformer(config).double()
    model.load_state_dict(state)
    distribute(model, topology)
    for layer in model.trunk.modules():
        layer.in_trunk = True
    torch.manual_seed(topology.rank)  # ranks that draw by themselves would part
    drawn = generate(model, tokens, 8, temperature=1.0, is_token=kept)
    return generate(model, tokens, 12, is_token=kept), drawn


@pytest.mark.parametrize(
    ("tp", "cp"), [pytest.param(4, 1, marks=pytest.mark.thorough), (2, 2), (1, 2)]
)
def test_ranks_that_share_the_model_write_the_same(pool, tp, cp):
    pytest.importorskip("transformers")
    model, (tokens, kept) = model_like("qwen3, tied", 4), prompts()
    expected = generate(model, tokens, 12, is_token=kept)
    results = pool.run(tp * cp, _split, tp, cp, model.state_dict(), model.config, tokens, kept)
    for greedy, drawn in results:
        assert torch.equal(greedy, expected)
        assert torch.equal(drawn, results[0][1])


def _spread(degrees, state, config, tokens, kept, stop):
    """Each data rank has other prompts, and stops elsewhere."""
    topology = make_topology(**degrees)
    model = Transformer(config).double()
    model.load_state_dict(state)
    distribute(model, topology)
    for layer in model.trunk.modules():
        layer.in_trunk = True
    shift = topology.dp_shard.rank
    tokens, kept = tokens.roll(shift, 0)[: 2 + shift], kept.roll(shift, 0)[: 2 + shift]
    found = generate(model, tokens, 12, is_token=kept, stop_token=stop)
    alone = Transformer(config).double()
    alone.load_state_dict(state)
    expected = generate(alone, tokens, found.shape[1] - tokens.shape[1], is_token=kept)
    return found, expected


@pytest.mark.parametrize(
    "degrees", [{"tp": 1, "dp_shard": 2, "ep": 2}, {"tp": 2, "ep": 2}, {"tp": 1, "cp": 2, "ep": 2}]
)
def test_ranks_with_some_of_the_experts_each_write_their_own(pool, degrees):
    pytest.importorskip("transformers")
    model, (tokens, kept) = model_like("mixtral", 4), prompts()
    stop = int(generate(model, tokens, 6, is_token=kept)[0, -1])
    given = (degrees, model.state_dict(), model.config, tokens, kept, stop)
    for found, expected in pool.run(2, _spread, *given):
        for row, whole in zip(found.tolist(), expected.tolist(), strict=True):
            end = next((i for i in range(tokens.shape[1], len(row)) if row[i] == stop), len(row))
            assert row[:end] == whole[:end]
            assert set(row[end:]) <= {stop}
