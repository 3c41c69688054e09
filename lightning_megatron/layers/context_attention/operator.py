"""Attention over a split sequence as one operator.

Everything that a call exchanges and computes lies inside of ``lightning_megatron::
context_attention``: recomputation that keeps the operator's results (`parallel.activations`)
repeats neither messages nor products, and a compiler sees one opaque node that it can neither cut
nor order anew. An operator takes tensors and numbers, so the split of the sequences is told by its
key (`topology.context.context_of`).

Its results are the output; the log-sum-exp; and, where heads are exchanged, what was exchanged and
the output before it went back, which backward needs and would otherwise exchange again.

Legend: b batch, s sequence of this rank, S sequence after the exchange of heads, n heads, d head
dim.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightning_megatron.layers.context_attention import gather, ring
from lightning_megatron.layers.context_attention.blocks import Blocks, Task
from lightning_megatron.layers.context_attention.partial_sums import wide
from lightning_megatron.layers.context_attention.plan import Rule
from lightning_megatron.layers.context_attention.ulysses import (
    exchanged_heads,
    layout_of_group,
    repeated,
    summed,
    to_heads,
    to_sequence,
)
from lightning_megatron.topology.axis import Axis
from lightning_megatron.topology.context import Context, context_of
from lightning_megatron.topology.context_layout import ContextLayout, ContextOrder

NAMESPACE = "lightning_megatron"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a call, as numbers and strings."""

    context: str
    kind: str
    order: str
    length: int
    key_length: int
    tp: int
    causal: bool
    window: int
    dropout: float
    scale: float
    reference: bool

    def encoded(self) -> tuple[str, list[int], list[float]]:
        """The same as arguments of an operator."""
        names = "|".join((self.context, self.kind, self.order))
        numbers = [self.length, self.key_length, self.tp, self.window]
        numbers += [int(self.causal), int(self.reference)]
        return names, numbers, [self.dropout, self.scale]

    @staticmethod
    def decoded(names: str, numbers: Sequence[int], factors: Sequence[float]) -> "Options":
        """Inverse of `encoded`."""
        context, kind, order = names.rsplit("|", 2)
        length, key_length, tp, window, causal, reference = numbers
        dropout, scale = factors
        return Options(
            context=context,
            kind=kind,
            order=order,
            length=length,
            key_length=key_length,
            tp=tp,
            causal=bool(causal),
            window=window,
            dropout=dropout,
            scale=scale,
            reference=bool(reference),
        )


@dataclass(frozen=True)
class _Ways:
    """Axes of a call."""

    heads: Axis | None
    """Ranks that exchange heads."""
    keys: Axis | None
    """Ranks that bring keys to each other."""
    gathers: bool
    """Whether all at once."""


