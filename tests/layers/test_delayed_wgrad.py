"""A backward in two parts gives the gradients of one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from lightning_megatron.layers.delayed_wgrad import WgradQueue, add_gradients, attach
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.testing import WorkerPool
from tests.layers.parity import make_topology

WIDTH = 6


class Twice(nn.Module):
    """Called twice, with an activation between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(torch.tanh(self.layer(x)))
        return out


class Shared(nn.Module):
    """Two layers with one weight, and a frozen one between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.frozen(torch.tanh(self.first(x)))))
        return out


class Recomputed(nn.Module):
    """Forgets its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Twice(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def others() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.LayerNorm(WIDTH),
        nn.Tanh(),
        nn.Linear(WIDTH, WIDTH),
    )


CASES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
    "ours": lambda: nn.Sequential(
        ColumnParallelLinear(WIDTH, 2 * WIDTH), nn.GELU(), RowParallelLinear(2 * WIDTH, WIDTH)
    ),
    "called twice": Twice,
    "shared and frozen": Shared,
    "recomputed": Recomputed,
    "made by a parametrization": others,
}


@pytest.mark.parametrize("name", CASES)
def test_two_parts_equal_one(name: str) -> None:
    torch.manual_seed(0)
    module = CASES[name]().double()
    inputs = [torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for x in inputs:
        module(x).square().sum().backward()
    expected = [p.grad for p in module.parameters()]
    expected_inputs = [x.grad for x in inputs]
    for tensor in (*module.parameters(), *inputs):
        tensor.grad = None

    wgrad_queue = WgradQueue()
    attach(module, wgrad_queue)
    pieces = []
    for x in inputs:  # two microbatches under way before the first weight part
        output = module(x)
        wgrad_queue.collecting = True
        output.square().sum().backward()
        del output  # a runner keeps nothing of the graph either
        wgrad_queue.collecting = False
        pieces.append(wgrad_queue.take())
    for x, gradient in zip(inputs, expected_inputs, strict=True):
        torch.testing.assert_close(x.grad, gradient, rtol=1e-13, atol=1e-13)
    last = list(module.parameters())[-1]
    assert last.grad is None, "nothing was deferred"
    for piece in pieces:
        add_gradients(piece)
        assert piece == []
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-13, atol=1e-13)


def test_without_collecting_backward_is_whole() -> None:
    module, wgrad_queue = CASES["plain"](), WgradQueue()
    attach(module, wgrad_queue)
    module(torch.ones(2, WIDTH)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    assert wgrad_queue.take() == []
    with torch.no_grad():
        assert module(torch.ones(2, WIDTH)).grad_fn is None


def parallel_job(sequence: bool) -> None:
    """Column and row over tp, split and whole."""
    topology = make_topology(tp=2, sequence_parallel=sequence)
    torch.manual_seed(0)
    if sequence:
        module = nn.Sequential(ColumnParallelLinear(WIDTH, 4), RowParallelLinear(4, WIDTH))
    else:  # both ranks hold the whole weight and compute with a view of it
        module = nn.Sequential(ColumnParallelLinear(WIDTH, 4, units=1))
    for layer in module:
        layer.distribute(topology)
    module.double()
    wgrad_queue = WgradQueue()
    attach(module, wgrad_queue)
    found = []
    for split in (False, True):
        x = torch.linspace(-1, 1, 2 * 2 * WIDTH, dtype=torch.float64).view(2, 2, WIDTH)
        x.requires_grad_()
        wgrad_queue.collecting = split
        module(x).square().sum().backward()
        wgrad_queue.collecting = False
        pieces = wgrad_queue.take()
        assert bool(pieces) == split
        add_gradients(pieces)
        found.append([x.grad, *(p.grad for p in module.parameters())])
        for parameter in module.parameters():
            parameter.grad = None
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_layers(pool: WorkerPool, sequence: bool) -> None:
    pool.run(2, parallel_job, sequence)
