"""What a forward decides its recomputation takes over, and it counts once."""

import copy
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_megatron.layers.experts.decisions import Decisions, kept
from lightning_megatron.layers.sequential import PipelineSequential
from lightning_megatron.parallel.activations.checkpointing import measure, recompute
from lightning_megatron.parallel.activations.config import ActivationConfig, blocks_to_recompute
from lightning_megatron.parallel.block_transforms import recompute_groups
from tests.layers.experts.test_layer_alone import VARIANTS, H, build

FULL = ActivationConfig(recompute="full")
WAYS = {
    "full": FULL,
    "selective": ActivationConfig(recompute="selective"),
    "selective, products again": ActivationConfig(recompute="selective", keep=["norm"]),
    "groups": ActivationConfig(recompute="full", group=2),
}


class Block(nn.Module):
    """A mixture behind something that computes otherwise the second time."""

    def __init__(self, seed, name="deepseek"):
        super().__init__()
        self.moe = build(*VARIANTS[name], seed=seed)
        self.drift = 0.0
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        seen = x
        if self.drift:
            seen = torch.cat([torch.full_like(x[..., :1], self.drift), x[..., 1:]], -1)
            self.drift = -self.drift
        return x + self.moe(seen)


class Checkpointed(nn.Module):
    """A block that the user recomputes himself."""

    def __init__(self, block, reentrant):
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def trained(net):
    x = torch.randn(2, 5, H, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    y = net(x.requires_grad_())
    y.square().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


def network(names=("deepseek", "capacity")):
    return PipelineSequential(layers=[Block(seed, name) for seed, name in enumerate(names)])


def routers(net):
    return [m.router for m in net.modules() if hasattr(m, "router")]


def counted(net):
    taken = [(r.statistics.now(), r.step_counts_e) for r in routers(net)]
    return [
        tensor
        for statistics, step in taken
        for tensor in (statistics.counts_e, *statistics.totals.values(), step)
        if tensor is not None
    ]


def forget(net, config):
    blocks = blocks_to_recompute(net, config)
    assert len(blocks) == 2
    if config.group > 1:
        recompute_groups(net, blocks, config.group)
    else:
        recompute(net, blocks, config)


def same(found, expected):
    assert found
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", WAYS)
def test_same_gradients_and_counts(way):
    net = network()
    plain = copy.deepcopy(net)
    forget(net, WAYS[way])
    same(trained(net), trained(plain))
    same(counted(net), counted(plain))
    assert [m.runs for m in net.modules() if isinstance(m, Block)] == [2, 2]


@pytest.mark.parametrize("way", WAYS)
def test_near_tie_does_not_change_the_experts(way):
    net, config = network(("mixtral", "mixtral")), WAYS[way]
    for block in (m for m in net.modules() if isinstance(m, Block)):
        block.drift = 1e-9  # the only thing by which experts differ
        with torch.no_grad():
            block.moe.router.weight.zero_()[1::2, 0] = 1.0
    forget(net, config)
    decided = {router: [] for router in routers(net)}
    for router, found in decided.items():
        router.register_forward_hook(lambda *given, found=found: found.append(given[-1][0]))
    trained(net)
    with torch.no_grad():  # the drift alone, twice
        for _ in range(2):
            net(torch.zeros(1, 1, H, dtype=torch.float64))
    for found in decided.values():
        odd = [routes.experts_tk.remainder(2).bool() for routes in found]
        assert [bool(all_.all()) for all_ in odd] == [True, True, True, False]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_of_the_user_counts_once(reentrant):
    net = network(("deepseek", "deepseek"))
    plain = copy.deepcopy(net)
    own = nn.Sequential(*(Checkpointed(b, reentrant) for b in blocks_to_recompute(net, FULL)))
    same(trained(own), trained(plain))
    same(counted(own), counted(plain))


def test_what_does_not_learn_does_not_count():
    net = network(("deepseek", "deepseek"))
    teacher, student = routers(net)
    teacher.weight.requires_grad_(False)
    with torch.no_grad():
        net(torch.randn(2, 5, H, dtype=torch.float64))
    net.eval()
    trained(net)
    net.train()
    assert counted(net) == []
    trained(net)
    assert teacher.statistics.counts_e is None
    assert teacher.step_counts_e is None
    assert student.step_counts_e.sum() == 2 * 5 * student.top_k


def test_measuring_counts_nothing():
    net = network()
    plain = copy.deepcopy(net)
    blocks = blocks_to_recompute(net, FULL)
    recompute(net, blocks, FULL)
    measure(blocks, time.perf_counter, ("matmul",))
    same(trained(net), trained(plain))
    same(counted(net), counted(plain))
    assert blocks[0].runs > 2


def test_decisions_of_contexts_within_each_other():
    outer, inner, made = Decisions(), Decisions(), iter(range(9))
    with outer.noting():
        assert kept(lambda: next(made)) == 0
        with inner.noting():
            assert kept(lambda: next(made)) == 1
    for _ in range(2):  # a backward may run again
        with outer.replaying():
            assert kept(lambda: next(made)) == 0
            with Decisions().noting():  # a checkpoint within one that runs again
                assert kept(lambda: next(made)) == 1
            with pytest.raises(RuntimeError, match="more often"):
                kept(lambda: next(made))
        with inner.replaying():
            assert kept(lambda: next(made)) == 1
    assert kept(lambda: next(made)) == 2
