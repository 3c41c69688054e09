"""Attention of the queries of one rank to the keys of one rank after the other.

`Blocks` is what all kinds have in common: a ring brings it the keys of a neighbour at a time, a
gather those of all ranks, an exchange of heads its own whole sequence. Sums are taken in the order
in which the keys come.

Legend: b batch, s queries, t keys, n heads, d head dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_megatron.layers.context_attention.documents import Documents, documents_in, seen_mask
from lightning_megatron.layers.context_attention.kernels import (
    Kernel,
    ReferenceKernel,
    Scores,
    choose,
)
from lightning_megatron.layers.context_attention.partial_sums import GradientSum, PartialSums
from lightning_megatron.layers.context_attention.plan import (
    Product,
    Rule,
    products,
    products_of_documents,
    tile_size,
)
from lightning_megatron.topology.context_layout import ContextLayout

_STRIDE = 1_000_003
"""Distance of the seeds of ranks, and of products; masks of weights are to be unlike."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Attention that is to be computed, whoever brings the keys."""

    rows: ContextLayout
    """Places of the queries, over the ranks that bring keys to each other."""
    columns: ContextLayout
    """Places of the keys."""
    rank: int
    """Place of this rank among them."""
    rule: Rule
    """Which positions see which."""
    scale: float
    """Factor of the scores."""
    dropout: float = 0.0
    """Probability of a weight to be zeroed."""
    seed: int = 0
    """Seed of the masks of weights."""
    reference: bool = False
    """Whether the kernel for checks computes."""
    trimmed: bool = False
    """Whether the rank holds the whole sequence without its padding."""
    whole_keys: bool = False
    """Whether it holds the keys of all ranks, in the order of the sequence, with the padding."""

    def row_chunks(self) -> tuple[range, ...]:
        """Positions of the queries of this rank."""
        if self.trimmed:
            return (range(self.rows.length),)
        return self.rows.chunks(self.rank)

    def column_chunks(self, source: int) -> tuple[range, ...]:
        """Positions of the keys of a rank; without padding, where nothing else hides it."""
        if self.trimmed:
            return (range(self.columns.length),)
        chunks = self.columns.chunks(source)
        if self.whole_keys:
            size, end = self.columns.local // 2, self.columns.padded
            chunks = tuple(range(start, start + size) for start in range(0, end, size))
        if self.rule.causal:
            return chunks
        end = self.columns.length
        return tuple(range(c.start, max(c.start, min(c.stop, end))) for c in chunks)


