"""Attention layers whose sequence is split over cp equal those of one process."""

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.alibi import Alibi
from lightning_megatron.layers.attention import CausalSelfAttention, SelfAttention
from lightning_megatron.layers.attention_exchange import kind_problems
from lightning_megatron.layers.context_layer import ContextAttention
from lightning_megatron.layers.context_split import GatherContext, SplitContext
from lightning_megatron.layers.cross_attention import CrossAttention
from lightning_megatron.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
)
from lightning_megatron.layers.norm import RMSNorm
from lightning_megatron.layers.packed_documents import documents_of
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.topology.context_layout import ContextConfig
from tests.layers.context import context_topology, on_context, same_as_whole

LENGTH = 13
DOCUMENTS = documents_of([[3, 9, 1], [13]], LENGTH)
LOWER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(2)
GRADED = torch.linspace(-1, 1, 2 * LENGTH * LENGTH, dtype=torch.float64).view(2, 1, LENGTH, LENGTH)


def causal(**options):
    return CausalSelfAttention(16, 4, 2, rotary=Rotary(4), **options)


CASES = {
    "causal": (causal, {}),
    "window": (lambda: causal(window=3, qk_norm_eps=1e-6), {}),
    "documents": (causal, {"documents": DOCUMENTS}),
    "positions": (causal, {"positions": torch.arange(LENGTH).flip(0)}),
    "mask": (causal, {"mask": LOWER}),
    "bias and documents": (causal, {"mask": GRADED, "documents": DOCUMENTS}),
    "slopes": (lambda: CausalSelfAttention(16, 4, rotary=Alibi()), {"documents": DOCUMENTS}),
    "all positions": (lambda: SelfAttention(16, 4, rotary=Rotary(4)), {}),
    "all of a document": (lambda: SelfAttention(16, 4, window=3), {"documents": DOCUMENTS}),
}
MASKED = ("mask", "bias and documents")


class Between(PipelineSequential):
    """Layers between a split and a join."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(SplitContext(), *layers, GatherContext())


class Pair(nn.Module):
    """Attention of one sequence to another, both split."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.join = SplitContext(), GatherContext()
        self.attention = CrossAttention(16, 4, 2, memory_size=8)

    def forward(self, x: Tensor, memory: Tensor, **kwargs) -> Tensor:
        return self.join(self.attention(self.split(x), self.split(memory), **kwargs))


class Whole(nn.Module):
    """Attention of a split sequence to one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.join = SplitContext(), GatherContext()
        self.attention = CrossAttention(16, 4, memory_size=8, whole_memory=True)

    def forward(self, x: Tensor, memory: Tensor, **kwargs) -> Tensor:
        return self.join(self.attention(self.split(x), memory, **kwargs))


class Reader(nn.Module):
    """A trunk that reads what another one wrote."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.encoder = PipelineSequential(SplitContext(), RMSNorm(8))
        attention = CrossAttention(16, 4, memory_size=8)
        self.decoder = PipelineSequential(SplitContext(), attention, GatherContext())

    def forward(self, x: Tensor, memory: Tensor, **kwargs) -> Tensor:
        memory = self.encoder(memory)
        memory = memory[:, self.first :] if self.first else memory
        return self.decoder(x, memory=memory, **kwargs)


