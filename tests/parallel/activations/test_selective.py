"""Selective recomputation of blocks whose attention is not torch's own, or is compiled."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention.flex_attention import flex_attention

from lightning_megatron import ActivationConfig
from lightning_megatron.monitoring.flops import OperationCounter
from lightning_megatron.parallel.activations.checkpointing import recompute
from lightning_megatron.parallel.activations.config import blocks_to_recompute

SELECTIVE = ActivationConfig(recompute="selective")


class Block(nn.Module):
    """Of a network that ends in a layer which needs what the block makes."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.linear, self.out, self.attend = nn.Linear(8, 8), nn.Linear(8, 8), attend

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.attend(self.linear(x)))
        return y


def gradients(attend: Any, memory: ActivationConfig) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(Block(attend), Block(attend))
    recompute(net, blocks_to_recompute(net, memory), memory)
    net(torch.randn(2, 4, 8)).square().sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def check(attend: Any) -> None:
    expected = gradients(attend, ActivationConfig())
    assert len(expected) == 8
    for one, other in zip(gradients(attend, SELECTIVE), expected, strict=True):
        assert torch.equal(one, other)


@pytest.fixture
def flash() -> Iterator[list[float]]:
    """The operator that flash-attn registers, for CPUs; collects the dropout of every call."""
    if hasattr(torch.ops.flash_attn, "_flash_attn_forward"):
        pytest.skip("flash-attn is installed")
    library = torch.library.Library("flash_attn", "DEF")
    library.define(
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, "
        "bool causal, int window_size_left, int window_size_right, float softcap, "
        "Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
    )
    calls: list[float] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, *_: Any) -> tuple[Tensor, ...]:
        calls.append(dropout_p)
        return q * k + v, q.sum(), q.new_empty(0), q.new_empty(2)

    library.impl("_flash_attn_forward", forward, "CPU")
    yield calls
    library._destroy()


class Flash(Function):
    """As flash-attn calls its operator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout_p: float) -> Tensor:
        operator = torch.ops.flash_attn._flash_attn_forward
        y, sums, *_ = operator(x, x, x, dropout_p, 0.3, True, -1, -1, 0.0, None, False)
        ctx.save_for_backward(x, y, sums)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x = ctx.saved_tensors[0]
        return grad * (2 * x + 1), None


@pytest.mark.parametrize(("dropout", "calls"), [(0.0, 4), (0.1, 6)])
def test_attention_of_flash_attn_is_kept_like_torchs(
    flash: list[float], dropout: float, calls: int
) -> None:
    """Two blocks run it once in each of both networks, and with dropout once more."""
    check(lambda x: Flash.apply(x, dropout))
    assert len(flash) == calls


def test_what_is_compiled_stays_compiled() -> None:
    """Else flex attention, once in a block that is recomputed, would hold all scores."""
    runs = []

    def attend(x: Tensor) -> Tensor:
        runs.append(torch.compiler.is_compiling())
        return x.sin() + x

    check(torch.compile(attend, backend="eager"))
    assert all(runs), "traced, never run as it stands"


def test_operators_of_higher_order_pass() -> None:
    def attend(x: Tensor) -> Tensor:
        q = x.detach()[:, None]  # training by flex attention needs a GPU
        return x + flex_attention(q, q, q)[:, 0]  # type: ignore[operator]

    check(attend)
    counter = OperationCounter()
    counter.start()
    attend(torch.randn(2, 4, 8))
    counter.stop()
