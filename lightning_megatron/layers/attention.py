"""Causal self-attention whose heads are split over the tensor-parallel axis.

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
``window - 1`` before it.

The attention itself is computed by one of `layers.attention_backends`.

Legend: b batch, s sequence, h hidden size, n heads, d head dim.
"""

from torch import Tensor
from typing_extensions import override

from lightning_megatron.errors import raise_if_any
from lightning_megatron.layers.attention_backends import AttentionCall, attend, missing
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.dropout import random_stream
from lightning_megatron.layers.kv_cache import KeyValueCache
from lightning_megatron.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parts,
)
from lightning_megatron.layers.norm import HeadNorm
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.layers.size_checks import AttentionBackend, head_problems, tp_head_problems
from lightning_megatron.topology.degrees import Degrees


class CausalSelfAttention(ParallelLayer):
    """Attention of every position to itself and those before it.

    Input and output ``[b, s, hidden_size]``, equal on all tp ranks; under sequence parallelism
    ``[b, s / tp, hidden_size]``. The parameters are those of ``wq``, ``wk``, ``wv`` and ``wo``,
    apart from each other, so that a checkpoint does not depend on tp.

    Args:
        hidden_size: size of the residual stream.
        num_heads: number of query heads over all ranks.
        num_kv_heads: number of key-value heads; ``num_heads`` when None.
        head_dim: size of each head; ``hidden_size / num_heads`` when None.
        qkv_bias: whether queries, keys and values have a bias.
        out_bias: whether the output has a bias.
        rotary: rotary embedding of queries and keys; None for absolute positions.
        qk_norm_eps: ``eps`` of the norm of queries and keys; no such norm when None.
        window: number of positions that each one sees, itself included; all before it when None.
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
        head_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        rotary: Rotary | None = None,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        dropout: float = 0.0,
        init_std: float | None = None,
        out_init_std: float | None = None,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        raise_if_any(head_problems(hidden_size, num_heads, kv_heads, head_dim))
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = hidden_size // num_heads if head_dim is None else head_dim
        self.rotary = rotary
        self.window = window
        self.dropout = dropout
        self.backend: AttentionBackend = "sdpa"
        q_size, kv_size = num_heads * self.head_dim, kv_heads * self.head_dim
        self.wq = ColumnParallelLinear(hidden_size, q_size, qkv_bias, init_std=init_std)
        self.wk, self.wv = (
            ColumnParallelLinear(hidden_size, kv_size, qkv_bias, units=kv_heads, init_std=init_std)
            for _ in range(2)
        )
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = (HeadNorm(self.head_dim, qk_norm_eps) for _ in range(2))
        out_std = init_std if out_init_std is None else out_init_std
        self.wo = RowParallelLinear(q_size, hidden_size, out_bias, init_std=out_std)

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
    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: activation, ``[b, s, h]`` (``[b, s / tp, h]`` under sequence parallelism).
            positions: ``[s]`` or ``[b, s]`` over the whole sequence, for the rotary embedding.
            mask: ``attn_mask`` of ``scaled_dot_product_attention``, in place of the causal mask and
                the window; broadcastable to ``[b, n / tp, s, s]``.
            cache: keys and values of earlier calls, to which this call attends, too, and adds its
                own. It needs a mask ``[..., s, earlier + s]``.
        """
        q, k, v = (
            y.view(*y.shape[:-1], -1, self.head_dim)
            for y in column_parts(x, (self.wq, self.wk, self.wv))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        context = self.context
        layout = None if context is None else context.layout(q.shape[1])
        if self.rotary is not None:
            rank = 0 if context is None else context.cp.rank
            q, k = self.rotary(q, k, positions, layout=layout, rank=rank)
        backend = self.backend
        if cache is not None:
            k, v = cache.extend(self, k, v)
            backend = "sdpa"
        p = self.dropout if self.training else 0.0
        y_bsnd = self._attend(backend, AttentionCall(q, k, v, mask, self.window, p))
        out: Tensor = self.wo(y_bsnd.flatten(2))
        return out

    def _attend(self, backend: AttentionBackend, call: AttentionCall) -> Tensor:
        if call.dropout == 0.0:
            return attend(backend, call)
        with random_stream(self.topology, sharded=True):
            return attend(backend, call)

    @override
    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, {super().extra_repr()}"
