"""Attention of one sequence to another, as of a decoder to what an encoder made.

Queries come from the residual stream ``x``, keys and values from a ``memory``: the residual stream
of another sequence, or its last value. Heads are split over tp as in `layers.attention`.

Over cp both sequences are split. The memory may be a stream of the same `PipelineSequential`, or
the output of another one. A memory that no layer has split, such as images from outside, is whole
on every rank (``whole_memory``): then nothing is exchanged, as each rank's queries meet all keys.

Legend: b batch, s queries, t positions of the memory, h hidden size, n heads.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from lightning_megatron.comm.functional import split_to
from lightning_megatron.layers.attention import AttentionLayer
from lightning_megatron.layers.attention_call import AttentionCall
from lightning_megatron.layers.attention_exchange import layout_of
from lightning_megatron.layers.linear_functions import SEQUENCE_DIM
from lightning_megatron.topology.context import Context
from lightning_megatron.topology.context_layout import ContextConfig, ContextLayout
from lightning_megatron.whole.context_rows import split
from lightning_megatron.whole.splits import own_part, part_of, whole


@dataclass(frozen=True)
class _Held:
    """What this rank has of a memory."""

    memory: Tensor
    """As the residual stream, of which each tp rank may have a part."""
    length: int
    """Positions of the memory that was given."""
    is_whole: bool
    """Whether this rank has all of them."""
    layout: ContextLayout | None = None
    """Split over cp, where the memory itself tells."""


class CrossAttention(AttentionLayer):
    """Attention of every position of one sequence to all of another.

    Input ``x`` ``[b, s, hidden_size]``, memory ``[b, t, memory_size]``, output as ``x``; under
    sequence parallelism ``[b, s / tp, hidden_size]`` and ``[b, t / tp, memory_size]``.

    Args:
        hidden_size: size of the residual stream.
        num_heads: number of query heads over all ranks.
        num_kv_heads: number of key-value heads; ``num_heads`` when None.
        memory_size: size of the memory; ``hidden_size`` when None.
        whole_memory: whether the memory is whole and equal on all ranks of tp and cp, and neither a
            stream of the `PipelineSequential` nor the output of another one.
        head_dim: size of each head; ``hidden_size / num_heads`` when None.
        qkv_bias: whether queries, keys and values have a bias.
        out_bias: whether the output has a bias.
        qk_norm_eps: ``eps`` of the norm of queries and keys; no such norm when None.
        dropout: probability of an attention weight to be zeroed.
        init_std: standard deviation of the initial weights; as ``nn.Linear`` when None.
        out_init_std: standard deviation of the initial ``wo``; ``init_std`` when None.

    Attributes:
        backend: kernel that computes attention (`layers.attention_backends`).

    Raises:
        ConfigError: the numbers of heads do not fit each other or the hidden size.

    Example:
        >>> import torch
        >>> layer = CrossAttention(16, num_heads=4, memory_size=8)
        >>> layer(torch.ones(2, 5, 16), torch.ones(2, 9, 8)).shape
        torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        memory_size: int | None = None,
        whole_memory: bool = False,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        dropout: float = 0.0,
        init_std: float | None = None,
        out_init_std: float | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            num_heads,
            num_kv_heads,
            memory_size=memory_size,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            qk_norm_eps=qk_norm_eps,
            dropout=dropout,
            init_std=init_std,
            out_init_std=out_init_std,
        )
        self.whole_memory = whole_memory

    @override
    def context_problems(self, config: ContextConfig, tp: int) -> list[str]:
        return [] if self.whole_memory else super().context_problems(config, tp)

    @override
    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        memory_lengths: Tensor | None = None,
        memory_length: int | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: activation from which queries are made.
            memory: activation from which keys and values are made.
            memory_mask: ``attn_mask`` of ``scaled_dot_product_attention`` over whole sequences,
                broadcastable to ``[b, n / tp, s, t]``.
            memory_lengths: number of positions of the memory that are no padding, ``[b]``.
            memory_length: positions of the whole memory. Under cp it must be given if the sequences
                in a `PipelineSequential` have several lengths.

        Raises:
            ConfigError: the backend cannot do this, or the memory has an unknown length.
        """
        context = self.context
        held = self._held(memory, context)
        q, k, v = self._projected(x, held.memory)
        layouts: list[ContextLayout] = []
        if held.is_whole:
            k, v = k[:, : held.length], v[:, : held.length]
        if context is not None:
            layout = layout_of(context, q.shape[1], exact=False, told=((memory_mask, -2),))
            if not held.is_whole:
                told = ((memory_mask, -1),)
                keys = held.layout or layout_of(
                    context, k.shape[1], exact=True, length=memory_length, told=told
                )
                layouts = [layout, keys]
            elif memory_mask is not None and memory_mask.shape[-2] > 1:
                memory_mask = split(memory_mask, layout, context.cp.rank, -2)
        call = AttentionCall(q, k, v, memory_mask, causal=False, key_lengths=memory_lengths)
        return self._attended(self.backend, call, *layouts)

    def _held(self, memory: Tensor, context: Context | None) -> "_Held":
        """What this rank has of the memory."""
        part = part_of(memory)
        if part is None and not self.whole_memory:
            return _Held(memory, memory.shape[SEQUENCE_DIM], False)
        length = memory.shape[SEQUENCE_DIM]
        if part is not None and context is not None and part.is_one_part:
            own, layout = own_part(memory), part.place.layout
            in_parts = part.place.residual is not None
            return _Held(own if in_parts else self._as_residual(own), length, False, layout)
        return _Held(self._as_residual(whole(memory)), length, True)

    def _as_residual(self, memory: Tensor) -> Tensor:
        """A whole memory as the residual stream, of which each tp rank may have a part."""
        topology = self.topology
        if topology is None or topology.tp.size == 1 or not topology.sequence_parallel:
            return memory
        missing = -memory.shape[SEQUENCE_DIM] % topology.tp.size
        return split_to(F.pad(memory, (0, 0, 0, missing)), topology.tp, SEQUENCE_DIM)
