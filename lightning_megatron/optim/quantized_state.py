"""Optimizer state in 2 bytes or 1 byte an element.

``bfloat16`` keeps 8 significant bits, ``int8`` 256 values beside one scale for 256 elements
(Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861): the largest
magnitude of a block is its scale, and an element is stored as the place of its share of it in a
fixed table. The table is dense near zero: powers of ten down to 1e-6, each divided evenly, so that
the small elements of a block with one outlier survive.

Moving averages change by less than a step of either format: ``v * 0.999`` rounds to ``v`` in
bfloat16. Rounded to the nearest they would stand still, so what is stored is rounded up or down at
random, with the probabilities that make it right on average. The draws come from the parameter's
name and the step, so that ranks which hold copies stay equal to the bit.

Blocks run along the elements that a rank holds, so they depend on the layout; the table's positions
mean nothing without them. Checkpoints therefore hold the values (float32), which `Narrow.wide` and
`narrow` convert: loading under the same layout restores every bit, under another the state is
rounded once, to the nearest. A checkpoint of one format can be gone on from in any other.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

StateFormat = Literal["float32", "bfloat16", "int8"]
BLOCK = 256
"""Elements that share a scale."""


@cache
def table(device: torch.device, *, signed: bool) -> Tensor:
    """The 256 shares (128 and their negatives, if signed) that int8 stands for, in order."""
    count = 127 if signed else 255
    decades, shares = 7, [1.0]
    for decade in range(decades):  # more shares in the upper decades: 2 parts of each to the next
        part = count * 2 ** (decades - 1 - decade) / (2**decades - 1)
        inner = max(round(part), 2)
        top = 10.0**-decade
        shares += [top - (top - top / 10) * (i + 1) / inner for i in range(inner)]
    shares = sorted(set(shares), reverse=True)[: count if signed else 255]
    positive = sorted(shares)
    values = [-s for s in reversed(positive)] + [0.0, *positive] if signed else [0.0, *positive]
    return torch.tensor(values, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Narrow:
    """A tensor in few bits."""

    codes: Tensor
    """Of the tensor's shape: bfloat16 values, or places in the table (uint8)."""
    scales: Tensor | None
    """Largest magnitude of each block of the flattened tensor; None for bfloat16."""
    signed: bool
    """Whether the table has negative values."""

    def wide(self) -> Tensor:
        """The values, in float32."""
        if self.scales is None:
            return self.codes.float()
        shares = table(self.codes.device, signed=self.signed)[self.codes.reshape(-1).int()]
        scales = self.scales.repeat_interleave(BLOCK)[: shares.numel()]
        return (shares * scales).view(self.codes.shape)


def narrow(
    values: Tensor, kind: StateFormat, *, signed: bool, generator: torch.Generator | None = None
) -> Narrow:
    """Store float32 ``values``; at random where a generator is given, else to the nearest."""
    if kind == "bfloat16":
        return Narrow(_to_bfloat16(values, generator), None, signed)
    flat = values.reshape(-1)
    blocks = -(-flat.numel() // BLOCK)
    padded = torch.nn.functional.pad(flat, (0, blocks * BLOCK - flat.numel())).view(blocks, BLOCK)
    scales = padded.abs().amax(1)
    least = torch.finfo(torch.float32).tiny
    shares = (padded / scales.clamp(min=least)[:, None]).view(-1)[: flat.numel()].contiguous()
    values_of = table(values.device, signed=signed)
    above = torch.searchsorted(values_of, shares).clamp_(1, len(values_of) - 1)
    low, high = values_of[above - 1], values_of[above]
    part = (shares - low) / (high - low)
    threshold = 0.5 if generator is None else _uniform(shares, generator)
    up = part > threshold
    if not signed:  # a second moment that is rounded to nothing would divide by nothing
        up |= (above == 1) & (shares > 0)
    codes = (above - 1 + up).to(torch.uint8).view(values.shape)
    return Narrow(codes, scales, signed)


def generator_for(name: str, step: int, device: torch.device) -> torch.Generator:
    """Draws that depend on the parameter and the step, and on nothing else."""
    digest = hashlib.sha256(f"{name}/{step}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=generator, device=like.device)


def _to_bfloat16(values: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return values.to(torch.bfloat16)
    # The lower 16 bits of a float32 are what bfloat16 lacks: add as many at random, then cut.
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(
        0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    rounded = ((bits + noise) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
