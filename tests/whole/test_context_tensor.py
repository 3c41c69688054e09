"""What comes out of a trunk under cp gives, under every function, what the whole tensor gives."""

import copy
import io
import logging
import operator
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

from lightning_megatron._torch.graphs import DisableTorchFunctionSubclass
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.context_split import GatherContext, SplitContext
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.linear_loss import LinearCrossEntropy
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.layers.norm import RMSNorm
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.whole.splits import own_part, part_of, whole
from tests.layers.context import LENGTHS, context_topology, on_context, same_as_whole

B, H, V = 2, 8, 12


class _Square(Function):
    """An autograd function of the user's, which asks no class for rules."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.detach() ** 2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Net(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = PipelineSequential(
            embedding=VocabParallelEmbedding(V, H), act=nn.Tanh(), head=ColumnParallelLinear(H, V)
        )
        self.linear = nn.Linear(V, 3)
        self.norm = nn.LayerNorm(V)
        self.scale = nn.Parameter(torch.ones(V))
        self.column = ColumnParallelLinear(V, 4)
        self.chunked = LinearCrossEntropy(V, V, chunk_size=3)
        self.loss = VocabParallelCrossEntropy()
        self.second = PipelineSequential(RowParallelLinear(V, H, input_is_parallel=False))
        self.again = PipelineSequential(SplitContext(), nn.Linear(V, H))
        self.double()


def _shifted(logits, tokens, **options):
    rows = logits[:, :-1].reshape(-1, V)
    return F.cross_entropy(rows, tokens[:, 1:].reshape(-1), **options)


def _changed(x):
    x[..., 0] = 0.5
    return x.div_(2) * x


def _beside_a_split(net, x):
    """Under tp the first is split over tp, the second over cp and tp."""
    a, b = net.column(whole(x)), net.column(x)
    return a * b + b * a + torch.cat([a, b], -1)[..., 2:6] + torch.maximum(a.to(b), b) + b.to(a)


def _relued(x):
    mean = x.mean(1, keepdim=True)
    return F.relu(x, inplace=True) * mean + x.cumsum(1)


STAYS = {
    "double": lambda net, x, y: x.double() / 3,
    "detached": lambda net, x, y: x.detach() * x + 1,
    "labels": lambda net, x, y: x * (y != 3).unsqueeze(-1),
    "labels on the left": lambda net, x, y: (y == 3).unsqueeze(-1) + x,
    "scaled": lambda net, x, y: x * net.scale,
    "argmax": lambda net, x, y: x.argmax(-1),
    "maxima": lambda net, x, y: x.max(-1).values,
    "topk": lambda net, x, y: x.topk(2).indices,
    "softmax": lambda net, x, y: F.softmax(x, dim=-1),
    "entropy": lambda net, x, y: -(x.softmax(2) * x.log_softmax(2)).sum(-1),
    "norms": lambda net, x, y: x.norm(dim=-1, keepdim=True),
    "log probabilities": lambda net, x, y: (
        x.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    ),
    "flat": lambda net, x, y: x.flatten(0, 1).sum(-1),
    "flat labels": lambda net, x, y: x.view(-1, V) * (y != 3).view(-1, 1),
    "heads": lambda net, x, y: x.view(*x.shape[:2], 3, 4).softmax(-1),
    "unflatten": lambda net, x, y: x.unflatten(-1, (3, 4)).softmax(-1),
    "columns": lambda net, x, y: (x.mT.double() * net.scale[:, None]).exp().mT,
    "medians": lambda net, x, y: x.nanmedian(-1).values,
    "angles": lambda net, x, y: torch.atan2(x, net.scale).unsqueeze(-1).squeeze(-1),
    "halves": lambda net, x, y: x.chunk(2, -1)[0] * x.split([2, V // 2, 4], 2)[1],
    "one class": lambda net, x, y: x.select(-1, 3) + x.unbind(2)[5],
    "classes by index": lambda net, x, y: x.index_select(-1, torch.tensor([5, 0])),
    "joined": lambda net, x, y: torch.cat([x, x.exp()], -1).repeat_interleave(2, -1),
    "stacked": lambda net, x, y: torch.stack([x, x.exp()], -1),
    "beside a split": lambda net, x, y: _beside_a_split(net, x),
    "without the last": lambda net, x, y: x[:, :-1] * 2,
    "without the first": lambda net, x, y: x[:, 1:, :].exp(),
    "inner": lambda net, x, y: x[:, 1:][:, :-2],
    "some classes": lambda net, x, y: x[..., 2:5],
    "linear": lambda net, x, y: net.linear(x),
    "norm": lambda net, x, y: net.norm(x),
    "matrix": lambda net, x, y: x @ net.linear.weight.mT,
    "column": lambda net, x, y: net.column(x),
    "losses": lambda net, x, y: F.cross_entropy(x.view(-1, V), y.flatten(), reduction="none"),
    "again": lambda net, x, y: net.again(x),
    "second": lambda net, x, y: net.second(x),
    "second, of a whole": lambda net, x, y: net.again(x.roll(1, 1)),
}
"""Each cp rank computes its rows of the result."""
WHOLE = {
    "pooled": lambda net, x, y: net.linear(x.mean(1)),
    "mean": lambda net, x, y: (x**2).mean(),
    "last": lambda net, x, y: x[:, -1],
    "mask": lambda net, x, y: x[y != 3],
    "cumsum": lambda net, x, y: x.cumsum(1),
    "ours": lambda net, x, y: net.loss(x, y),
    "ours, flat": lambda net, x, y: net.loss(x.flatten(0, 1), y.flatten()),
    "ours, chunked": lambda net, x, y: net.chunked(x, y),
    "cross entropy": lambda net, x, y: F.cross_entropy(x.view(-1, V), y.view(-1), ignore_index=3),
    "of images": lambda net, x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="sum"),
    "smoothed": lambda net, x, y: F.cross_entropy(x.mT, y, label_smoothing=0.1),
    "weighted": lambda net, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), net.scale.detach()),
    "nll": lambda net, x, y: F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()),
    "probabilities": lambda net, x, y: F.cross_entropy(x[:, 0], x[:, -1].softmax(-1)),
    "mse": lambda net, x, y: F.mse_loss(x, torch.ones_like(x)),
    "own function": lambda net, x, y: _Square.apply(x),
    "in place": lambda net, x, y: _changed(x),
    "relu in place": lambda net, x, y: _relued(x),
    "numbers per position": lambda net, x, y: F.prelu(x, torch.linspace(0, 1, x.shape[1]).to(x)),
    "beside nothing": lambda net, x, y: torch.tensor(operator.eq(x, None)),
    "cat": lambda net, x, y: torch.cat([x, x], 1),
    "einsum": lambda net, x, y: torch.einsum("bsv,btv->bst", x, x),
    "whole": lambda net, x, y: whole(x),
    "copied": lambda net, x, y: copy.deepcopy(x.detach()),
    "numpy": lambda net, x, y: torch.from_numpy(x.detach().numpy().copy()),
    "tensor": lambda net, x, y: torch.tensor(x.detach()),
    "list": lambda net, x, y: torch.tensor(x.tolist()).double(),
    "stored": lambda net, x, y: _stored(x.detach()),
    "shape": lambda net, x, y: torch.tensor([*x.shape, x.numel(), len(x), x.size(1), x.dim()]),
    "accuracy": lambda net, x, y: (x.argmax(-1) == y).double().mean(),
}
"""All cp ranks have the same result."""


def _stored(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def _run(function, compare):
    def loss(net, tokens, labels):
        out = function(net, net.trunk(tokens), labels)
        compare(out)
        out = out.double()
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        found = (out * weight).sum()
        return found if found.requires_grad else found + 0 * net.scale.sum()

    return loss


TABLES = {"stays": STAYS, "whole": WHOLE}


def _functions(options, kind):
    table = TABLES[kind]
    topology, tp = context_topology(**options), options["tp"]
    net = Net()
    for name, function in table.items():
        for length in LENGTHS if tp == 1 else LENGTHS[2:3]:
            if (length < 3 and name in ("inner", "probabilities")) or (tp > 1 and name == "stored"):
                continue
            generator = torch.Generator().manual_seed(length)
            tokens = torch.randint(0, V, (B, length), generator=generator)
            labels = torch.randint(0, V, (B, length), generator=generator)
            outs = []
            try:
                same_as_whole(net, topology, _run(function, outs.append), tokens, labels)
            except Exception as error:
                raise AssertionError(f"{name}, {length} positions: {error}") from error
            rows = part_of(outs[1])
            by_features = name in ("heads", "unflatten", "beside a split")
            if (tp == 1 or not by_features) and name != "own function":
                assert (rows is not None) == (kind == "stays"), name
            torch.testing.assert_close(whole(outs[1].detach()), outs[0].detach())


@pytest.mark.parametrize(
    ("tp", "kind"),
    [
        pytest.param(tp, kind, marks=[pytest.mark.thorough] * ((tp, kind) == (2, "whole")))
        for tp in (1, 2)
        for kind in TABLES
    ],
)
def test_functions_give_one_process_numbers(pool, tp, kind):
    pool.run(2 * tp, _functions, {"tp": tp}, kind)


class Strange(nn.Module):
    """A module that knows nothing of cp, with a trunk."""

    def __init__(self, **items):
        super().__init__()
        torch.manual_seed(0)
        first = {"embedding": VocabParallelEmbedding(V, H), "act": nn.Tanh()}
        self.trunk = PipelineSequential(**first, **(items or {"head": nn.Linear(H, V)}))
        self.classes = nn.Linear(V, 3)
        self.double()


def _classified(net, tokens, labels):
    return F.cross_entropy(net.classes(net.trunk(tokens).mean(1)), labels[:, 0] % 3)


def _next_token(net, tokens, labels):
    rows = net.trunk(tokens)[:, :-1].reshape(-1, V)
    if not len(rows):
        return rows.sum() + net.trunk(tokens).sum()
    return F.cross_entropy(rows, tokens[:, 1:].reshape(-1))


def _logged(net, tokens, labels):
    logits = net.trunk(tokens)
    correct = (logits.argmax(dim=-1) == labels).float()
    mask = labels != 3
    accuracy = (correct * mask).sum() / mask.sum().clamp(min=1)
    top = (logits.topk(2).indices == labels.unsqueeze(-1)).any(-1).double().mean()
    perplexity = nn.CrossEntropyLoss()(logits.transpose(1, 2), labels).exp()
    return perplexity + accuracy.item() + top


def _metric(net, tokens, labels):
    from torchmetrics.classification import MulticlassAccuracy

    logits = net.trunk(tokens)
    metric = MulticlassAccuracy(num_classes=V, average="micro")
    metric.update(logits.transpose(1, 2), labels)
    metric.update(logits.detach().flatten(0, 1), labels.flatten())
    return logits.square().mean() + metric.compute()


def _pooled_inside(net, tokens, labels):
    return net.classes(net.trunk(tokens)).square().sum()


class Pool(nn.Module):
    def forward(self, x):
        return x.mean(1)


class Pair(nn.Module):
    """Returns containers, what it was given, and numbers that are none of a sequence."""

    def forward(self, x, weights=None):
        return {"x": (x, x.square()), "given": weights, "place": torch.arange(3)}


def _containers(net, tokens, labels):
    weights = torch.rand(B, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = net.trunk(tokens, weights=weights)
    assert out["given"] is weights
    assert out["place"].tolist() == [0, 1, 2]
    x, y = out["x"]
    assert x.shape == y.shape == (*tokens.shape, H)
    return (x * y).sum()


STRANGERS = {
    "pools behind the trunk": (_classified, {}),
    "shifts labels": (_next_token, {}),
    "logs by hand": (_logged, {}),
    "torchmetrics": (_metric, {}),
    "joins inside": (
        _pooled_inside, {"joined": GatherContext(), "pool": Pool(), "head": nn.Linear(H, V)}
    ),
    "containers": (_containers, {"pair": Pair()}),
}  # fmt: skip


def _strangers():
    topology = context_topology()
    for name, (loss, items) in STRANGERS.items():
        net = Strange(**items)
        for length in LENGTHS:
            generator = torch.Generator().manual_seed(length)
            tokens, labels = torch.randint(0, V, (2, B, length), generator=generator)
            try:
                same_as_whole(net, topology, loss, tokens, labels)
            except Exception as error:
                raise AssertionError(f"{name}, {length} positions: {error}") from error


def test_code_that_knows_nothing_of_cp(pool):
    pool.run(2, _strangers)


def _faults():
    topology = context_topology()
    tokens = torch.zeros(B, 61, dtype=torch.long)
    net = on_context(Strange(pool=Pool()), topology)
    with pytest.raises(ConfigError, match=r"shape \(2, 8\), .* parts of \[32\].*GatherContext\(\)"):
        net.trunk(tokens)
    net = on_context(Strange(short=Half()), topology)
    with pytest.raises(ConfigError, match=r"shape \(2, 16, 8\)"):
        net.trunk(tokens)
    with topology.context.suspended():
        assert net.trunk(tokens).shape == (B, 30, H)
    two = on_context(Strange(pair=Both()), topology)
    with pytest.raises(ConfigError, match="sequences of 61 and 63 positions have parts of 32"):
        two.trunk(tokens, other=torch.zeros(B, 63, H, dtype=torch.float64))
    two = on_context(Strange(pair=Both(), joined=GatherContext()), topology)
    with pytest.raises(ConfigError, match="GatherContext got .* sequences of 61 and 63 positions"):
        two.trunk(tokens, other=torch.zeros(B, 63, H, dtype=torch.float64))
    x = on_context(Strange(), topology).trunk(tokens)
    with DisableTorchFunctionSubclass(), pytest.raises(ConfigError, match=r"mul_.*whole\(x\)"):
        torch.no_grad()(x.mul_)(2)
    y = x.detach()
    torch.distributed.all_reduce(y)
    torch.testing.assert_close(y * 1, 2 * whole(x.detach()))
    with pytest.raises(ConfigError, match=r"div_: .*other tensors share its memory.*x\.clone\(\)"):
        x.div_(2)
    del y
    x.div_(2)
    with pytest.raises(ConfigError, match="changed in place"):
        _Square.apply(x).sum().backward()


class Half(nn.Module):
    def forward(self, x):
        return x.unflatten(1, (-1, 2)).mean(2) if x.shape[1] % 2 == 0 else x[:, :30]


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = SplitContext()

    def forward(self, x, other):
        return x + self.cut(other)


def test_what_is_no_part_of_a_sequence_is_refused(pool):
    pool.run(2, _faults)


def _residual():
    """Under sequence parallelism the residual stream has no meaning for plain code."""
    topology = context_topology(tp=2, sequence_parallel=True)
    tokens = torch.arange(B * 61).view(B, 61) % V
    plain = Strange(again=nn.Tanh())
    net = on_context(plain, topology)
    x = net.trunk(tokens)
    assert x.shape == (B, 61, H)
    assert own_part(x).shape == (B, 16, H)
    with pytest.raises(ConfigError, match="mean: sequence_parallel=True and cp > 1"):
        x.mean(1)
    torch.testing.assert_close(whole(x), plain.trunk(tokens))

    with pytest.raises(ConfigError, match=r"norm \(RMSNorm\) stands behind a GatherContext"):
        on_context(Strange(joined=GatherContext(), norm=RMSNorm(H)), topology)


def test_the_residual_stream_is_gathered_by_name_only(pool):
    pool.run(4, _residual)


def _looks():
    """What only looks at the output sends nothing; what gathers says so once."""
    topology = context_topology()
    net = on_context(Net(), topology)
    tokens = torch.zeros(B, 61, dtype=torch.long)
    meter = topology.meters["cp"]
    before = meter.calls
    x = net.trunk(tokens)
    assert part_of(x).place.layout.length == 61
    assert own_part(x).shape == (B, 32, V)
    assert x.shape == (B, 61, V)
    assert x.requires_grad
    assert re.search(r"positions \(\((16, 16\), \(32, 16|0, 16\), \(48, 13)\)\) of 61", repr(x))
    assert meter.calls == before
    with mock.patch.object(logging.getLogger(CONTEXT_TENSOR), "info") as said:
        for _ in range(2):
            x.mean(1)
    assert said.call_count == 1
    assert meter.calls == before + 1
    x.retain_grad()
    F.cross_entropy(x.flatten(0, 1), tokens.flatten()).backward()
    assert x.grad.shape == (B, 61, V)


CONTEXT_TENSOR = "lightning_megatron.whole.context_tensor"


def test_looking_is_free_and_gathering_is_said_once(pool):
    pool.run(2, _looks)
