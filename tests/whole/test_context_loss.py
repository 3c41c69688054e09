"""Losses of sequences that cp ranks share are those of whole sequences, on every rank."""

import pytest
import torch
from torch import nn

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.embedding import VocabParallelEmbedding
from lightning_megatron.layers.linear import ColumnParallelLinear
from lightning_megatron.layers.linear_loss import LinearCrossEntropy
from lightning_megatron.layers.loss import VocabParallelCrossEntropy
from lightning_megatron.layers.norm import RMSNorm
from lightning_megatron.layers.sequential import PipelineSequential
from tests.layers.context import LENGTHS, context_topology, on_context, same_as_whole

B, H, V = 2, 8, 12
OPTIONS = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "z_loss": 0.1},
    {"label_smoothing": 0.2, "z_loss": 0.01, "ignore_index": 3},
]
LAYOUTS = [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}]


class Net(nn.Module):
    def __init__(self, options, *, chunked, inside):
        super().__init__()
        torch.manual_seed(0)
        items = {"embedding": VocabParallelEmbedding(V, H), "norm": RMSNorm(H)}
        self.inside, self.chunked = inside, chunked
        if chunked:
            items["head"] = LinearCrossEntropy(H, V, chunk_size=5, **options)
        else:
            items["head"] = ColumnParallelLinear(H, V)
            loss = VocabParallelCrossEntropy(**options)
            if inside:
                items["loss"] = loss
            else:
                self.loss = loss
        self.trunk = PipelineSequential(**items)
        self.double()

    def forward(self, tokens, targets):
        if self.inside or self.chunked:
            return self.trunk(tokens, targets=targets)
        return self.loss(self.trunk(tokens), targets)


def _weighted(net, tokens, targets):
    loss = net(tokens, targets)
    if loss.dim():
        assert loss.shape == targets.shape
        loss = (loss * torch.linspace(0, 1, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum()
    return loss


def _losses(layout):
    topology = context_topology(**layout)
    for options in OPTIONS:
        for kind in ({"chunked": True, "inside": True}, {"chunked": False, "inside": False},
                     {"chunked": False, "inside": True}):  # fmt: skip
            net = Net(options, **kind)
            for length in LENGTHS[1::2] if layout else LENGTHS:
                generator = torch.Generator().manual_seed(length)
                tokens = torch.randint(0, V, (B, length), generator=generator)
                targets = torch.randint(0, V, (B, length), generator=generator)
                ignored = options.get("ignore_index", -100)
                # Of 61 positions one rank has no label, nor has one of the padding's rank.
                targets[:, length // 4 + 1 :] = ignored
                same_as_whole(net, topology, _weighted, tokens, targets)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[pytest.mark.thorough] * (x == {"tp": 2})) for x in LAYOUTS],
    ids=str,
)
def test_losses_of_whole_sequences(pool, layout):
    pool.run(2 * layout.get("tp", 1), _losses, layout)


def _faults(cp):
    topology = context_topology(cp)
    tokens = torch.zeros(B, 9, dtype=torch.long)
    for kind in ({"chunked": True, "inside": True}, {"chunked": False, "inside": False},
                 {"chunked": False, "inside": True}):  # fmt: skip
        net = on_context(Net({}, **kind), topology)
        topology.context.begin(0, forget=True)
        for wrong in (tokens[:, :6], tokens[:, :-1], torch.zeros(B, 61, dtype=torch.long)):
            with pytest.raises(ConfigError, match=r"targets of shape .* whole sequences"):
                net(tokens, wrong)
        labels = tokens.clone()
        labels[0, -1] = V
        with pytest.raises(IndexError, match=f"Target {V} is out of bounds"):
            net(tokens, labels)  # which one rank has
        assert net(tokens, torch.full_like(tokens, -100)).isnan()  # as in one process


def test_targets_of_other_sequences_are_refused(pool):
    pool.run(2, _faults, 2)


def _messages(cp):
    topology = context_topology(cp)
    net = on_context(Net({}, chunked=False, inside=False), topology)
    topology.context.begin(0, forget=True)
    tokens, sent = torch.zeros(B, 61, dtype=torch.long), topology.meters["cp"]
    before = sent.calls, sent.bytes
    net(tokens, tokens).backward()
    return sent.calls - before[0], sent.bytes - before[1]


def test_a_mean_is_one_message_of_one_number(pool):
    assert pool.run(2, _messages, 2) == [(1, 8)] * 2
