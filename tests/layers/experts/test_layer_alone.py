"""A mixture in one process computes what a loop over tokens and experts does."""

import pytest
import torch

from lightning_megatron.layers.experts.config import RouterConfig
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from tests.layers.experts.reference import dense
from tests.layers.parity import close

B, S, H, F, E = 3, 7, 8, 6, 8
LOSSES = {"balance_weight": 0.3, "z_loss": 0.2}
VARIANTS = {
    "mixtral": (2, LOSSES),
    "not normalized": (3, {"normalize": False, **LOSSES}),
    "switch": (1, {"normalize": False, "balance": "batch", **LOSSES}),
    "batch": (2, {"balance": "batch", **LOSSES}),
    "no balance": (2, {"balance": "none", "z_loss": 0.2}),
    "nothing": (2, {"balance": "none"}),
    "sigmoid": (2, {"score": "sigmoid", **LOSSES}),
    "sigmoid, not normalized": (2, {"score": "sigmoid", "normalize": False, **LOSSES}),
    "deepseek": (
        3,
        {"score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "bias_update": 0.1}
        | LOSSES,
    ),
    "softmax with groups and bias": (2, {"groups": 2, "bias_update": 0.1, **LOSSES}),
    "groups of one": (2, {"groups": 8, "top_groups": 2, **LOSSES}),
    "all experts": (E, LOSSES),
    "capacity": (2, {"capacity_factor": 0.8, **LOSSES}),
    "capacity by position": (2, {"capacity_factor": 0.8, "drop": "position", **LOSSES}),
    "room for one": (2, {"capacity_factor": 0.01, "balance": "batch", **LOSSES}),
}


def build(top_k, options, seed=0, **others):
    torch.manual_seed(seed)
    moe = MixtureOfExperts(H, F, E, top_k, router=RouterConfig(**options), **others).double()
    with torch.no_grad():
        moe.router.weight.normal_()
        if moe.router.bias is not None:
            moe.router.bias = torch.randn(E, dtype=torch.float64) * 0.2
    return moe


def compare(moe, x, mask=None):
    given = () if mask is None else (mask,)
    results = []
    for run in (lambda x: (moe(x, *given), 0.0), lambda x: dense(moe, x, mask)):
        moe.zero_grad()
        own = x.clone().requires_grad_()
        y, loss = run(own)
        (y.cos().sum() + loss).backward()
        grads = {name: p.grad.clone() for name, p in moe.named_parameters() if p.grad is not None}
        results.append((y.detach(), own.grad, grads))
    (y, dx, grads), (y_, dx_, grads_) = results
    close("output", y, y_)
    close("gradient of the input", dx, dx_)
    for name, expected in grads_.items():
        close(f"gradient of {name}", grads[name], expected)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("masked", [False, True])
def test_loop_over_tokens(name, masked):
    moe = build(*VARIANTS[name])
    x = torch.randn(B, S, H, dtype=torch.float64)
    mask = None
    if masked:
        mask = torch.rand(B, S) < 0.6
        mask[0] = False
        mask[1, 0] = True
    compare(moe, x, mask)


@pytest.mark.parametrize("gate", [False, True])
def test_shared_expert(gate):
    moe = build(2, LOSSES, shared_size=5, shared_gate=gate)
    compare(moe, torch.randn(B, S, H, dtype=torch.float64))


class Block(torch.nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.norm, self.moe = torch.nn.LayerNorm(H, dtype=torch.float64), moe

    def forward(self, x):
        return x + self.moe(self.norm(x))


def test_compiler_of_the_user_runs_it_between_graphs():
    block = Block(build(*VARIANTS["capacity"]))
    x = torch.randn(B, S, H, dtype=torch.float64)
    counts, grads = [], []
    before = block.moe.router.statistics.now()
    for run in (block, torch.compile(block, backend="aot_eager")):
        block.zero_grad()
        run(x).square().sum().backward()
        grads.append(block.moe.router.weight.grad.clone())
        counts.append(block.moe.router.statistics.since(before).counts_e)
        before = block.moe.router.statistics.now()
    close("gradient", *grads)
    assert torch.equal(*counts)
