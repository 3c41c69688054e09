"""The reference model is the Llama of the Hugging Face library, tensor by tensor."""

import pytest
import torch
from torch.nn import functional as F

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.models.weights import (
    config_from_hugging_face,
    from_hugging_face,
    to_hugging_face,
)
from tests.layers.parity import distribute, finished_gradient, local_part, make_topology

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _theirs(kind="Llama", **fields):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **fields)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    _use_norms_in_full_precision(model)
    model.double()
    # Norms and biases start out as ones and zeros, which would hide a mix-up.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _use_norms_in_full_precision(model):
    """Their norm computes in float32 even in a float64 model, which costs eight digits."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                size, eps = child.weight.shape[0], child.variance_epsilon
                setattr(parent, name, torch.nn.RMSNorm(size, eps))


def _ours(config, state):
    model = Transformer(config).double()
    model.load_state_dict(from_hugging_face(state, tied_embeddings=config.tied_embeddings))
    return model


def _batch():
    torch.manual_seed(1)
    return torch.randint(0, 32, (2, 12)), torch.randint(0, 32, (2, 12))


def _gradients(theirs):
    """Loss and logits; gradients by our name."""
    tokens, labels = _batch()
    logits = theirs(tokens, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    grads = {name: p.grad for name, p in theirs.named_parameters()}
    return loss, logits, from_hugging_face(grads)


def _close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("Llama", {"rope_theta": 500_000.0}),
        ("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
        ("Qwen2", {"tie_word_embeddings": False}),
    ],
)
def test_same_logits_and_gradients(kind, fields):
    theirs = _theirs(kind, **fields)
    ours = _ours(config_from_hugging_face(theirs.config.to_dict()), theirs.state_dict())
    expected_loss, expected_logits, expected_grads = _gradients(theirs)
    tokens, labels = _batch()
    logits = ours(tokens)
    _close(logits, expected_logits)
    loss = VocabParallelCrossEntropy()(logits, labels)
    _close(loss, expected_loss)
    loss.backward()
    for name, parameter in ours.named_parameters():
        _close(parameter.grad, expected_grads[name])


def _split(tp, config, state, expected_loss, expected_grads):
    topology = make_topology(tp, sequence_parallel=True)
    ours = distribute(_ours(config, state), topology)
    loss_layer = VocabParallelCrossEntropy(vocab_size=32)
    loss_layer.distribute(topology)
    tokens, labels = _batch()
    loss = loss_layer(ours(tokens), labels)
    _close(loss, expected_loss)
    loss.backward()
    for name, parameter in ours.named_parameters():
        grad = finished_gradient(ours, name, parameter, topology)
        _close(grad, local_part(ours, name, expected_grads[name], parameter))


@pytest.mark.parametrize("tp", [2, 4])
def test_same_gradients_when_split(pool, tp):
    theirs = _theirs()
    loss, _, grads = _gradients(theirs)
    config = config_from_hugging_face(theirs.config.to_dict())
    pool.run(tp, _split, tp, config, theirs.state_dict(), loss.detach(), grads)


def test_names_go_there_and_back():
    state = _theirs().state_dict()
    back = to_hugging_face(from_hugging_face(state))
    assert list(back) == list(state)
    assert all(back[name] is state[name] for name in state)
    tied = from_hugging_face({"model.embed_tokens.weight": torch.ones(1)}, tied_embeddings=True)
    assert set(tied) == {"trunk.embedding.tokens.weight", "trunk.head.weight"}
    assert set(to_hugging_face(tied, tied_embeddings=True)) == {"model.embed_tokens.weight"}


def test_unknown_weights_and_models_are_refused():
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.router\.weight: not the name"):
        from_hugging_face({"model.layers.0.mlp.router.weight": torch.ones(1)})
    with pytest.raises(ConfigError, match="model_type=mamba"):
        config_from_hugging_face({"model_type": "mamba"})