class _Run:
    """One call on this rank.

    Args:
        options: options.
        documents: whole ids.
        mask: whole mask of all heads of this tp rank.
        alibi: slopes of all heads of this tp rank.
        seed: seed of the masks of weights.
    """

    def __init__(
        self,
        options: Options,
        documents: Tensor | None,
        mask: Tensor | None,
        alibi: Tensor | None,
        seed: Tensor | None,
    ) -> None:
        self._options = options
        context = context_of(options.context)
        self.ways = _ways_of(context, options.kind)
        self._order = cast(ContextOrder, options.order)
        u = 1 if self.ways.heads is None else self.ways.heads.size
        cp = context.cp.size
        rows = ContextLayout(options.length, cp, self._order, options.tp)
        columns = ContextLayout(options.key_length, cp, self._order, options.tp)
        keys, whole_keys = self.ways.keys, options.kind == "whole"
        rank = 0 if keys is None else keys.rank
        self.task = Task(
            rows=layout_of_group(rows, u),
            columns=layout_of_group(columns, u),
            rank=context.cp.rank if whole_keys else rank,
            rule=Rule(
                options.causal, options.window or None, mask is not None or alibi is not None
            ),
            scale=options.scale,
            dropout=options.dropout,
            seed=0 if seed is None else int(seed) + 7 * context.cp.rank,
            reference=options.reference,
            trimmed=keys is None and not whole_keys,
            whole_keys=whole_keys,
        )
        self._documents, self._mask, self._alibi = documents, mask, alibi

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output, log-sum-exp, what was exchanged, output of the exchanged heads."""
        heads = self.ways.heads
        if heads is None:
            out, lse = self._attend(q, k, v)
            return out, lse, q.new_empty(0), q.new_empty(0)
        n = exchanged_heads(k.shape[2], heads.size)
        xs = q, repeated(k, n), repeated(v, n)
        exchanged, whole = to_sequence(heads, self._order, xs)
        out_whole, lse = self._attend(*whole)
        [out] = to_heads(heads, self._order, [out_whole])
        return out, lse, exchanged, out_whole

    def backward(
        self, grad: Tensor, saved: Sequence[Tensor], kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's queries, keys and values."""
        heads = self.ways.heads
        if heads is None:
            q, k, v, out, lse = saved
            return self._differentiate(grad, q, k, v, out, lse)
        exchanged, out, lse = saved
        whole_grad, _ = to_sequence(heads, self._order, [grad])
        q, k, v = self._three(exchanged, out, kv_heads)
        whole = self._differentiate(whole_grad.view(out.shape), q, k, v, out, lse)
        dq, dk, dv = to_heads(heads, self._order, whole)
        return dq, summed(dk, kv_heads), summed(dv, kv_heads)

    def _three(self, exchanged: Tensor, out: Tensor, kv_heads: int) -> list[Tensor]:
        """Queries, keys and values that were exchanged."""
        heads = self.ways.heads
        assert heads is not None
        b, _, _, d = out.shape
        n = exchanged_heads(kv_heads, heads.size) // heads.size
        key_shape = b, self.task.columns.local, n, d
        shapes = out.shape, key_shape, key_shape
        parts = torch.split(exchanged, [math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        task, keys = self.task, self.ways.keys
        padded = q.shape[1]
        q, k, v = self._trim(q, k, v)
        blocks = self._blocks(q)
        if keys is None:
            blocks.forward(0, k, v)
        elif self.ways.gathers:
            gather.forward(keys, blocks, k, v)
        else:
            ring.forward(keys, blocks, task, k, v)
        out, lse = blocks.result()
        return _filled(out, padded), lse

    def _differentiate(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        task, keys = self.task, self.ways.keys
        padded, key_padded = q.shape[1], k.shape[1]
        q, k, v = self._trim(q, k, v)
        blocks = self._blocks(q)
        length = q.shape[1]
        blocks.begin_backward(grad[:, :length], out[:, :length], lse)
        if keys is None:
            dk, dv = _whole_gradients(blocks, k, v)
        elif self.ways.gathers:
            dk, dv = gather.backward(keys, blocks, k, v)
        else:
            dk, dv = ring.backward(keys, blocks, task, k, v)
        dq = _filled(blocks.query_gradient(), padded)
        return dq, _filled(dk, key_padded), _filled(dv, key_padded)

    def _trim(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Leave out the padding, where the rank holds the whole sequence."""
        if not self.task.trimmed:
            return q, k, v
        end = self.task.columns.length
        return q[:, : self.task.rows.length], k[:, :end], v[:, :end]

    def _blocks(self, q: Tensor) -> Blocks:
        """Blocks of the heads of this rank."""
        heads, n = self.ways.heads, q.shape[2]
        mask, alibi = self._mask, self._alibi
        if heads is not None:
            own = slice(heads.rank * n, (heads.rank + 1) * n)
            alibi = None if alibi is None else alibi[own]
            mask = mask[:, own] if mask is not None and mask.shape[1] > 1 else mask
        return Blocks(self.task, q, self._documents, mask, alibi)


def _ways_of(context: Context, kind: str) -> _Ways:
    if kind == "ulysses":
        return _Ways(context.cp, None, False)
    if kind == "whole":
        return _Ways(None, None, False)
    if kind == "gather" or context.ulysses is None or context.ulysses.size == 1:
        return _Ways(None, context.cp, kind == "gather")
    keys = context.ring
    return _Ways(context.ulysses, None if keys is None or keys.size == 1 else keys, False)


def _whole_gradients(blocks: Blocks, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of keys and values that nobody else has."""
    parts = blocks.backward(0, k, v)
    if len(parts) == 1 and parts[0][0] == (0, k.shape[1]):
        return parts[0][1].to(k.dtype), parts[0][2].to(v.dtype)
    total = k.new_empty((2, *k.shape), dtype=wide(k.dtype))
    ring.add_parts(total, parts, fresh=True)
    return total[0].to(k.dtype, copy=True), total[1].to(v.dtype, copy=True)


def _filled(x_bsnd: Tensor, length: int) -> Tensor:
    """The same with zeros up to a length."""
    missing = length - x_bsnd.shape[1]
    if not missing:
        return x_bsnd
    return torch.nn.functional.pad(x_bsnd, (0, 0, 0, 0, 0, missing))


@torch.library.custom_op(f"{NAMESPACE}::context_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    mask: Tensor | None,
    alibi: Tensor | None,
    seed: Tensor | None,
    names: str,
    numbers: Sequence[int],
    factors: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    run = _Run(Options.decoded(names, numbers, factors), documents, mask, alibi, seed)
    out, lse, exchanged, whole = (x.contiguous() for x in run.forward(q, k, v))
    return out, lse, exchanged, whole


@_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    mask: Tensor | None,
    alibi: Tensor | None,
    seed: Tensor | None,
    names: str,
    numbers: Sequence[int],
    factors: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    run = _Run(Options.decoded(names, numbers, factors), documents, mask, alibi, None)
    b, s, n, d = q.shape
    lse_format = wide(q.dtype)
    out = q.new_empty((b, s, n, d))
    if run.ways.heads is None:
        return out, q.new_empty((b, n, s), dtype=lse_format), q.new_empty(0), q.new_empty(0)
    u, task = run.ways.heads.size, run.task
    kv_heads = exchanged_heads(k.shape[2], u) // u
    rows, columns = task.rows.local, task.columns.local
    seen = task.rows.length if task.trimmed else rows
    exchanged = q.new_empty(b * d * (rows * n // u + 2 * columns * kv_heads))
    lse = q.new_empty((b, n // u, seen), dtype=lse_format)
    return out, lse, exchanged, q.new_empty((b, rows, n // u, d))


@torch.library.custom_op(f"{NAMESPACE}::context_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    saved: Sequence[Tensor],
    documents: Tensor | None,
    mask: Tensor | None,
    alibi: Tensor | None,
    seed: Tensor | None,
    kv_heads: int,
    names: str,
    numbers: Sequence[int],
    factors: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    run = _Run(Options.decoded(names, numbers, factors), documents, mask, alibi, seed)
    dq, dk, dv = (x.contiguous() for x in run.backward(grad, saved, kv_heads))
    return dq, dk, dv


@_backward.register_fake
def _(
    grad: Tensor,
    saved: Sequence[Tensor],
    documents: Tensor | None,
    mask: Tensor | None,
    alibi: Tensor | None,
    seed: Tensor | None,
    kv_heads: int,
    names: str,
    numbers: Sequence[int],
    factors: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    given = Options.decoded(names, numbers, factors)
    b, s, n, d = grad.shape
    cp = context_of(given.context).cp.size
    order = cast(ContextOrder, given.order)
    layout = ContextLayout(given.key_length, cp, order, given.tp)
    keys = b, layout.padded if given.kind == "whole" else layout.local, kv_heads, d
    return grad.new_empty((b, s, n, d)), grad.new_empty(keys), grad.new_empty(keys)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, documents, mask, alibi, seed, *options = inputs
    out, lse, exchanged, whole = output
    ctx.set_materialize_grads(False)
    ctx.options, ctx.kv_heads = options, k.shape[2]
    saved = (exchanged, whole, lse) if exchanged.numel() else (q, k, v, out, lse)
    ctx.save_for_backward(documents, mask, alibi, seed, *saved)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * (4 + len(ctx.options))
    if grad is None:
        return None, None, None, *none
    documents, mask, alibi, seed, *saved = ctx.saved_tensors
    dq, dk, dv = _backward(
        grad.contiguous(), saved, documents, mask, alibi, seed, ctx.kv_heads, *ctx.options
    )
    return dq, dk, dv, *none


_forward.register_autograd(_differentiate, setup_context=_save)


def attend(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    mask: Tensor | None,
    alibi: Tensor | None,
    seed: Tensor | None,
) -> Tensor:
    """Output ``[b, s, n, d]`` of the operator; differentiable in queries, keys and values."""
    out: Tensor = _forward(q, k, v, documents, mask, alibi, seed, *options.encoded())[0]
    return out
