"""Parallel layers; each is an ordinary module until it is distributed over a mesh.

Names are imported when they are first used: the arithmetic beside them needs no torch.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.layers.attention import CausalSelfAttention as CausalSelfAttention
    from lightning_megatron.layers.base import ParallelLayer as ParallelLayer
    from lightning_megatron.layers.dropout import Dropout as Dropout
    from lightning_megatron.layers.embedding import PositionEmbedding as PositionEmbedding
    from lightning_megatron.layers.embedding import VocabParallelEmbedding as VocabParallelEmbedding
    from lightning_megatron.layers.linear import ColumnParallelLinear as ColumnParallelLinear
    from lightning_megatron.layers.linear import RowParallelLinear as RowParallelLinear
    from lightning_megatron.layers.linear import column_parallel as column_parallel
    from lightning_megatron.layers.linear_loss import LinearCrossEntropy as LinearCrossEntropy
    from lightning_megatron.layers.loss import (
        VocabParallelCrossEntropy as VocabParallelCrossEntropy,
    )
    from lightning_megatron.layers.mlp import MLP as MLP
    from lightning_megatron.layers.norm import LayerNorm as LayerNorm
    from lightning_megatron.layers.norm import RMSNorm as RMSNorm
    from lightning_megatron.layers.rotary import RopeScaling as RopeScaling
    from lightning_megatron.layers.rotary import Rotary as Rotary
    from lightning_megatron.layers.split_tensor import SplitTensor as SplitTensor
    from lightning_megatron.layers.splits import own_part as own_part
    from lightning_megatron.layers.splits import whole as whole

_HOMES = {
    "CausalSelfAttention": "attention",
    "ColumnParallelLinear": "linear",
    "Dropout": "dropout",
    "LayerNorm": "norm",
    "LinearCrossEntropy": "linear_loss",
    "MLP": "mlp",
    "ParallelLayer": "base",
    "PositionEmbedding": "embedding",
    "RMSNorm": "norm",
    "RopeScaling": "rotary",
    "Rotary": "rotary",
    "RowParallelLinear": "linear",
    "SplitTensor": "split_tensor",
    "VocabParallelCrossEntropy": "loss",
    "VocabParallelEmbedding": "embedding",
    "column_parallel": "linear",
    "own_part": "splits",
    "whole": "splits",
}

__all__ = [
    "CausalSelfAttention",
    "ColumnParallelLinear",
    "Dropout",
    "LayerNorm",
    "LinearCrossEntropy",
    "MLP",
    "ParallelLayer",
    "PositionEmbedding",
    "RMSNorm",
    "RopeScaling",
    "Rotary",
    "RowParallelLinear",
    "SplitTensor",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "column_parallel",
    "own_part",
    "whole",
]

__getattr__ = lazy_names(__name__, _HOMES)
