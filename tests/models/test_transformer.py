import pytest
import torch
from torch.nn import functional as F

from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.layers.packed_documents import documents_of
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import Transformer
from tests.layers.parity import Case, check, distribute, make_topology

TINY = {"vocab_size": 16, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_seq_len": 8}
CONFIGS = {
    "llama": TransformerConfig(**TINY, num_kv_heads=2),
    "llama with one kv head, tied": TransformerConfig(
        **TINY, num_kv_heads=1, tied_embeddings=True, qkv_bias=True
    ),
    "qwen3, padded vocabulary": TransformerConfig(
        **TINY, num_kv_heads=2, qk_norm=True, vocab_padding=5, sliding_window=6
    ),
    "gpt2": TransformerConfig.preset("gpt2-124m", **TINY),
    "slopes": TransformerConfig(**TINY, positions="alibi"),
}


def _tokens():
    return (torch.randint(0, 11, (2, 8)),)


def _parity(tp, sequence_parallel):
    topology = make_topology(tp, sequence_parallel)
    for config in CONFIGS.values():
        model = lambda config=config: Transformer(config)  # noqa: E731
        check(Case(model, _tokens, output_split="features"), topology)
        positions = {"positions": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])}
        check(Case(model, _tokens, output_split="features", kwargs=positions), topology)
        documents = {"documents": documents_of([[3, 5], [1, 2, 4]], 8)}
        check(Case(model, _tokens, output_split="features", kwargs=documents), topology)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel"),
    [
        (2, False),
        (2, True),
        *(pytest.param(4, sp, marks=pytest.mark.thorough) for sp in (False, True)),
    ],
)
def test_distributed_transformer_equals_the_plain_one(pool, tp, sequence_parallel):
    pool.run(tp, _parity, tp, sequence_parallel)


def _padded_loss(tp):
    """Padding has no part in the loss, and no gradient."""
    topology = make_topology(tp)
    torch.manual_seed(0)
    few = Transformer(TransformerConfig(**{**TINY, "vocab_size": 13})).double()
    padded = Transformer(TransformerConfig(**TINY, vocab_padding=3)).double()
    state = few.state_dict()
    for name in ("trunk.embedding.tokens.weight", "trunk.head.weight"):
        state[name] = torch.cat((state[name], torch.randn(3, 16, dtype=torch.float64)))
    padded.load_state_dict(state)
    distribute(padded, topology)
    tokens, loss = torch.randint(13, (2, 8)), VocabParallelCrossEntropy(vocab_size=16, z_loss=1e-2)
    expected = VocabParallelCrossEntropy(z_loss=1e-2)(few(tokens), tokens)
    loss.distribute(topology)
    found = loss(padded(tokens), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    found.backward()
    if topology.tp.rank == tp - 1:
        assert not padded.trunk.head.weight.grad[-3:].any()
        assert padded.trunk.head.weight.grad[:-3].all()


@pytest.mark.parametrize("tp", [1, 2])
def test_padding_of_the_vocabulary_is_never_predicted(pool, tp):
    pool.run(tp, _padded_loss, tp)


def _low_precision(tp, sequence_parallel):
    """Under autocast and in bfloat16 the dtypes are those of the plain model."""
    topology = make_topology(tp, sequence_parallel)
    torch.manual_seed(0)
    for weights, autocast in ((torch.float32, True), (torch.bfloat16, False)):
        plain = Transformer(CONFIGS["llama"]).to(weights)
        parallel = Transformer(CONFIGS["llama"]).to(weights)
        parallel.load_state_dict(plain.state_dict())
        distribute(parallel, topology)
        loss = VocabParallelCrossEntropy(vocab_size=16)
        loss.distribute(topology)
        (tokens,) = _tokens()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            whole, mine = plain(tokens), parallel(tokens)
            expected, found = loss(whole, tokens), loss(mine, tokens)
        assert mine.dtype == whole.dtype == torch.bfloat16
        assert found.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        found.backward()
        assert all(p.grad is not None and p.grad.dtype == weights for p in parallel.parameters())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_low_precision(pool, sequence_parallel):
    pool.run(2, _low_precision, 2, sequence_parallel)


def _dropout(tp, sequence_parallel):
    """Residual streams stay equal on all ranks under dropout, and split parts differ."""
    topology = make_topology(tp, sequence_parallel)
    config = TransformerConfig(**TINY, num_kv_heads=2, dropout=0.5, attention_dropout=0.5)
    torch.manual_seed(0)
    model = Transformer(config)
    distribute(model, topology)
    torch.manual_seed(7)
    x = model.trunk.layers[0](torch.ones(2, 8 // (tp if sequence_parallel else 1), 16))
    return x.detach()


def test_dropout_is_equal_where_the_activation_is(pool):
    first, second = pool.run(2, _dropout, 2, False)
    assert torch.equal(first, second)
    first, second = pool.run(2, _dropout, 2, True)
    assert not torch.equal(first == 1, second == 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_have_the_loss_of_unpacked_ones(name):
    torch.manual_seed(0)
    model = Transformer(CONFIGS[name]).double()
    lengths, (tokens,) = [[3, 5], [1, 2, 5]], _tokens()
    targets = torch.randint(0, 11, (2, 8))
    found = _summed_loss(model, tokens, targets, documents=documents_of(lengths, 8))
    apart = [
        _summed_loss(model, x, y)
        for row, of_row in enumerate(lengths)
        for x, y in zip(tokens[row].split(of_row), targets[row].split(of_row), strict=True)
    ]
    expected = [sum(values) for values in zip(*apart, strict=True)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def _summed_loss(model, tokens, targets, **kwargs):
    """Sum of the losses, and its gradients."""
    logits = model(tokens.view(-1, tokens.shape[-1]), **kwargs)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


def test_mask_and_positions_reach_the_blocks():
    model = Transformer(CONFIGS["llama"]).double()
    (tokens,) = _tokens()
    plain = model(tokens)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    torch.testing.assert_close(model(tokens, torch.arange(8), causal), plain)
    torch.testing.assert_close(model(tokens, torch.arange(8) + 5), plain)
    assert not torch.allclose(model(tokens, mask=causal.triu(-1)), plain)


def test_a_step_learns():
    torch.manual_seed(0)
    model = Transformer(CONFIGS["llama"])
    (tokens,) = _tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
