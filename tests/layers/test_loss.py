import pytest
import torch
from torch.nn import functional as F

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from tests.comm import lockstep
from tests.layers.parity import close, distribute, make_topology

VOCAB = 16
OPTIONS = [
    {},
    {"label_smoothing": 0.2},
    {"z_loss": 0.3},
    {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 3},
    {"reduction": "sum"},
    {"reduction": "none", "label_smoothing": 0.1},
]


def _data():
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(2, 9, VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (2, 9), generator=generator)
    targets[0, :3] = -100
    return logits, targets


def _reference(logits, targets, options):
    """`F.cross_entropy` and, written out, the z-loss."""
    options = {"ignore_index": -100, "reduction": "mean", **options}
    z = options.pop("z_loss", 0.0)
    flat, targets_n = logits.reshape(-1, VOCAB), targets.reshape(-1)
    counts = targets_n != options["ignore_index"]
    penalty = z * torch.logsumexp(flat, -1) ** 2 * counts
    loss = F.cross_entropy(flat, targets_n, **options)
    if options["reduction"] == "none":
        return (loss + penalty).view(targets.shape)
    return loss + penalty.sum() / (counts.sum() if options["reduction"] == "mean" else 1)


def _compare(layer_options, axis=None, topology=None):
    logits, targets = _data()
    if layer_options.get("ignore_index") == 3:
        targets = targets.masked_fill(targets == -100, 3)
    whole = logits.clone().requires_grad_()
    expected = _reference(whole, targets, layer_options)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    expected.backward(upstream)
    layer = VocabParallelCrossEntropy(**layer_options)
    mine, grad = logits, whole.grad
    if topology is not None:
        layer.distribute(topology)
        mine, grad = (t.chunk(axis.size, -1)[axis.rank] for t in (logits, whole.grad))
    mine = mine.clone().requires_grad_()
    found = layer(mine, targets)
    close(f"loss {layer_options}", found, expected)
    found.backward(upstream)
    close(f"gradient {layer_options}", mine.grad, grad)
    return found.detach()


def _run_split(tp):
    topology = make_topology(tp)
    torch.manual_seed(1)
    values = [_compare(options, topology.tp, topology) for options in OPTIONS]
    _check_low_precision(topology)
    _check_targets_outside(topology)
    _check_whole_logits(topology)
    return values


def _check_low_precision(topology):
    """Logits in bfloat16: the softmax is float32, gradients come back in bfloat16."""
    logits, targets = _data()
    low = logits.bfloat16()
    mine = low.chunk(topology.tp.size, -1)[topology.tp.rank].clone().requires_grad_()
    layer = VocabParallelCrossEntropy(vocab_size=VOCAB)
    layer.distribute(topology)
    loss = layer(mine, targets)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(low.float().view(-1, VOCAB), targets.view(-1))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert mine.grad.dtype == torch.bfloat16


def _check_targets_outside(topology):
    logits, targets = _data()
    layer = VocabParallelCrossEntropy()
    layer.distribute(topology)
    mine = logits.chunk(topology.tp.size, -1)[topology.tp.rank]
    with pytest.raises(IndexError, match="Target 16"):
        layer(mine, targets.masked_fill(targets == 1, VOCAB))


def _check_whole_logits(topology):
    """Logits that every rank holds whole are recognised, by size or by being equal."""
    logits, targets = _data()
    expected = _reference(logits, targets, {})
    for layer in (VocabParallelCrossEntropy(), VocabParallelCrossEntropy(vocab_size=VOCAB)):
        layer.distribute(topology)
        close("whole logits", layer(logits, targets), expected)
    unsure = VocabParallelCrossEntropy()
    unsure.distribute(topology)
    zeros = torch.zeros_like(logits).chunk(topology.tp.size, -1)[0]
    assert unsure(zeros, targets).item() == pytest.approx(torch.tensor(VOCAB).log().item())
    close("after zeros", unsure(logits, targets), expected)


def _nearly_whole():
    topology = make_topology(2)
    logits, targets = _data()
    layer = VocabParallelCrossEntropy()
    layer.distribute(topology)
    with pytest.raises(ConfigError, match=r"not deterministic.*nearest valid: vocab_size=16"):
        layer(logits * (1 + 1e-3 * topology.tp.rank), targets)


def test_logits_of_a_kernel_that_is_not_deterministic_are_refused(pool):
    pool.run(2, _nearly_whole)


def _masked(fill):
    """Each half of the vocabulary has a token that is never to be drawn."""
    topology = make_topology(2)
    logits, targets = _data()
    logits[..., 3] = logits[..., 11] = fill
    targets = targets.masked_fill((targets == 3) | (targets == 11), 0)
    expected = _reference(logits, targets, {})
    for mine in (logits, logits.chunk(2, -1)[topology.tp.rank]):
        layer = VocabParallelCrossEntropy()
        layer.distribute(topology)
        close("masked", layer(mine, targets), expected)


def _zeros_first():
    """The first logits of all parts are zeros, as before anything was learned of their tokens."""
    topology = make_topology(2)
    logits, targets = torch.zeros(40, VOCAB, dtype=torch.float64), torch.zeros(40).long()
    logits[-1, 12] = 1.0
    layer = VocabParallelCrossEntropy()
    layer.distribute(topology)
    expected = _reference(logits, targets, {})
    close("zeros first", layer(logits.chunk(2, -1)[topology.tp.rank], targets), expected)


def test_parts_may_begin_alike(pool):
    pool.run(2, _zeros_first)


@pytest.mark.parametrize("fill", [-1e9, float("-inf")])
def test_tokens_may_be_masked_in_every_part(pool, fill):
    pool.run(2, _masked, fill)


@pytest.mark.parametrize("tp", [2, 4])
def test_split_logits_give_the_loss_of_whole_ones(pool, tp):
    first, *others = pool.run(tp, _run_split, tp)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_each_of_many_ranks_may_hold_one_logit():
    lockstep.run(VOCAB, _run_split, VOCAB)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_undistributed_loss_is_cross_entropy(options):
    torch.manual_seed(1)
    _compare(options)


def test_nothing_to_learn_from_is_nan_as_in_torch():
    logits = torch.randn(2, VOCAB)
    assert VocabParallelCrossEntropy()(logits, torch.full((2,), -100)).isnan()


def _head_and_loss(tp):
    """The logits are never gathered: the only traffic of the loss is three numbers a position."""
    topology = make_topology(tp)
    torch.manual_seed(0)
    head = distribute(ColumnParallelLinear(8, VOCAB, bias=False), topology)
    loss = VocabParallelCrossEntropy(vocab_size=VOCAB)
    loss.distribute(topology)
    with torch.profiler.profile(record_shapes=True) as profile:
        loss(head(torch.randn(2, 3, 8)), torch.zeros(2, 3, dtype=torch.long))
    return [e.input_shapes for e in profile.events() if "gloo:" in e.name or "c10d::" in e.name]


def test_loss_never_gathers_logits(pool):
    for shapes in pool.run(2, _head_and_loss, 2):
        assert shapes
        assert all(VOCAB not in flat for event in shapes for flat in _flattened(event))


def _flattened(shapes):
    for shape in shapes:
        if shape and isinstance(shape[0], list):
            yield from _flattened(shape)
        else:
            yield shape


@pytest.mark.parametrize(
    "options", [{"label_smoothing": 1.5}, {"z_loss": -1.0}, {"reduction": "median"}]
)
def test_wrong_options(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        VocabParallelCrossEntropy(**options)
