"""Items that somebody might write into a trunk: some mix positions of a sequence, some do not."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron.layers import (
    CausalSelfAttention,
    ColumnParallelLinear,
    GatherContext,
    RowParallelLinear,
    SplitContext,
)
from lightning_megatron.layers.context_layer import ContextAttention
from lightning_megatron.layers.rotary import Rotary

WIDTH = 16


class Applies(nn.Module):
    """A function behind a projection."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner(x))


class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.flip(1).cumsum(1).flip(1)


class Gated(nn.Module):
    """Its gate lets nothing through as long as it has its first value."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * x.mean(1, keepdim=True)


class Table(nn.Module):
    """Adds its own table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(512, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class Turned(nn.Module):
    """Attention of its own that exchanges, with rotary positions that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.core = Rotary(WIDTH // 2), ContextAttention()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)) for y in self.qkv(x).chunk(3, -1))
        q, k = self.rotary(q, k)
        return x + self.core(q, k, v).flatten(2)


class Reversed(nn.Module):
    """Mixes in front of what exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = CausalSelfAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x.flip(1))


class Left(nn.Module):
    """Leaves a loss for the step to add."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.balance = self.router(x).softmax(-1).mean((0, 1)).square().sum()
        return x


def _convolved(x: Tensor) -> Tensor:
    return F.conv1d(x.mT, torch.ones(WIDTH, WIDTH, 3, dtype=x.dtype), padding=1).mT


MIXING: dict[str, tuple[Callable[[Tensor], Any] | type[nn.Module], str]] = {
    "mean": (lambda x: x + x.mean(1, keepdim=True), "torch.Tensor.mean"),
    "cumsum": (lambda x: x.cumsum(1), "torch.Tensor.cumsum"),
    "roll": (lambda x: x.roll(1, 1), "torch.Tensor.roll"),
    "flip": (lambda x: x.flip(1), "torch.Tensor.flip"),
    "first": (lambda x: x + x[:, :1], "torch.Tensor.__getitem__"),
    "pooled by the first": (lambda x: x[:, 0], "torch.Tensor.__getitem__"),
    "differences": (lambda x: x[:, 1:] - x[:, :-1], "torch.Tensor.__getitem__"),
    "twice": (lambda x: torch.cat([x, x], 1), "it"),
    "shift": (lambda x: torch.cat([0 * x[:, :1], x[:, :-1]], 1), "torch.Tensor.__getitem__"),
    "softmax": (lambda x: x.softmax(1), "torch.Tensor.softmax"),
    "scores": (lambda x: torch.einsum("bsh,bth->bst", x, x), "torch.functional.einsum"),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "torch.nn.functional.scaled_dot_product_attention",
    ),
    "sort": (lambda x: x.sort(1).values, "torch.Tensor.sort"),
    "fft": (lambda x: torch.fft.fft(x, dim=1).real, "torch.fft.fft"),
    "convolution": (_convolved, "torch.nn.functional.conv1d"),
    "custom": (Sums.apply, "torch.Tensor.cumsum"),
    "positions": (lambda x: x + torch.arange(x.shape[1])[:, None], "torch.arange"),
    "length": (lambda x: x / x.shape[1], "torch.Tensor.div"),
    "largest": (lambda x: x / x.abs().max(), "torch.Tensor.max"),
    "loss beside": (lambda x: (x, x.square().mean()), "torch.Tensor.mean"),
    "length beside": (lambda x: (x, x.shape[1]), "it"),
    "windows": (lambda x: x.unflatten(1, (-1, 4)).mean(2), "torch.Tensor.unflatten"),
    "triangle": (lambda x: torch.ones(2 * [x.shape[1]]).to(x).tril() @ x, "torch.ones"),
    "group norm": (lambda x: F.group_norm(x.mT, 4).mT, "torch.nn.functional.group_norm"),
    "in place": (lambda x: x.index_copy_(1, torch.zeros(1).long(), x[:, -1:]), "torch.Tensor"),
    "gate": (Gated, "torch.Tensor.mean"),
    "table": (Table, "torch.Tensor.__getitem__"),
    "rotary": (Turned, "torch.arange"),
    "before attention": (Reversed, "torch.Tensor.flip"),
}


class Experts(nn.Module):
    """Routes each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, choice = self.router(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, k = (choice == number).nonzero(as_tuple=True)
            if row.numel():
                out.index_add_(0, row, expert(tokens[row]) * weights[row, k, None])
        return x + out.view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = CausalSelfAttention(WIDTH, 2), nn.LayerNorm(WIDTH)
        self.up, self.down = ColumnParallelLinear(WIDTH, 64), RowParallelLinear(64, WIDTH)
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm(x)), 0.1, self.training)
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Adapted(nn.Module):
    """A projection with a small one beside it, whose product begins as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.b(F.dropout(self.a(x), 0.1))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x) * self.weight


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape[0], 1, 1, device=x.device) < 0.9
        return x + keep * torch.randn_like(x) + torch.empty_like(x).normal_()


class Skips(nn.Module):
    """Leaves its layer out by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            if random.random() < 0.5 and torch.rand(()) < 0.9:
                x = x + self.inner(F.dropout(x, 0.5))
        return x


class Pooled(nn.Module):
    """Takes the mean of the whole sequence and adds it to each position."""

    def __init__(self) -> None:
        super().__init__()
        self.join, self.cut = GatherContext(), SplitContext()

    def forward(self, x: Tensor) -> Tensor:
        whole = self.join(x)
        return x + self.cut(whole.mean(1, keepdim=True).expand_as(whole))


class Own(nn.Module):
    """Attention of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.core = nn.Linear(WIDTH, 3 * WIDTH), ContextAttention()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, -1)) for y in self.qkv(x).chunk(3, -1))
        return x + self.core(q, k, v).flatten(2)


class Flat(nn.Module):
    """Works on a table of tokens, by indices that it makes."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        rows = torch.arange(tokens.shape[0], device=x.device)
        best = tokens[rows, tokens.argmax(-1)]
        return (tokens - best[:, None]).view(x.shape)


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "mlp": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.SiLU()),
    "block": Block,
    "adapter": Adapted,
    "norm": Normed,
    "noise": Noisy,
    "experts": Experts,
    "joined": Pooled,
    "skips": Skips,
    "own attention": Own,
    "flat": Flat,
}
