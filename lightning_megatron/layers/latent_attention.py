"""Multi-head latent attention: keys and values of all heads made from one small vector a token.

DeepSeek-V2 (arXiv 2405.04434, section 2.1) and V3 (arXiv 2412.19437). A token ``x`` leaves behind a
*latent* ``c`` of ``r`` numbers and one rotary key ``k_pe``, which all heads share::

    c, k_pe = split(kv_down x)          c = kv_norm(c)          k_pe = rotary(k_pe)
    k_nope, v = split(kv_up c)          of each head            k = [k_nope, k_pe]
    q_nope, q_pe = split(q_up q_norm(q_down x))                 q = [q_nope, rotary(q_pe)]

Scores are divided by ``sqrt(nope_dim + rope_dim)``. In DeepSeek-V3 (128 heads, 512 + 64 numbers) a
cache of ``c`` and ``k_pe`` is 71 times smaller than one of keys and values.

*tp* splits the heads: ``q_up`` and ``kv_up`` are column-parallel and ``wo`` is row-parallel. The
down projections and their norms are whole on every rank, as there is one latent for all heads.
Under sequence parallelism each rank projects its own positions, and what is gathered and scattered
are the latents, not the residual stream (1536 and 576 numbers a token for 7168).

*cp* gathers the latents of all positions, and each rank makes keys and values of the whole sequence
from them (``kind="auto"`` and ``"gather"``). That sends ``b n (r + rope_dim) e (p - 1)`` bytes
where keys and values would be ``b n H (key_dim + value_dim) e (p - 1)``, for ``p`` times the
product with ``kv_up``. With ``kind="ring"`` or ``"ulysses"`` keys and values travel as in any
attention layer.

*Absorbed.* With a cache, few queries meet the keys of many tokens. Then the order of the products
is changed: ``q_nope . (W_k c) = (W_k' q_nope) . c``, so that queries meet latents as if they were
the one key-value head of all, and ``W_v`` follows the weighted mean. Whichever order takes fewer
operations is used.

Kernels take queries, keys and values of one size, so the smaller ones are filled up with zeros.

Legend: b batch, s sequence, t positions of the keys, h hidden size, n heads, d head dim, r latent.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.comm.functional import all_gather, copy_to
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention import AttentionBase
from lightning_megatron.layers.attention_call import AttentionCall
from lightning_megatron.layers.attention_exchange import layout_of
from lightning_megatron.layers.kv_cache import KeyValueCache
from lightning_megatron.layers.latent_sizes import LatentSizes
from lightning_megatron.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    column_parts,
    unwrapped,
)
from lightning_megatron.layers.linear_functions import SEQUENCE_DIM
from lightning_megatron.layers.norm import RMSNorm
from lightning_megatron.layers.packed_documents import check_documents, restarted_positions
from lightning_megatron.layers.rotary import Rotary
from lightning_megatron.layers.size_checks import AttentionBackend
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextLayout
from lightning_megatron.whole.context_rows import join


class LatentAttention(AttentionBase):
    """Causal attention whose keys and values are made from one latent a token.

    Input and output ``[b, s, hidden_size]``, equal on all tp ranks; under sequence parallelism
    ``[b, s / tp, hidden_size]``. It stands in the place of `CausalSelfAttention`.

    Args:
        hidden_size: size of the residual stream.
        num_heads: number of heads over all ranks.
        sizes: sizes of the latents, and of queries, keys and values.
        rotary: rotary embedding of ``sizes.rope_dim`` numbers; None for no positions.
        norm_eps: ``eps`` of the norms of the latents.
        window: number of positions that each one sees, itself included; all before it when None.
        score_scale: factor of the scores; ``1 / sqrt(sizes.key_dim)`` when None. (Models with YaRN
            multiply that by the square of their ``mscale``.)
        dropout: probability of an attention weight to be zeroed.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
        out_init_std: standard deviation of the initial ``wo``; ``init_std`` when None.

    Attributes:
        backend: kernel that computes attention (`layers.attention_backends`); always ``"sdpa"``
            with a cache. It may be changed at any time.

    Raises:
        ConfigError: ``rotary`` is another embedding, or has another size than ``sizes.rope_dim``.

    Example:
        >>> sizes = LatentSizes(kv_rank=8, rope_dim=2, nope_dim=4, value_dim=4)
        >>> layer = LatentAttention(16, 4, sizes, rotary=Rotary(2))
        >>> layer(torch.ones(2, 5, 16)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        sizes: LatentSizes,
        *,
        rotary: Rotary | None = None,
        norm_eps: float = 1e-6,
        window: int | None = None,
        score_scale: float | None = None,
        dropout: float = 0.0,
        init_std: float | None = None,
        out_init_std: float | None = None,
    ) -> None:
        super().__init__(num_heads, num_heads, dropout)
        if not isinstance(rotary, Rotary | None):
            raise ConfigError(
                f"rotary={type(rotary).__name__}: latent attention has rotary positions or none; "
                f"nearest valid: Rotary({sizes.rope_dim})"
            )
        if rotary is not None and rotary.head_dim != sizes.rope_dim:
            raise ConfigError(
                f"rotary of {rotary.head_dim} numbers, rope_dim={sizes.rope_dim}: must be equal; "
                f"nearest valid: Rotary({sizes.rope_dim})"
            )
        self.sizes = sizes
        self.rotary = rotary
        self.window = window
        self.score_scale = 1 / math.sqrt(sizes.key_dim) if score_scale is None else score_scale
        self.q_down: ReplicatedLinear | None = None
        self.q_norm: RMSNorm | None = None
        q_size, kv_size = num_heads * sizes.key_dim, num_heads * (sizes.nope_dim + sizes.value_dim)
        if sizes.q_rank is None:
            self.wq = ColumnParallelLinear(
                hidden_size, q_size, False, units=num_heads, init_std=init_std
            )
        else:
            self.q_down = ReplicatedLinear(hidden_size, sizes.q_rank, init_std=init_std)
            self.q_norm = RMSNorm(sizes.q_rank, norm_eps)
            self.q_up = ColumnParallelLinear(
                sizes.q_rank, q_size, False, units=num_heads, init_std=init_std
            )
        self.kv_down = ReplicatedLinear(hidden_size, sizes.cached, init_std=init_std)
        self.kv_norm = RMSNorm(sizes.kv_rank, norm_eps)
        self.kv_up = ColumnParallelLinear(
            sizes.kv_rank, kv_size, False, units=num_heads, init_std=init_std
        )
        out_std = init_std if out_init_std is None else out_init_std
        self.wo = RowParallelLinear(
            num_heads * sizes.value_dim, hidden_size, False, init_std=out_std
        )

    @override
    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: activation, ``[b, s, h]`` (``[b, s / tp, h]`` under sequence parallelism).
            positions: ``[s]`` or ``[b, s]`` over the whole sequence, for the rotary embedding;
                ``0 .. s - 1`` when None, and from 0 in each document where there are some.
            mask: ``attn_mask`` of ``scaled_dot_product_attention``, in place of the causal mask and
                the window; broadcastable to ``[b, n / tp, s, s]`` over the whole sequence.
            cache: latents of earlier calls, to which this call attends, too, and adds its own. It
                needs a mask ``[..., s, earlier + s]``.
            documents: number of the document of each position, ``[b, s]`` over the whole sequence;
                none sees another (`layers.packed_documents`).

        Raises:
            ConfigError: the backend cannot do this, or ``documents`` do not fit.
        """
        context, layout = self.context, None
        if cache is not None:
            self._check_cache(documents, context)
        q, latent = self._queries(x), self.kv_down(x)
        if context is not None:
            told = ((documents, -1), (mask, -1), (positions, -1))
            layout = layout_of(context, q.shape[1], exact=False, told=told)
        if documents is not None:
            whole = q.shape[1] if layout is None else layout.length
            check_documents(documents, q.shape[0], whole)
            positions = restarted_positions(documents) if positions is None else positions
        c_bsr, k_pe = torch.split(latent, [self.sizes.kv_rank, self.sizes.rope_dim], dim=-1)
        c_bsr = self.kv_norm(c_bsr)
        if cache is not None:
            y = self._with_cache(cache, q, c_bsr, k_pe, (positions, mask))
        elif context is not None and layout is not None and self._gathers(context):
            y = self._over_latents(context, layout, q, (c_bsr, k_pe), (positions, mask, documents))
        else:
            k_pe = self._of_all_positions(k_pe)
            q, k_pe = self._turned(q, k_pe, positions, layout)
            [kv] = column_parts(c_bsr, (self.kv_up,))
            y = self._attended(q, kv, k_pe, mask, documents, layout)
        out: Tensor = self.wo(y.flatten(2))
        return out

    def _queries(self, x: Tensor) -> Tensor:
        """Queries of this rank's heads, ``[b, s, n, nope_dim + rope_dim]``."""
        if self.q_down is None or self.q_norm is None:
            [q] = column_parts(x, (self.wq,))
        else:
            [q] = column_parts(self.q_norm(self.q_down(x)), (self.q_up,))
        return q.view(*q.shape[:-1], -1, self.sizes.key_dim)

    def _of_all_positions(self, x_bsr: Tensor) -> Tensor:
        """Gather what all heads share over the positions of tp ranks; its gradient is summed."""
        topology = self.topology
        if topology is None:
            return x_bsr
        if topology.sequence_parallel:
            return all_gather(x_bsr, topology.tp, SEQUENCE_DIM)
        return copy_to(x_bsr, topology.tp)

    def _turned(
        self, q: Tensor, k_pe: Tensor, positions: Tensor | None, layout: ContextLayout | None
    ) -> tuple[Tensor, Tensor]:
        """Queries ``[b, s, n, d]`` and shared keys ``[b, s, 1, rope_dim]`` after the rotation."""
        k_pe = k_pe.unsqueeze(2)
        if self.rotary is None:
            return q, k_pe
        rank = 0 if self.context is None else self.context.cp.rank
        q_nope, q_pe = torch.split(q, [self.sizes.nope_dim, self.sizes.rope_dim], dim=-1)
        q_pe, k_pe = self.rotary(q_pe, k_pe, positions, layout=layout, rank=rank)
        return torch.cat((q_nope, q_pe), dim=-1), k_pe

    def _attended(
        self,
        q: Tensor,
        kv: Tensor,
        k_pe: Tensor,
        mask: Tensor | None,
        documents: Tensor | None = None,
        layout: ContextLayout | None = None,
        *,
        whole_keys: bool = False,
        cached: bool = False,
    ) -> Tensor:
        """Means of the values ``[b, s, n, value_dim]``.

        Args:
            q: queries.
            kv: output of ``kv_up``, ``[b, t, n (nope_dim + value_dim)]``.
            k_pe: shared keys ``[b, t, 1, rope_dim]``.
            mask: as for the layer.
            documents: as for the layer.
            layout: split of the sequence over cp.
            whole_keys: whether ``kv`` and ``k_pe`` are of the whole sequence, though ``q`` is not.
            cached: whether keys come from a cache.
        """
        sizes = self.sizes
        nope, value = sizes.nope_dim, sizes.value_dim
        kv = kv.view(*kv.shape[:-1], -1, nope + value)
        k_nope, v = torch.split(kv, [nope, value], dim=-1)
        k = torch.cat((k_nope, k_pe.expand(-1, -1, q.shape[2], -1)), dim=-1)
        width = max(sizes.key_dim, value)
        q, k, v = (_filled(x, width) for x in (self._scaled(q, width), k, v))
        call = AttentionCall(q, k, v, mask, self.window, documents=documents)
        backend: AttentionBackend = "sdpa" if cached else self.backend
        return self._means(backend, call, layout, whole_keys=whole_keys)[..., :value]

    def _scaled(self, q: Tensor, width: int) -> Tensor:
        """Queries that kernels, which divide by ``sqrt(width)``, bring to the layer's scale."""
        factor = self.score_scale * math.sqrt(width)
        return q if math.isclose(factor, 1.0, rel_tol=1e-15) else q * factor

    def _gathers(self, context: Context) -> bool:
        """Whether cp ranks gather latents, not keys and values."""
        return context.config.kind in ("auto", "gather") and unwrapped(self.kv_up) is not None

    def _over_latents(
        self,
        context: Context,
        layout: ContextLayout,
        q: Tensor,
        own: tuple[Tensor, Tensor],
        told: tuple[Tensor | None, Tensor | None, Tensor | None],
    ) -> Tensor:
        """Attention to keys and values that are made here from the latents of all cp ranks."""
        positions, mask, documents = told
        shared = self._of_all_positions(torch.cat(own, dim=-1))
        c_bsr, k_pe = torch.split(shared, [self.sizes.kv_rank, self.sizes.rope_dim], dim=-1)
        q, k_pe = self._turned(q, k_pe, positions, layout)
        latent = join(torch.cat((c_bsr, k_pe.squeeze(2)), dim=-1), layout, context.cp)
        latent = F.pad(latent, (0, 0, 0, layout.padded - layout.length))
        c_btr, k_pe = torch.split(latent, [self.sizes.kv_rank, self.sizes.rope_dim], dim=-1)
        kv, k_pe = self.kv_up.own_features(c_btr), k_pe.unsqueeze(2)
        return self._attended(q, kv, k_pe, mask, documents, layout, whole_keys=True)

    def _with_cache(
        self,
        cache: KeyValueCache,
        q: Tensor,
        c_bsr: Tensor,
        k_pe: Tensor,
        told: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        """Attention to the latents of a cache, to which those of this call are added."""
        positions, mask = told
        q, k_pe = self._turned(q, self._of_all_positions(k_pe), positions, None)
        c_bt1r, k_pe = cache.extend(self, c_bsr.unsqueeze(2), k_pe)
        layer = unwrapped(self.kv_up)
        if layer is not None and layer.gemm is None and self._saves_products(q, k_pe):
            shared = torch.cat((self._of_all_positions(c_bt1r), k_pe), dim=-1)
            return self._absorbed(layer.weight, q, shared, mask)
        [kv] = column_parts(c_bt1r.squeeze(2), (self.kv_up,))
        return self._attended(q, kv, k_pe, mask, cached=True)

    def _saves_products(self, q: Tensor, k_pe: Tensor) -> bool:
        """Whether products with the latents take fewer operations than making keys and values."""
        sizes, s, t = self.sizes, q.shape[1], k_pe.shape[1]
        raised = sizes.kv_rank * (sizes.nope_dim + sizes.value_dim)
        apart = t * raised + s * t * (sizes.key_dim + sizes.value_dim)
        return s * raised + s * t * (sizes.cached + sizes.kv_rank) < apart

    def _absorbed(self, weight: Tensor, q: Tensor, shared: Tensor, mask: Tensor | None) -> Tensor:
        """Means of the values, from ``weight`` of ``kv_up`` and ``shared [b, t, 1, r + rope]``."""
        sizes = self.sizes
        by_head = weight.to(q.dtype).view(q.shape[2], -1, sizes.kv_rank)
        k_weight, v_weight = torch.split(by_head, [sizes.nope_dim, sizes.value_dim], dim=1)
        q_nope, q_pe = torch.split(q, [sizes.nope_dim, sizes.rope_dim], dim=-1)
        q = torch.cat((torch.einsum("bsnd,ndr->bsnr", q_nope, k_weight), q_pe), dim=-1)
        # Latents are keys and values at once; the means of the rotary numbers are not read.
        call = AttentionCall(self._scaled(q, sizes.cached), shared, shared, mask, self.window)
        means = self._means("sdpa", call)[..., : sizes.kv_rank]
        return torch.einsum("bsnr,nvr->bsnv", means, v_weight)

    def _check_cache(self, documents: Tensor | None, context: Context | None) -> None:
        topology = self.topology
        if documents is not None:
            raise ConfigError(
                "documents with a cache of latents: the cache does not know where a document ends; "
                "nearest valid: cache=None"
            )
        if context is not None:
            raise ConfigError(
                f"cp={context.cp.size}: a cache holds whole sequences; nearest valid: "
                "lightning_megatron.models.generate, or cache=None"
            )
        if topology is not None and topology.sequence_parallel and topology.tp.size > 1:
            raise ConfigError(
                "sequence_parallel=True: a cache of latents holds whole sequences; nearest valid: "
                "sequence_parallel=False"
            )


def _filled(x: Tensor, width: int) -> Tensor:
    """Fill the last dim with zeros up to a width."""
    missing = width - x.shape[-1]
    return F.pad(x, (0, missing)) if missing else x
