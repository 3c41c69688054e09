"""The MLPs of several experts in one node: the numbers of one MLP for each, and less memory."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron import ConfigError
from lightning_megatron._torch import devices
from lightning_megatron.layers.delayed_wgrad import WgradQueue, add_gradients, attach
from lightning_megatron.layers.experts import grouped
from lightning_megatron.layers.experts.expert_mlp import expert_mlp
from lightning_megatron.layers.experts.mixture import MixtureOfExperts
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.layers.mlp import activation_function
from lightning_megatron.layers.size_checks import GATED, Activation
from lightning_megatron.monitoring.flops import OperationCounter
from lightning_megatron.parallel.activations.checkpointing import recompute
from lightning_megatron.parallel.activations.config import ActivationConfig, blocks_to_recompute

HIDDEN, SIZE = 5, 7
COUNTS = [3, 0, 5, 1]


def leaves(
    activation: Activation, dtype: torch.dtype, hidden: int = HIDDEN, size: int = SIZE
) -> list[Tensor]:
    """Rows and stacks."""
    draw = torch.Generator().manual_seed(1)
    into = (len(COUNTS), size, hidden)
    shapes = [(sum(COUNTS), hidden), into, (len(COUNTS), hidden, size)]
    if activation in GATED:
        shapes.insert(1, into)
    return [
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def dense(x: Tensor, weights: list[Tensor], activation: Activation) -> Tensor:
    """One MLP for each expert."""
    function, *into, down = activation_function(activation), *weights
    outputs = []
    for e, rows in enumerate(x.split(COUNTS)):
        first, *others = (rows @ w[e].T for w in into)
        a = function(first)
        for other in others:
            a = a * other
        outputs.append(a @ down[e].T)
    return torch.cat(outputs)


def gradients(y: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Gradients of a sum whose terms have different factors."""
    factors = torch.arange(y.numel()).view(y.shape).cos().to(y.dtype)
    return list(torch.autograd.grad((y * factors).sum(), tensors))


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_one_mlp_for_each_expert(activation: Activation, dtype: torch.dtype) -> None:
    """In float32 of sizes that the kernel takes."""
    sizes = (HIDDEN, SIZE) if dtype == torch.float64 else (8, 16)
    x, *weights = leaves(activation, dtype, *sizes)
    expected = dense(x, weights, activation)
    y = expert_mlp(x, weights, COUNTS, activation, gradient_factor=0.5)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    wanted = gradients(expected, [x, *weights])
    for i, (found, one) in enumerate(zip(gradients(y, [x, *weights]), wanted, strict=True)):
        scaled = one * 0.5 if i else one
        torch.testing.assert_close(found, scaled, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_each_row_has_a_factor(activation: Activation) -> None:
    """Its gradient needs no outputs, which are not kept."""
    x, *weights = leaves(activation, torch.float64)
    scale = torch.rand(sum(COUNTS), dtype=torch.float64)
    scale[1] = 0.0  # which has a gradient all the same
    leaf = [x, *weights, scale.requires_grad_()]
    wanted = gradients(dense(x, weights, activation) * scale.unsqueeze(-1), leaf)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = expert_mlp(x, weights, COUNTS, activation, scale_n=scale)
    assert y.shape == x.shape
    assert [t is x for t in kept if t.shape == x.shape] == [True]
    found = gradients(y, leaf)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_no_rows_at_all_give_gradients_of_zeros() -> None:
    for dtype in (torch.float64, torch.float32):
        experts = Experts(2, 8, 8).to(dtype)
        x = torch.zeros(0, 8, dtype=dtype, requires_grad=True)
        y = experts(x, [0, 0])
        assert y.shape == (0, 8)
        y.sum().backward()
        for parameter in experts.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()


def test_rows_and_gradients_of_other_strides() -> None:
    x, *weights = leaves("swiglu", torch.float32, 8, 16)
    strided = x.detach().t().contiguous().t().requires_grad_()
    for rows in (x, strided):
        expert_mlp(rows, weights, COUNTS, "swiglu").sum().backward()  # an expanded gradient
    torch.testing.assert_close(strided.grad, x.grad)


def test_autocast_chooses_the_format() -> None:
    x, *weights = leaves("swiglu", torch.float32, 8, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = expert_mlp(x, weights, COUNTS, "swiglu")
    assert y.dtype == torch.bfloat16
    assert {g.dtype for g in gradients(y, [x, *weights])} == {torch.float32}
    x, *weights = leaves("swiglu", torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert expert_mlp(x, weights, COUNTS, "swiglu").dtype == torch.float64


def test_frozen_matrices_get_no_gradient() -> None:
    x, gate, up, down = leaves("swiglu", torch.float64)
    weights = [gate.detach(), up, down]
    found = gradients(expert_mlp(x, weights, COUNTS, "swiglu"), [x, up, down])
    wanted = gradients(dense(x, weights, "swiglu"), [x, up, down])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_keeps_its_rows_and_what_they_become_first() -> None:
    """Not the result of the activation, nor its product with the other factor."""
    x, *weights = leaves("swiglu", torch.float32, 8, 16)
    known = {w.untyped_storage().data_ptr() for w in weights}
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        expert_mlp(x, weights, COUNTS, "swiglu")
    assert sum(kept) == sum(COUNTS) * (8 + 2 * 16)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation=swish"):
        Experts(2, 8, 8, "swish")  # type: ignore[arg-type]


def test_operations_are_counted_without_values() -> None:
    with torch.device("meta"):
        experts = Experts(4, 8, 16, "swiglu")
        x = torch.empty(10, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = experts(x, [10, 0, 0, 0])
        assert counter.get_total_flops() == 3 * 2 * 10 * 8 * 16
        y.backward(torch.empty_like(y))
    assert counter.get_total_flops() == 3 * 3 * 2 * 10 * 8 * 16


class Mixed(nn.Module):
    """A block with a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MixtureOfExperts(16, 32, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(x)
        return y


def counted(how: ActivationConfig) -> tuple[list[Tensor], int]:
    """Gradients of two blocks, and operations of forward and backward."""
    torch.manual_seed(0)
    net = nn.Sequential(Mixed(), Mixed())
    recompute(net, blocks_to_recompute(net, how), how)
    counter = OperationCounter()
    counter.start()
    net(torch.randn(2, 4, 16)).square().sum().backward()
    counter.stop()
    return [p.grad for p in net.parameters() if p.grad is not None], counter.flops


def test_selective_recomputation_keeps_products_of_experts() -> None:
    expected, flops = counted(ActivationConfig())
    for how in ("selective", "full"):
        found, again = counted(ActivationConfig(recompute=how))  # type: ignore[arg-type]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert (again == flops) == (how == "selective")


def test_a_zero_bubble_backward_defers_experts() -> None:
    block = Mixed().double()
    x = torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)
    block(x).square().sum().backward()
    expected = {name: p.grad for name, p in block.named_parameters()}
    block.zero_grad()
    queue = WgradQueue()
    attach(block, queue)
    y = block(x).square().sum()
    queue.collecting = True
    y.backward()
    queue.collecting = False
    tasks = queue.take()
    experts = block.moe.experts
    assert {id(p) for task in tasks for p in task.targets} >= {id(p) for p in experts.parameters()}
    assert experts.up.grad is None
    add_gradients(tasks)
    for name, p in block.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-12, atol=1e-12)


def test_a_call_sends_its_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads them on the device in nine products, for which the host would wait."""
    sent = []

    def from_host(*args: Any) -> Tensor:
        sent.append(args[0])
        return devices.from_host(*args)

    monkeypatch.setattr(grouped, "from_host", from_host)
    x, *weights = leaves("swiglu", torch.float32, 8, 8)
    expert_mlp(x, weights, COUNTS, "swiglu").sum().backward()
    assert sent == [[3, 3, 8, 9]]
