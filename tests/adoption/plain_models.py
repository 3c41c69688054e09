"""Models that know nothing of this library, and carry no plan."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Encoder(nn.Module):
    """``nn.TransformerEncoder`` over tokens, with padding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.positions = nn.Parameter(torch.randn(12, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(
            32, 4, 48, **{"dropout": 0.0, "batch_first": True, **options}
        )
        self.encoder = nn.TransformerEncoder(layer, 4, nn.LayerNorm(32), mask_check=True)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.positions
        return self.head(self.encoder(x, src_key_padding_mask=padding))


class Translator(nn.Module):
    """``nn.Transformer``: encoder and decoder, sequence first."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.core = nn.Transformer(32, 4, 2, 2, 48, **{"dropout": 0.0, **options})
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(tokens).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
        y = self.core(x, x.flip(0), tgt_mask=mask, src_key_padding_mask=padding, tgt_is_causal=True)
        return self.head(y.transpose(0, 1))


class OwnAttention(nn.Module):
    """Attention of somebody's own: the number of heads in the view is that of the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.qry, self.ky = nn.Linear(32, 32), nn.Linear(32, 32)
        self.vl, self.back = nn.Linear(32, 32), nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.rand(8) + 0.5)
        self.heads, self.head_dim = 4, 8

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1) for f in (self.qry, self.ky, self.vl))
        q = F.normalize(q, dim=-1) * self.scale
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.back(y.transpose(1, 2).reshape(b, s, 32))


class OwnBlock(nn.Module):
    """Block with attention, a gated MLP, and a linear that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = OwnAttention()
        self.wide, self.gate, self.narrow = (
            nn.Linear(32, 48),
            nn.Linear(32, 48),
            nn.Linear(48, 32),
        )
        self.mixer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        x = x + self.narrow(F.silu(self.gate(y)) * self.wide(y))
        return x + self.mixer(x).softmax(-1)


class Own(nn.Module):
    """Language model of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.where = nn.Embedding(12, 32)
        self.blocks = nn.ModuleList([OwnBlock() for _ in range(4)])
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.where(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MODELS = {"encoder": Encoder, "translator": Translator, "own": Own}
"""Class of each."""


def build(kind: str, **options: Any) -> nn.Module:
    """Return a model with the same random weights at every call, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MODELS[kind](**options).double()


def example() -> tuple[Tensor]:
    """Return the arguments of a small call of any of them."""
    return (torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0)),)


class Early(Own):
    """Model that returns what its first block has made, too."""

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Any:
        x = self.embed(tokens)
        first = x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(self.norm(x)), first