class Own(nn.Module):
    """A user's own attention."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(ColumnParallelLinear(16, 16) for _ in range(3))
        self.attention = ContextAttention(is_causal, None if is_causal else 4)
        self.out = RowParallelLinear(16, 16)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, 4)) for y in column_parallel(x, list(self.qkv)))
        return self.out(self.attention(q, k, v, documents).flatten(2))


def _same(topology, plain, *inputs, **kwargs):
    weights = torch.linspace(-1, 1, LENGTH * 16, dtype=torch.float64).view(LENGTH, 16)

    def loss(module, *given):
        return (module(*given, **kwargs) * weights).sum()

    same_as_whole(plain.double(), topology, loss, *(x.double().requires_grad_() for x in inputs))


def _layers(kind, cp, tp, sequence_parallel):
    topology = context_topology(cp, tp, sequence_parallel=sequence_parallel, kind=kind)
    torch.manual_seed(0)
    for name, (build, kwargs) in CASES.items():
        if kind != "ring" or name not in MASKED:
            _same(topology, Between(build()), torch.randn(2, LENGTH, 16), **kwargs)
    x, memory = torch.randn(2, LENGTH, 16), torch.randn(2, 6, 8)
    _same(topology, PipelineSequential(Pair()), x, memory)
    _same(topology, PipelineSequential(Whole()), x, memory)
    _same(topology, Reader(), x, torch.randn(2, 12, 8))
    if not sequence_parallel:
        _same(topology, Reader(1), x, memory)
    lengths = torch.tensor([6, 2])
    mask = torch.ones(LENGTH, 6, dtype=torch.bool).tril()
    _same(topology, PipelineSequential(Whole()), x, memory, memory_lengths=lengths)
    _same(topology, PipelineSequential(Whole()), x, memory, memory_mask=mask)
    if kind != "ring":
        _same(topology, PipelineSequential(Pair()), x, memory, memory_lengths=lengths)
        both = {"memory_lengths": lengths, "memory_mask": mask}
        _same(topology, PipelineSequential(Pair()), x, memory, **both)
    for is_causal in (True, False):
        _same(topology, Between(Own(is_causal)), x, documents=DOCUMENTS)
        _same(topology, Between(Own(is_causal)), x)


@pytest.mark.parametrize(
    ("kind", "cp", "tp", "sequence_parallel"),
    [
        ("ring", 2, 1, False),
        ("gather", 2, 1, False),
        ("ulysses", 2, 2, True),
        ("auto", 2, 1, False),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                *(("gather", 2, 2, True), ("ulysses", 2, 2, False)),
                ("auto", 4, 1, False),
            )
        ),
    ],
)
def test_layers_equal_those_of_one_process(pool, kind, cp, tp, sequence_parallel):
    pool.run(cp * tp, _layers, kind, cp, tp, sequence_parallel)


def _refusals():
    topology = context_topology(2)
    x = torch.randn(1, LENGTH, 16)

    def said(layer, *inputs, **kwargs):
        module = on_context(PipelineSequential(layer), topology)
        topology.context.begin(0, forget=True)
        with pytest.raises(ConfigError) as error:
            module(*inputs, **kwargs)
        return str(error.value)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split, self.attention = SplitContext(), SelfAttention(16, 4)

        def forward(self, x: Tensor, **kwargs) -> Tensor:
            self.split(torch.cat((x, x[:, :1]), dim=1))
            return self.attention(self.split(x), **kwargs)

    found = {"lengths": said(Two(), x)}
    two = on_context(PipelineSequential(Two()), topology)
    topology.context.begin(0, forget=True)
    [item] = two.items()
    assert item(x, length=LENGTH).shape == (1, 8, 16)
    part = Between(causal())
    found["documents"] = said(part, x, documents=DOCUMENTS[:, :8])
    found["shape"] = said(Between(causal()), x, documents=DOCUMENTS)
    learning = GRADED[:1].float().requires_grad_()
    found["learning"] = said(Between(causal()), x, mask=learning)
    found["memory"] = said(CrossAttention(16, 4), x, x)
    flex = on_context(Between(causal()), topology)
    list(flex.items())[1].backend = "flex"
    topology.context.begin(0, forget=True)
    with pytest.raises(ConfigError) as error:
        flex(x)
    found["flex"] = str(error.value)
    config = ContextConfig(degree=2)
    assert list(flex.items())[1].context_problems(config, 1) == [found["flex"]]
    return found


def test_what_cannot_be_done_is_refused(pool):
    found = pool.run(2, _refusals)[0]
    assert found["lengths"] == (
        "cp=2: sequences of 13, 14 positions are cut into parts of 8, and without a causal mask "
        "attention must know where the one at hand ends; nearest valid: length=14, or documents, "
        "in the layer's call"
    )
    assert "8 positions meet 8 positions" in found["documents"]
    assert "must be one number for each of the [1, 13] positions" in found["shape"]
    assert "a mask that learns" in found["learning"]
    assert "nearest valid" in found["learning"]
    assert "sequences were cut into parts of no length" in found["memory"]
    assert found["flex"].startswith("attention_backend=flex, cp=2: ")
    assert found["flex"].endswith("nearest valid: auto")


def test_problems_of_kinds():
    layer = CausalSelfAttention(24, 6, dropout=0.1)
    assert layer.context_problems(ContextConfig(degree=4, kind="ulysses"), 1) == [
        "cp=4, kind='ulysses', num_heads=6, tp=1: heads of a tp rank must be divisible by cp; "
        "nearest valid: cp=3 or 6, or kind='ring'"
    ]
    assert layer.context_problems(ContextConfig(degree=4, kind="ring"), 1) == [
        "kind='ring', attention_dropout=0.1: a ring draws no masks of weights; "
        "nearest valid: kind='gather'"
    ]
    options = {"cp": 4, "tp": 2, "num_heads": 6, "dropout": 0.0}
    assert kind_problems("gather", **options) == kind_problems("auto", **options) == []
    assert kind_problems("ring", **options) == []
    assert kind_problems("ring", **options, ulysses=2) == [
        "cp=4, kind='ring', num_heads=6, tp=2: heads of a tp rank must be divisible by ulysses; "
        "nearest valid: ulysses=1 or 3, or ulysses=None"
    ]
