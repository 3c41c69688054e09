"""Attention layers whose heads are split over the tensor-parallel axis.

Attention heads do not see each other, so tp rank ``r`` of ``t`` computes heads ``r n/t`` up to
``(r+1) n/t`` from its part of the query, key and value projections (column-parallel, sharing one
set of collectives) and the output projection (row-parallel) sums over the ranks.

Grouped-query attention (Ainslie et al., arXiv 2305.13245) lets ``n / n_kv`` query heads share one
key-value head. With ``n_kv >= t`` the key-value heads are split like the others. With ``n_kv < t``
every rank holds the whole projection and computes the one head that its query heads need;
``t / n_kv`` neighbours compute the same one. Each of them sees part of its gradient, so the
gradients of these weights are summed over tp (``TensorShard.sum_gradients``).

With a norm of queries and keys (Qwen3) every head is divided by its root mean square before the
rotary embedding. With a sliding window (Mistral, arXiv 2310.06825) a position sees itself and the
``window - 1`` before it, and without the causal rule as many behind it. With ALiBi a score falls
with the distance (`layers.alibi`). With ``documents`` a position sees its own document only
(`layers.packed_documents`).

The attention itself is computed by one of `layers.attention_backends`. Where cp splits the
sequence, `layers.attention_exchange` brings together what the ranks hold.

Legend: b batch, s sequence, t positions of a memory, h hidden size, n heads, d head dim.
"""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from lightning_megatron.errors import ConfigError, raise_if_any
from lightning_megatron.layers.alibi import Alibi, alibi_slopes
from lightning_megatron.layers.attention_backends import attend, missing
from lightning_megatron.layers.attention_call import AttentionCall
from lightning_megatron.layers.attention_exchange import (
    attend_over_ranks,
    backend_problem,
    kind_problems,
    layout_of,
)
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.dropout import random_stream
from lightning_megatron.layers.kv_cache import KeyValueCache
from lightning_megatron.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parts,
)
from lightning_megatron.layers.norm import HeadNorm
from lightning_megatron.layers.packed_documents import check_documents, restarted_positions
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.layers.size_checks import AttentionBackend, head_problems, tp_head_problems
from lightning_megatron.topology.context_layout import ContextConfig, ContextLayout
from lightning_megatron.topology.degrees import Degrees


