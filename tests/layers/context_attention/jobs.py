"""Attention over a split sequence, many cases in one run, against plain attention of one process.

Legend: b batch, s sequence, n heads, k key-value heads, d head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatron.layers.context_attention.call import ContextCall, context_attend
from lightning_megatron.layers.context_choice import Kind
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextConfig, ContextLayout
from lightning_megatron.topology.degrees import Degrees
from lightning_megatron.topology.mesh import Topology


@dataclass(frozen=True)
class Case:
    """One call."""

    kind: Kind = "ring"
    length: int = 61
    causal: bool = True
    window: int | None = None
    documents: str | None = None
    mask: str | None = None
    alibi: bool = False
    heads: tuple[int, int] = (4, 2)
    dim: int = 8
    batch: int = 2
    dtype: torch.dtype = torch.float64
    key_length: int | None = None
    reference: bool = False
    dropout: float = 0.0


def make_context(cp: int, order: str = "zigzag", ulysses: int | None = None) -> Topology:
    """Topology of ``cp`` ranks; its ``context`` is what calls need."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    config = ContextConfig(degree=cp, kind="ring", ulysses=ulysses, order=order)  # type: ignore[arg-type]
    return Topology(Degrees(cp=cp), torch.device("cpu"), context=config)


def documents_of(case: Case) -> Tensor | None:
    b, s = case.batch, case.length
    if case.documents is None:
        return None
    if case.documents == "one":
        return torch.zeros(b, s, dtype=torch.long)
    if case.documents == "each":
        return torch.arange(s).expand(b, s)
    if case.documents == "halves":
        return (torch.arange(s) >= s // 2).long().expand(b, s)
    ends = {"packed": [(17, 20, 50), (1, 2, 33)], "back": [(9, 30, 44), (20, 21, 60)]}
    rows = [
        torch.tensor([sum(i >= e for e in row) for i in range(s)]) for row in ends[case.documents]
    ]
    ids = torch.stack([rows[i % 2] for i in range(b)])
    return ids % 3 if case.documents == "back" else ids  # an id comes again: any boundaries


def mask_of(case: Case) -> Tensor | None:
    if case.mask is None:
        return None
    generator = torch.Generator().manual_seed(3)
    t = case.key_length or case.length
    shape = (
        (1, case.heads[0], case.length, t)
        if "heads" in case.mask
        else (case.batch, 1, case.length, t)
    )
    values = torch.randn(shape, generator=generator, dtype=case.dtype)
    if "bool" not in case.mask:
        return values
    seen = values > 0
    seen[..., 2 % case.length, :] = False  # a row that sees nothing
    return seen


def slopes_of(case: Case) -> Tensor | None:
    return torch.tensor([2.0**-i for i in range(case.heads[0])]) if case.alibi else None


def seen_of(case: Case) -> Tensor:
    """Whole boolean mask of a case."""
    s, t = case.length, case.key_length or case.length
    distance = torch.arange(s)[:, None] - torch.arange(t)[None]
    seen = torch.ones(1, 1, s, t, dtype=torch.bool)
    if case.causal:
        seen = seen & (distance >= 0)
    if case.window is not None:
        seen = seen & (distance.abs() < case.window)
    documents = documents_of(case)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None]).unsqueeze(1)
    mask = mask_of(case)
    return seen & mask if mask is not None and mask.dtype == torch.bool else seen


def inputs_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Whole queries, keys, values and gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    (n, k), d, b = case.heads, case.dim, case.batch
    t = case.key_length or case.length
    shapes = (b, case.length, n, d), (b, t, k, d), (b, t, k, d), (b, case.length, n, d)
    q, key, v, g = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return q.to(case.dtype), key.to(case.dtype), v.to(case.dtype), g.to(case.dtype)


