"""A transformer and a training loop of plain PyTorch, which the layouts are held against.

Nothing here comes from our package: dense `nn.Linear` and `nn.Embedding`, an attention written out
as two matrix products and a softmax, `F.cross_entropy`, `clip_grad_norm_`, AdamW, float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Architecture = Literal["llama", "gpt", "deep", "qwen", "shallow", "mixture"]
"""``deep`` is ``llama`` with layers for eight pipeline stages, ``shallow`` with one, ``qwen`` with
norms of queries and keys, ``mixture`` with experts."""
IGNORED = -100
VOCABULARY, HIDDEN, HEADS, KV_HEADS, MLP = 32, 16, 4, 2, 24
EXPERTS, TOP_K, BALANCE, Z_LOSS = 4, 2, 0.1, 0.01
LAYERS: dict[Architecture, int] = {
    "llama": 2,
    "gpt": 2,
    "deep": 5,
    "qwen": 2,
    "shallow": 1,
    "mixture": 2,
}
LONGEST = 16
CLIP = 1.0
# The gradient of a key bias is zero but for rounding: softmax does not see a shift. With Adam's
# usual eps of 1e-8 its update would be rounding errors times lr / 1e-8.
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}


@dataclass(frozen=True)
class Data:
    """The global batches of a run, made from a seed alone."""

    steps: int = 3
    """The first has no moments, the second no bias correction in common with it."""
    batch: int = 8
    lengths: tuple[int, ...] = (8,)
    """Sequence lengths, taken in turn."""
    ignored: bool = False
    """Whether many targets do not count, unequally many in every sample."""

    first_labels: bool = False
    """Whether only the first label of each sample counts: ranks with later positions have none."""

    alike: bool = False
    """Whether all tokens of a batch are the same, and go to the same experts."""

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Tokens and targets, `[batch, length]` each, by step."""
        draw = torch.Generator().manual_seed(1)
        made = []
        for step in range(self.steps):
            length = self.lengths[step % len(self.lengths)]
            text = torch.randint(VOCABULARY, (self.batch, length + 1), generator=draw)
            if self.alike:
                text[:] = text[0, 0]
            tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            if self.ignored:
                kept = torch.randint(1, length + 1, (self.batch, 1), generator=draw)
                targets[torch.arange(length) >= kept] = IGNORED
            if self.first_labels:
                targets[:, 1:] = IGNORED
            made.append((tokens, targets))
        return made


@dataclass(frozen=True)
class Curve:
    """What a run leaves behind."""

    losses: list[float]
    norms: list[float]
    """Global gradient norm of every step, before clipping."""
    weights: dict[str, Tensor]
    """Final values, by the names of `DenseTransformer`."""


def turn(x: Tensor) -> Tensor:
    """Rotary embedding of `[b, n, s, d]`: complex multiplication, angles in float32."""
    s, d = x.shape[-2:]
    frequencies = 1.0 / (10_000.0 ** (torch.arange(0, d, 2).float() / d))
    angles = torch.outer(torch.arange(s).float(), frequencies)
    rotation = torch.complex(angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    pairs = torch.complex(x[..., : d // 2].contiguous(), x[..., d // 2 :].contiguous())
    turned = pairs * rotation
    return torch.cat([turned.real, turned.imag], dim=-1)


class Stack(nn.Module):
    """The weights of all experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(EXPERTS, MLP, HIDDEN))
        self.up = nn.Parameter(torch.empty(EXPERTS, MLP, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, MLP))


class DenseMixture(nn.Module):
    """Every expert computes every token, and counts as much as the router says, mostly nothing."""

    auxiliary: Tensor
    """Balance and z-loss of the last batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Stack()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        scores = logits.softmax(-1)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(TOP_K).indices, 1.0)
        balance = EXPERTS / TOP_K * (chosen.mean(1) * scores.mean(1)).sum(-1)
        z = logits.logsumexp(-1).square().mean(1)
        self.auxiliary = (BALANCE * balance + Z_LOSS * z).mean()
        weights = scores * chosen / (scores * chosen).sum(-1, keepdim=True)
        gate, up = (torch.einsum("bsh,efh->bsef", x, w) for w in self.matrices())
        y = torch.einsum("bsef,ehf->bseh", F.silu(gate) * up, self.experts.down)
        return (weights.unsqueeze(-1) * y).sum(-2)

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.experts.gate, self.experts.up


class DenseBlock(nn.Module):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.llama = architecture != "gpt"
        bias, kv = not self.llama, KV_HEADS * HIDDEN // HEADS
        self.norm1, self.norm2 = dense_norm(architecture), dense_norm(architecture)
        self.q = nn.Linear(HIDDEN, HIDDEN, bias)
        self.k, self.v = nn.Linear(HIDDEN, kv, bias), nn.Linear(HIDDEN, kv, bias)
        self.o = nn.Linear(HIDDEN, HIDDEN, bias)
        self.norms_heads = architecture == "qwen"
        if self.norms_heads:
            self.q_norm, self.k_norm = (nn.RMSNorm(HIDDEN // HEADS, eps=1e-5) for _ in range(2))
        if architecture == "mixture":
            self.mixture = DenseMixture()
            return
        if self.llama:
            self.gate = nn.Linear(HIDDEN, MLP, bias)
        self.up, self.down = nn.Linear(HIDDEN, MLP, bias), nn.Linear(MLP, HIDDEN, bias)

    def attend(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, HIDDEN // HEADS).transpose(1, 2) for f in self.qkv())
        if self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.llama:
            q, k = turn(q), turn(k)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(HIDDEN // HEADS)
        future = torch.ones(s, s, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(b, s, HIDDEN))

    def qkv(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.q, self.k, self.v

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        y = self.norm2(x)
        if hasattr(self, "mixture"):
            return x + self.mixture(y)
        hidden = F.silu(self.gate(y)) * self.up(y) if self.llama else F.gelu(self.up(y))
        return x + self.down(hidden)


def dense_norm(architecture: Architecture) -> nn.Module:
    if architecture != "gpt":
        return nn.RMSNorm(HIDDEN, eps=1e-5)
    return nn.LayerNorm(HIDDEN, eps=1e-5)


class DenseTransformer(nn.Module):
    """A decoder whose head is the table of its embedding; every weight is random, biases too."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        if architecture == "gpt":
            self.positions = nn.Embedding(LONGEST, HIDDEN)
        self.blocks = nn.ModuleList(DenseBlock(architecture) for _ in range(LAYERS[architecture]))
        self.norm = dense_norm(architecture)
        draw = torch.Generator().manual_seed(0)
        self.double()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.copy_(centre + 0.3 * noise)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if hasattr(self, "positions"):
            x = x + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def train(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], accumulate: int) -> Curve:
    """AdamW with clipping; the loss of a step is the mean over the batches it accumulates."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses, norms = [], []
    for index, (tokens, targets) in enumerate(batches):
        loss = loss_of(model(tokens), targets)
        losses.append(loss.item())
        auxiliary = [m.auxiliary for m in model.modules() if isinstance(m, DenseMixture)]
        ((loss + sum(auxiliary)) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Curve(losses, norms, weights)


@cache
def reference_curve(architecture: Architecture, data: Data, accumulate: int = 1) -> Curve:
    """The curve of one process; the same for every layout, so it is computed once."""
    return train(DenseTransformer(architecture), data.batches(), accumulate)


def initial_weights(architecture: Architecture) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in DenseTransformer(architecture).named_parameters()}
