"""The reference model is that of the Hugging Face library, family by family, tensor by tensor."""

import pytest
import torch
from torch.nn import functional as F

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.hf_config import (
    config_from_hugging_face,
    config_to_hugging_face,
    family_of,
)
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.models.weights import from_hugging_face, to_hugging_face
from tests.layers.parity import distribute, finished_gradient, local_part, make_topology
from tests.models.hub_models import (
    MODELS,
    VOCABULARY,
    file_state,
    hub_model,
    logits_of,
    some_tokens,
)

pytest.importorskip("transformers")


def _ours(config, state):
    model = Transformer(config).double().eval()
    model.load_state_dict(from_hugging_face(state, config))
    return model


def _close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_same_logits_here_and_there(name):
    theirs, tokens = hub_model(name), some_tokens()
    expected = logits_of(theirs, tokens)
    config = config_from_hugging_face(theirs.config.to_dict())
    ours = _ours(config, theirs.state_dict())
    with torch.no_grad():
        _close(ours(tokens), expected)
    padded = config_from_hugging_face(theirs.config.to_dict(), pad_vocab_to_multiple=8)
    assert (padded.vocab_size, padded.num_tokens) == (40, VOCABULARY)
    with torch.no_grad():
        _close(_ours(padded, theirs.state_dict())(tokens)[..., :VOCABULARY], expected)


@pytest.mark.parametrize("name", MODELS)
def test_names_and_sizes_go_there_and_back(name):
    theirs = hub_model(name)
    kind, state = theirs.config.model_type, file_state(name)
    for multiple in (1, 8):
        given = theirs.config.to_dict()
        config = config_from_hugging_face(given, pad_vocab_to_multiple=multiple)
        back = to_hugging_face(from_hugging_face(state, config), config, kind)
        tied = {"lm_head.weight"} if config.tied_embeddings else set()
        assert back.keys() == state.keys() - tied
        assert all(torch.equal(back[name], state[name]) for name in back)
        fields = config_to_hugging_face(config, kind)
        assert config_from_hugging_face(fields, pad_vocab_to_multiple=multiple) == config
    described = type(theirs.config)(**{k: v for k, v in fields.items() if k != "architectures"})
    known = described.to_dict()
    derived = {"architectures", "head_dim", "layer_types", "max_window_layers", "n_inner"}
    derived.add("pad_token_id")  # a matter of the tokenizer
    for field in fields.keys() & given.keys() - derived:
        assert known[field] == given[field], field
    same = {"mistral": "llama", "phi3": "llama", "phi3, window": "mistral"}
    assert family_of(config) == same.get(name, kind)


def test_names_of_the_base_model_and_computed_tables():
    theirs = hub_model("gpt2")
    config = config_from_hugging_face(theirs.config.to_dict())
    base = dict(theirs.transformer.state_dict()) | {"h.0.attn.bias": torch.ones(1)}
    assert "wte.weight" in base
    found = from_hugging_face(base, config)
    assert torch.equal(found["trunk.head.weight"], theirs.transformer.wte.weight)


def _gradients(theirs, config):
    """The loss, and gradients by our name."""
    tokens = some_tokens()
    logits = theirs(tokens, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 0).flatten())
    grads = torch.autograd.grad(loss, list(theirs.parameters()))
    names = [name for name, _ in theirs.named_parameters()]
    return loss.detach(), from_hugging_face(dict(zip(names, grads, strict=True)), config)


def _split(tp, cases):
    topology = make_topology(tp, sequence_parallel=True)
    tokens = some_tokens()
    for config, state, expected_loss, expected_grads in cases:
        ours = distribute(_ours(config, state), topology)
        loss_layer = VocabParallelCrossEntropy(vocab_size=config.vocab_size)
        loss_layer.distribute(topology)
        loss = loss_layer(ours(tokens), tokens.roll(1, 0))
        _close(loss, expected_loss)
        loss.backward()
        for name, parameter in ours.named_parameters():
            grad = finished_gradient(ours, name, parameter, topology)
            _close(grad, local_part(ours, name, expected_grads[name], parameter))


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_same_gradients_when_split(pool, tp):
    cases = []
    for name in ("llama", "qwen3, tied", "gpt2"):
        theirs = hub_model(name)
        config = config_from_hugging_face(theirs.config.to_dict(), pad_vocab_to_multiple=4)
        state = {k: v.detach() for k, v in theirs.state_dict().items()}
        cases.append((config, state, *_gradients(theirs, config)))
    pool.run(tp, _split, tp, cases)


def test_every_wrong_weight_is_named():
    theirs = hub_model("llama")
    config = config_from_hugging_face(theirs.config.to_dict())
    state = dict(theirs.state_dict()) | {"model.layers.0.mlp.router.weight": torch.ones(1)}
    del state["model.layers.1.mlp.up_proj.weight"]
    state["lm_head.weight"] = torch.ones(3, 32)
    with pytest.raises(ConfigError) as error:
        from_hugging_face(state, config)
    assert [p.split(":")[0] for p in error.value.problems] == [
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.mlp.router.weight",
        "lm_head.weight",
    ]


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"model_type": "mamba"}, "model_type=mamba: .*llama"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type=longrope"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "there is no factor"),
        ("llama", {"hidden_act": "tanh"}, "hidden_act=tanh"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantised"),
        ("qwen2, window", {"layer_types": None, "max_window_layers": 1}, "some of the layers"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx=True"),
        ("gpt2", {"embd_pdrop": 0.5}, "embd_pdrop=0.5"),
        ("mistral", {"mlp_bias": True}, "mlp_bias=True"),
    ],
)
def test_unsupported_models_are_refused(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        config_from_hugging_face(hub_model(name).config.to_dict() | changes)


def test_everything_unsupported_is_named_at_once():
    config = hub_model("llama").config.to_dict()
    config |= {"hidden_act": "tanh", "rope_parameters": {"rope_type": "dynamic"}}
    with pytest.raises(ConfigError) as error:
        config_from_hugging_face(config)
    assert len(error.value.problems) == 2


def test_what_no_family_has_is_not_written():
    with pytest.raises(ConfigError, match="llama: activation=relu.*mistral"):
        config_to_hugging_face(TransformerConfig(activation="relu"))
    with pytest.raises(ConfigError, match="--model-type gpt2: norm=rmsnorm"):
        config_to_hugging_face(TransformerConfig(), "gpt2")
    with pytest.raises(ConfigError, match="model_type=bert"):
        config_to_hugging_face(TransformerConfig(), "bert")