def plain(case: Case, kept: Tensor | None = None) -> list[Tensor]:
    """Output and gradients of one process, in float64 by plain products."""
    q, k, v, g = (x.double().requires_grad_() for x in inputs_of(case))
    repeat = case.heads[0] // case.heads[1]
    keys, values = (x.repeat_interleave(repeat, 2) for x in (k, v))
    scores = torch.einsum("bsnd,btnd->bnst", q, keys) / case.dim**0.5
    mask, slopes = mask_of(case), slopes_of(case)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    if slopes is not None:
        t = case.key_length or case.length
        distance = (torch.arange(case.length)[:, None] - torch.arange(t)[None]).abs()
        scores = scores - slopes[:, None, None] * distance
    seen = seen_of(case)
    some = seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen, -torch.inf).masked_fill(~some, 0.0).softmax(-1) * some
    out = torch.einsum("bnst,btnd->bsnd", weights, values)
    out.backward(g.double())
    return [out.detach(), *(x.grad for x in (q, k, v))]  # type: ignore[misc]


def cut(x: Tensor, layout: ContextLayout, rank: int) -> Tensor:
    """Part of a rank of a whole tensor, filled up with numbers that must not matter."""
    missing = layout.padded - x.shape[1]
    x = torch.cat([x, torch.full((x.shape[0], missing, *x.shape[2:]), 3.0, dtype=x.dtype)], 1)
    return torch.cat([x[:, c.start : c.stop] for c in layout.chunks(rank)], 1)


def call_of(case: Case, context: Context) -> ContextCall:
    layout = ContextLayout(case.length, context.cp.size, context.order)
    key_layout = None
    if case.key_length is not None:
        key_layout = ContextLayout(case.key_length, context.cp.size, context.order)
    return ContextCall(
        layout=layout,
        kind=case.kind,
        causal=case.causal,
        window=case.window,
        key_layout=key_layout,
        dropout=case.dropout,
        kernel="reference" if case.reference else "auto",
    )


def ours(case: Case, context: Context) -> list[Tensor]:
    """Output and gradients of this rank's part."""
    call = call_of(case, context)
    q, k, v, g = inputs_of(case)
    rank, keys = context.cp.rank, call.key_layout or call.layout
    parts = [cut(x, at, rank) for x, at in ((q, call.layout), (k, keys), (v, keys))]
    leaves = [x.requires_grad_() for x in parts]
    grad = cut(g, call.layout, rank)
    grad[:, _real(call.layout, rank) :] = 0  # nobody reads what padding yields
    out = context_attend(
        context,
        call,
        *leaves,
        documents=documents_of(case),
        mask=mask_of(case),
        alibi=slopes_of(case),
    )
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


def _real(layout: ContextLayout, rank: int) -> int:
    """Positions of a rank that are no padding."""
    return sum(p < layout.length for c in layout.chunks(rank) for p in c)


def errors(case: Case, context: Context) -> list[float]:
    """Largest distances from one process of this rank's output and gradients."""
    call = call_of(case, context)
    keys = call.key_layout or call.layout
    found = []
    layouts = call.layout, call.layout, keys, keys
    for mine, true, layout in zip(ours(case, context), plain(case), layouts, strict=True):
        real, rank = _real(layout, context.cp.rank), context.cp.rank
        difference = (mine.double() - cut(true, layout, rank))[:, :real]
        assert mine.isfinite().all(), case
        found.append(float(difference.abs().max()) if difference.numel() else 0.0)
    return found


def run_cases(
    cp: int, cases: Sequence[Case], order: str = "zigzag", ulysses: int | None = None
) -> list[tuple[Case, float]]:
    """Largest error of each case on this rank."""
    topology = make_context(cp, order, ulysses)
    return [(case, max(errors(case, topology.context))) for case in cases]


def rounding(case: Case) -> list[float]:
    """Root mean square errors of the fused kernel on one device."""
    q, k, v, g = (x.transpose(1, 2).requires_grad_() for x in inputs_of(case))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=case.causal, enable_gqa=True
    )
    grads = torch.autograd.grad(out, (q, k, v), g)
    return [
        _rms(a.detach().transpose(1, 2), b) for a, b in zip((out, *grads), plain(case), strict=True)
    ]


def rounding_over(cp: int, case: Case, order: str = "zigzag") -> list[tuple[float, int]]:
    """Squared errors of this rank's parts, and their numbers."""
    context = make_context(cp, order).context
    layout = call_of(case, context).layout
    found = []
    for mine, true in zip(ours(case, context), plain(case), strict=True):
        difference = mine.double() - cut(true, layout, context.cp.rank)
        found.append((float(difference.square().sum()), difference.numel()))
    return found


def _rms(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).square().mean().sqrt())