class Blocks:
    """Products of the queries of this rank with keys that others bring.

    Args:
        task: what is to be computed.
        q_bsnd: queries of this rank.
        documents: whole ids ``[b, length]``.
        mask: whole mask of these heads, ``[b | 1, n | 1, length, length]``.
        alibi: slopes of these heads.
    """

    def __init__(
        self,
        task: Task,
        q_bsnd: Tensor,
        documents: Tensor | None,
        mask: Tensor | None,
        alibi: Tensor | None,
    ) -> None:
        self._task = task
        self._q = q_bsnd.transpose(1, 2)
        self._mask = mask
        self._alibi = alibi
        self._rows = task.row_chunks()
        chunk = max(len(c) for c in self._rows)
        self._tile = tile_size(chunk, task.rule.window, documents is not None)
        self._documents: Documents | None = None
        if documents is not None:
            padded = task.rows.length if task.trimmed else task.rows.padded
            self._documents = documents_in(documents, padded, chunk, self._tile)
        biased = mask is not None or alibi is not None
        self._kernel: Kernel = ReferenceKernel()
        if not task.reference:
            window = task.rule.window is not None
            masked = biased or documents is not None or window
            self._kernel = choose(self._q, bias=masked, dropout=task.dropout > 0)
        self._sums = PartialSums(q_bsnd)

    def forward(self, source: int, k_btnd: Tensor, v_btnd: Tensor) -> None:
        """Attend to the keys of a rank."""
        k, v = k_btnd.transpose(1, 2), v_btnd.transpose(1, 2)
        for product, scores, empty in self._products(source):
            q = _part(self._q, product.rows)
            keys, values = _part(k, product.columns), _part(v, product.columns)
            out, lse = self._kernel.forward(q, keys, values, scores)
            self._sums.add(product.rows, out.transpose(1, 2), lse, empty)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output ``[b, s, n, d]`` and log-sum-exp ``[b, n, s]`` of all keys that came."""
        return self._sums.result()

    def begin_backward(self, grad: Tensor, out: Tensor, lse: Tensor) -> None:
        """Tell the gradient of the output, the output and the log-sum-exp."""
        self._grad, self._out = grad.transpose(1, 2), out.transpose(1, 2)
        self._lse = lse
        self._dq = GradientSum(self._q.transpose(1, 2))

    def backward(
        self, source: int, k_btnd: Tensor, v_btnd: Tensor
    ) -> list[tuple[tuple[int, int], Tensor, Tensor]]:
        """Gradients of the keys and values of a rank: places, and ``[b, t, n, d]`` of both."""
        k, v = k_btnd.transpose(1, 2), v_btnd.transpose(1, 2)
        found = []
        for product, scores, _ in self._products(source):
            rows, columns = product.rows, product.columns
            inputs = _part(self._q, rows), _part(k, columns), _part(v, columns)
            lse = self._lse.narrow(2, rows[0], rows[1] - rows[0])
            grad, out = _part(self._grad, rows), _part(self._out, rows)
            dq, dk, dv = self._kernel.backward(grad, inputs, out, lse, scores)
            self._dq.add(rows, dq.transpose(1, 2))
            found.append((columns, dk.transpose(1, 2), dv.transpose(1, 2)))
        return found

    def query_gradient(self) -> Tensor:
        """Gradient ``[b, s, n, d]`` of the queries."""
        return self._dq.result()

    def _products(self, source: int) -> Iterator[tuple[Product, Scores, Tensor | None]]:
        task = self._task
        columns = task.column_chunks(source)
        if self._documents is None:
            found: Sequence[Product] = products(self._rows, columns, task.rule, self._tile)
        else:
            together = self._documents.together
            found = products_of_documents(self._rows, columns, task.rule, self._tile, together)
        for number, product in enumerate(found):
            bias = None
            if product.seen == "mixed":
                bias = self._bias(product, columns)
            kept = self._kept(product, number + _STRIDE * (source + 1))
            scores = Scores(task.scale, product.seen == "causal", bias, kept)
            yield product, scores, None if bias is None else bias.isneginf().all(-1)

    def _bias(self, product: Product, columns: tuple[range, ...]) -> Tensor:
        """Addend of the scores of a product."""
        task, device = self._task, self._q.device
        rows = _positions(self._rows, product.rows, device)
        keys = _positions(columns, product.columns, device)
        bias = self._q.new_zeros(1, 1, len(rows), len(keys))
        if self._alibi is not None:
            distance = (rows[:, None] - keys[None, :]).abs().to(self._alibi.dtype)
            bias = (-self._alibi[:, None, None] * distance).to(bias.dtype)[None]
        seen = seen_mask(rows, keys, task.rule, self._documents, task.columns.length)
        if self._mask is not None:
            # Of the padding, whose outputs nobody reads, any row will do.
            inside = rows.clamp(max=self._mask.shape[-2] - 1)
            given = self._mask[..., inside[:, None], keys.clamp(max=self._mask.shape[-1] - 1)]
            if given.dtype == torch.bool:
                seen = given if seen is None else seen & given
            else:
                bias = bias + given.to(bias.dtype)
        return bias if seen is None else torch.where(seen, bias, -torch.inf)

    def _kept(self, product: Product, number: int) -> Tensor | None:
        """Factors of the weights of a product."""
        p = self._task.dropout
        if not p:
            return None
        seed = self._task.seed + number + _STRIDE**2 * self._task.rank
        generator = torch.Generator(self._q.device).manual_seed(seed % 2**63)
        (top, bottom), (left, right) = product.rows, product.columns
        shape = *self._q.shape[:2], bottom - top, right - left
        wide = torch.promote_types(self._q.dtype, torch.float32)
        drawn = torch.rand(shape, generator=generator, device=self._q.device)
        return (drawn >= p).to(wide) / (1 - p if p < 1 else 1)


def _part(x_bnsd: Tensor, places: tuple[int, int]) -> Tensor:
    if places == (0, x_bnsd.shape[2]):
        return x_bnsd
    return x_bnsd.narrow(2, places[0], places[1] - places[0])


def _positions(chunks: tuple[range, ...], places: tuple[int, int], device: torch.device) -> Tensor:
    """Positions of some places of a rank."""
    parts = [torch.arange(c.start, c.stop, device=device) for c in chunks]
    return torch.cat(parts)[places[0] : places[1]]
