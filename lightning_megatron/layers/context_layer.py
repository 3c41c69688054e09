"""Attention without parameters, for attention layers of a user's own.

``F.scaled_dot_product_attention`` sees what one cp rank has of a sequence. `ContextAttention` sees
the whole sequence: in one process it is the same function, and where cp splits the sequence it
exchanges what the ranks hold (`layers.attention_exchange`).

Legend: b batch, s sequence, n heads, d head dim.
"""

from torch import Tensor
from typing_extensions import override

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.attention_backends import attend
from lightning_megatron.layers.attention_call import AttentionCall
from lightning_megatron.layers.attention_exchange import (
    attend_over_ranks,
    backend_problem,
    layout_of,
)
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.layers.size_checks import AttentionBackend
from lightning_megatron.topology.context_layout import ContextConfig
from lightning_megatron.whole.splits import marked, own_part, split_of, whole

_HEADS = 2


class ContextAttention(ParallelLayer):
    """Attention of queries to keys and values of the same sequence, all ``[b, s, n, d]``.

    Queries and keys already have their position embedding. Under tp they are those of this rank's
    heads.

    Args:
        causal: whether a position sees itself and those before it only.
        window: number of positions that each one sees, itself included; without ``causal`` as many
            behind it as before it. No limit when None.

    Attributes:
        backend: kernel that computes attention (`layers.attention_backends`).

    Example:
        >>> import torch
        >>> q, k, v = torch.ones(3, 2, 5, 4, 8)
        >>> ContextAttention()(q, k, v).shape
        torch.Size([2, 5, 4, 8])
    """

    def __init__(self, causal: bool = True, window: int | None = None) -> None:
        super().__init__()
        if window is not None and window < 1:
            raise ConfigError(f"window={window}: must be at least 1; nearest valid: window=1")
        self.causal = causal
        self.window = window
        self.backend: AttentionBackend = "sdpa"

    @override
    def context_problems(self, config: ContextConfig, tp: int) -> list[str]:
        problem = backend_problem(self.backend, config.degree)
        return [problem] if problem else []

    @override
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None = None,
        length: int | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            q: queries ``[b, s, n, d]``.
            k: keys; the number of their heads divides that of the queries.
            v: values.
            documents: number of the document of each position, ``[b, s]`` over the whole sequence;
                none sees another (`layers.packed_documents`).
            length: positions of the whole sequence. Without ``causal`` it must be given under cp if
                the sequences in a `PipelineSequential` have several lengths.

        Raises:
            ConfigError: the backend cannot do this, or ``documents`` do not fit.
        """
        splits = [split_of(x) for x in (q, k, v)]
        if all(split is not None and split.dim == _HEADS for split in splits):
            y = self._attended(own_part(q), own_part(k), own_part(v), documents, length)
            assert splits[0] is not None
            return marked(y, type(q), splits[0].topology, _HEADS)
        return self._attended(whole(q), whole(k), whole(v), documents, length)

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, length: int | None
    ) -> Tensor:
        call = AttentionCall(q, k, v, None, self.window, causal=self.causal, documents=documents)
        context = self.context
        if context is None:
            return attend(self.backend, call)
        told = ((documents, -1),)
        layout = layout_of(context, q.shape[1], exact=not self.causal, length=length, told=told)
        return attend_over_ranks(context, layout, self.backend, call)
