"""Cut and joined sequences give one process's numbers, whatever their length."""

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.context_split import GatherContext, SplitContext
from lightning_megatron.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.whole.context_rows import join, own_positions, split
from tests.layers.context import LENGTHS, context_topology, same_as_whole
from tests.layers.parity import close

B, H, V = 2, 8, 16
LAYOUTS = {
    "cp=2": {},
    "contiguous": {"order": "contiguous"},
    "tp=2": {"tp": 2},
    "sequence parallel": {"tp": 2, "sequence_parallel": True},
}


class Shift(nn.Module):
    """Something that mixes positions: each sees the mean of all, and its neighbour."""

    def forward(self, x):
        return x.roll(1, 1) * 0.5 + x.mean(1, keepdim=True)


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = VocabParallelEmbedding(V, H)
        self.places = PositionEmbedding(64, H)

    def forward(self, tokens, positions=None):
        return self.tokens(tokens) + self.places(tokens, positions)


class Turned(nn.Module):
    """Rotary embedding of the items' activation, as attention applies it."""

    def __init__(self):
        super().__init__()
        self.enter = ColumnParallelLinear(H, H)
        self.leave = RowParallelLinear(H, H)
        self.rotary = Rotary(4)

    def forward(self, x, positions=None):
        y = self.enter(x)
        context = self.enter.context
        where = {}
        if context is not None:
            where = {"layout": context.layout(y.shape[1]), "rank": context.cp.rank}
        heads = y.unflatten(-1, (-1, 4))
        q, _ = self.rotary(heads, heads, positions, **where)
        return x + self.leave(q.flatten(2))


def _build():
    torch.manual_seed(0)
    return PipelineSequential(
        embedding=Embedding(), turned=Turned(), joined=GatherContext(), mixed=Shift(),
        cut=SplitContext(), again=Turned(), whole=GatherContext(),
    ).double()  # fmt: skip


def _trained(module, tokens, weight, positions):
    given = {} if positions is None else {"positions": positions}
    return (module(tokens, **given) * weight).sum()


def _layers(options):
    topology = context_topology(**options)
    module = _build()
    for length in LENGTHS[1::2] if "tp" in options else LENGTHS:
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(0, V, (B, length), generator=generator)
        weight = torch.randn(B, length, H, generator=generator, dtype=torch.float64)
        rows = torch.randint(0, length, (B, length), generator=generator)
        for positions in (None, torch.arange(length).flip(0), rows):
            same_as_whole(module, topology, _trained, tokens, weight, positions)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n == "tp=2")) for n in LAYOUTS]
)
def test_trunk_that_joins_mixes_and_cuts_again(pool, name):
    pool.run(2 * LAYOUTS[name].get("tp", 1), _layers, LAYOUTS[name])


def _frames(module, x):
    return (module(x) ** 2).sum()


def _inputs(sequence_parallel, residual):
    """The gradient of a whole input arrives as a mean over the ranks."""
    topology = context_topology(tp=2, sequence_parallel=sequence_parallel)
    torch.manual_seed(0)
    first = RowParallelLinear(H, H, input_is_parallel=not residual)
    module = PipelineSequential(
        SplitContext(residual=residual), first, Turned(), ColumnParallelLinear(H, H),
        GatherContext(),
    ).double()  # fmt: skip
    for length in LENGTHS:
        x = torch.randn(B, length, H, dtype=torch.float64, requires_grad=True)
        torch.distributed.broadcast(x.data, 0)
        same_as_whole(module, topology, _frames, x)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_inputs_that_learn(pool, sequence_parallel, residual):
    pool.run(4, _inputs, sequence_parallel, residual)


def _functions(cp):
    topology = context_topology(cp)
    for order in ("zigzag", "contiguous"):
        layout = ContextLayout(5, cp, order)
        for dim in (0, 2, -1):
            shape = [3, 4, 7]
            shape[dim] = 5
            x = torch.arange(torch.Size(shape).numel()).view(shape)
            part = split(x, layout, topology.cp.rank, dim)
            assert part.shape[dim] == layout.local
            assert torch.equal(join(part, layout, topology.cp, dim), x)
        places = own_positions(layout, topology.cp.rank)
        assert places.tolist() == [n for c in layout.chunks(topology.cp.rank) for n in c]


def test_what_was_cut_is_joined_along_every_dim(pool):
    pool.run(3, _functions, 3)


def test_without_a_layout_nothing_is_cut():
    x = torch.randn(2, 5, 3, requires_grad=True)
    assert GatherContext()(SplitContext()(x)) is x


def test_a_tensor_of_another_length_is_refused():
    with pytest.raises(ConfigError, match=r"cp=2: a tensor of shape \(2, 4\) .* 5 positions"):
        split(torch.zeros(2, 4), ContextLayout(5, 2), 0)


def _outside():
    """Outside of a `PipelineSequential` everything is whole."""
    topology = context_topology()
    layer, x = Turned(), torch.randn(2, 5, H)
    for module in (layer, embedding := VocabParallelEmbedding(V, H), cut := SplitContext()):
        for child in module.modules():
            if hasattr(child, "distribute"):
                child.distribute(topology)
    assert cut(x) is x
    assert layer(x).shape == x.shape
    assert embedding(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, H)
    cut.in_trunk = True
    with topology.context.suspended():
        assert cut(x) is x
    close("part", cut(x), split(x, ContextLayout(5, 2), topology.cp.rank))
    with pytest.raises(ConfigError, match="got 3 positions"):
        topology.context.layout(3)


def test_outside_of_a_trunk_sequences_are_whole(pool):
    pool.run(2, _outside)