class AttentionBase(ParallelLayer):
    """Base of attention layers: their heads, and attention of queries, keys and values.

    Args:
        num_heads: number of query heads over all ranks.
        num_kv_heads: number of key-value heads.
        dropout: probability of an attention weight to be zeroed.

    Attributes:
        backend: kernel that computes attention (`layers.attention_backends`).
    """

    def __init__(self, num_heads: int, num_kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.dropout = dropout
        self.backend: AttentionBackend = "sdpa"

    @override
    def problems(self, degrees: Degrees) -> list[str]:
        problems = tp_head_problems(self.num_heads, self.num_kv_heads, degrees.tp)
        not_installed = missing(self.backend)
        if not_installed:
            problems.append(
                f"attention_backend={self.backend}: {not_installed}; nearest valid: sdpa"
            )
        return problems

    @override
    def context_problems(self, config: ContextConfig, tp: int) -> list[str]:
        problem = backend_problem(self.backend, config.degree)
        return (
            [problem]
            if problem
            else kind_problems(
                config.kind,
                cp=config.degree,
                tp=tp,
                num_heads=self.num_heads,
                dropout=self.dropout,
                ulysses=config.ulysses,
            )
        )

    def _means(
        self,
        backend: AttentionBackend,
        call: AttentionCall,
        layout: ContextLayout | None = None,
        key_layout: ContextLayout | None = None,
        *,
        whole_keys: bool = False,
    ) -> Tensor:
        """Weighted means of the values, ``[b, s, n, d]``.

        Args:
            backend: kernel.
            call: tensors and what hides keys.
            layout: split of the queries' sequence over cp; None if it is whole.
            key_layout: split of the keys' sequence, if it is another one.
            whole_keys: whether this rank has the keys of the whole sequence.
        """
        context = self.context if layout is not None else None
        dropped = self.training and self.dropout > 0
        if dropped:
            call = replace(call, dropout=self.dropout)
        with random_stream(self.topology, sharded=True) if dropped else nullcontext():
            if context is None or layout is None:
                return attend(backend, call)
            return attend_over_ranks(
                context, layout, backend, call, key_layout, whole_keys=whole_keys
            )

    @override
    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, {super().extra_repr()}"


class AttentionLayer(AttentionBase):
    """Base of attention layers with four projections, apart from each other.

    Their parameters are those of ``wq``, ``wk``, ``wv`` and ``wo``, so that a checkpoint does not
    depend on tp.

    Args:
        hidden_size: size of the residual stream.
        num_heads: number of query heads over all ranks.
        num_kv_heads: number of key-value heads; ``num_heads`` when None.
        memory_size: size of what keys and values are made from; ``hidden_size`` when None.
        head_dim: size of each head; ``hidden_size / num_heads`` when None.
        qkv_bias: whether queries, keys and values have a bias.
        out_bias: whether the output has a bias.
        qk_norm_eps: ``eps`` of the norm of queries and keys; no such norm when None.
        dropout: probability of an attention weight to be zeroed.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
        out_init_std: standard deviation of the initial ``wo``; ``init_std`` when None.

    Attributes:
        backend: kernel that computes attention (`layers.attention_backends`); always ``"sdpa"``
            with a cache. It may be changed at any time.

    Raises:
        ConfigError: the numbers of heads do not fit each other or the hidden size.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        memory_size: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        dropout: float = 0.0,
        init_std: float | None = None,
        out_init_std: float | None = None,
    ) -> None:
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        raise_if_any(head_problems(hidden_size, num_heads, kv_heads, head_dim))
        super().__init__(num_heads, kv_heads, dropout)
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        q_size, kv_size = num_heads * self.head_dim, kv_heads * self.head_dim
        kv_in = hidden_size if memory_size is None else memory_size
        self.wq = ColumnParallelLinear(hidden_size, q_size, qkv_bias, init_std=init_std)
        self.wk, self.wv = (
            ColumnParallelLinear(kv_in, kv_size, qkv_bias, units=kv_heads, init_std=init_std)
            for _ in range(2)
        )
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = (HeadNorm(self.head_dim, qk_norm_eps) for _ in range(2))
        out_std = init_std if out_init_std is None else out_init_std
        self.wo = RowParallelLinear(q_size, hidden_size, out_bias, init_std=out_std)

    def _projected(self, x: Tensor, memory: Tensor | None = None) -> list[Tensor]:
        """Queries of ``x``, and keys and values of ``memory``, by heads."""
        if memory is None:
            parts = column_parts(x, (self.wq, self.wk, self.wv))
        else:
            parts = column_parts(x, (self.wq,)) + column_parts(memory, (self.wk, self.wv))
        q, k, v = (y.view(*y.shape[:-1], -1, self.head_dim) for y in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return [q, k, v]

    def _attended(
        self,
        backend: AttentionBackend,
        call: AttentionCall,
        layout: ContextLayout | None = None,
        key_layout: ContextLayout | None = None,
    ) -> Tensor:
        """Attention and the output projection.

        Args:
            backend: kernel.
            call: tensors and what hides keys.
            layout: split of the queries' sequence over cp, with keys to be exchanged; None if this
                rank has all keys.
            key_layout: split of the keys' sequence, if it is another one.
        """
        y_bsnd = self._means(backend, call, layout, key_layout)
        out: Tensor = self.wo(y_bsnd.flatten(2))
        return out


class SelfAttention(AttentionLayer):
    """Attention of every position to those of the same sequence.

    Input and output ``[b, s, hidden_size]``, equal on all tp ranks; under sequence parallelism
    ``[b, s / tp, hidden_size]``.

    Args:
        hidden_size: size of the residual stream.
        num_heads: number of query heads over all ranks.
        num_kv_heads: number of key-value heads; ``num_heads`` when None.
        head_dim: size of each head; ``hidden_size / num_heads`` when None.
        qkv_bias: whether queries, keys and values have a bias.
        out_bias: whether the output has a bias.
        rotary: rotary embedding of queries and keys, or `Alibi`; None for absolute positions.
        qk_norm_eps: ``eps`` of the norm of queries and keys; no such norm when None.
        window: number of positions that each one sees, itself included; without the causal rule as
            many behind it as before it. No limit when None.
        dropout: probability of an attention weight to be zeroed.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
        out_init_std: standard deviation of the initial ``wo``; ``init_std`` when None.

    Attributes:
        causal: whether a position sees itself and those before it only.
        backend: kernel that computes attention (`layers.attention_backends`); always ``"sdpa"``
            with a cache. It may be changed at any time.

    Raises:
        ConfigError: the numbers of heads do not fit each other or the hidden size.

    Example:
        >>> layer = SelfAttention(16, num_heads=4)
        >>> layer(torch.ones(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    causal: bool = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        rotary: Rotary | Alibi | None = None,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        init_std: float | None = None,
        out_init_std: float | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm_eps=qk_norm_eps,
            dropout=dropout,
            init_std=init_std,
            out_init_std=out_init_std,
        )
        self.rotary = rotary
        self.window = window

    @override
    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        documents: Tensor | None = None,
        length: int | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: activation, ``[b, s, h]`` (``[b, s / tp, h]`` under sequence parallelism).
            positions: ``[s]`` or ``[b, s]`` over the whole sequence, for the rotary embedding;
                ``0 .. s - 1`` when None, and from 0 in each document where there are some.
            mask: ``attn_mask`` of ``scaled_dot_product_attention``, in place of the causal mask and
                the window; broadcastable to ``[b, n / tp, s, s]`` over the whole sequence.
            cache: keys and values of earlier calls, to which this call attends, too, and adds its
                own. It needs a mask ``[..., s, earlier + s]``.
            documents: number of the document of each position, ``[b, s]`` over the whole sequence;
                none sees another (`layers.packed_documents`).
            length: positions of the whole sequence. Without the causal rule it must be given under
                cp if the sequences in a `PipelineSequential` have several lengths.

        Raises:
            ConfigError: the backend cannot do this, or ``documents`` do not fit.
        """
        q, k, v = self._projected(x)
        context, layout = self.context, None
        if context is not None:
            told = ((documents, -1), (mask, -1), (positions, -1))
            layout = layout_of(context, q.shape[1], exact=not self.causal, length=length, told=told)
        if documents is not None:
            whole = q.shape[1] if layout is None else layout.length
            check_documents(documents, q.shape[0], whole)
            positions = restarted_positions(documents) if positions is None else positions
        if isinstance(self.rotary, Rotary):
            rank = 0 if context is None else context.cp.rank
            q, k = self.rotary(q, k, positions, layout=layout, rank=rank)
        backend = self.backend
        if cache is not None:
            _check_cache(documents, layout)
            k, v = cache.extend(self, k, v)
            backend = "sdpa"
        call = AttentionCall(
            q,
            k,
            v,
            mask,
            self.window,
            causal=self.causal,
            documents=documents,
            alibi=self._slopes(q) if isinstance(self.rotary, Alibi) else None,
        )
        return self._attended(backend, call, layout)

    def _slopes(self, q_bsnd: Tensor) -> Tensor:
        """Slopes of the heads of this tp rank."""
        own = q_bsnd.shape[2]
        first = 0 if self.topology is None else own * self.topology.tp.rank
        dtype = torch.promote_types(q_bsnd.dtype, torch.float32)
        return alibi_slopes(self.num_heads, first, own, dtype=dtype, device=q_bsnd.device)


def _check_cache(documents: Tensor | None, layout: ContextLayout | None) -> None:
    if documents is not None:
        raise ConfigError(
            "documents with a cache of keys and values: the cache does not know where a document "
            "ends; nearest valid: cache=None"
        )
    if layout is not None:
        raise ConfigError(
            f"cp={layout.cp}: a cache holds whole sequences; nearest valid: "
            "lightning_megatron.models.generate, or cache=None"
        )


class CausalSelfAttention(SelfAttention):
    """Attention of every position to itself and those before it; otherwise as `SelfAttention`.

    Example:
        >>> layer = CausalSelfAttention(16, num_heads=4, num_kv_heads=2)
        >>> layer(torch.ones(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    causal = True
