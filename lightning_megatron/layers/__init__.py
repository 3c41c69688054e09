"""Layers that tensor and pipeline parallelism know; each is an ordinary module in one process.

* Linear layers: `ColumnParallelLinear`, `RowParallelLinear`, `column_parallel`
* Vocabulary: `VocabParallelEmbedding`, `VocabParallelCrossEntropy`, `LinearCrossEntropy`
* Attention: `CausalSelfAttention`, `SelfAttention`, `CrossAttention`, with keys and values from a
  latent `LatentAttention` (`LatentSizes`), without parameters `ContextAttention`; several documents
  in a row: `documents_of`
* Where positions are: `Rotary`, `RopeScaling`, `Alibi`, `alibi_slopes`, `PositionEmbedding`
* Other parts of a transformer: `MLP`, `RMSNorm`, `LayerNorm`, `Dropout`; blocks: `EncoderBlock`,
  `DecoderBlock`; in place of an `MLP`: `MixtureOfExperts`, `RouterConfig`,
  `auxiliary_loss`
* Over a feature dim that tp splits: `ParallelLayerNorm`, `ParallelRMSNorm`, `ParallelSoftmax`
* Stack of layers that the pipeline divides into stages: `PipelineSequential`
* Where a sequence is cut over cp and joined: `SplitContext`, `GatherContext`; what comes out of a
  `PipelineSequential`: `ContextTensor`
* Output of a column-parallel layer, of which each rank holds a part: `SplitTensor`, `whole`,
  `own_part`
* Base of a layer of your own: `ParallelLayer`, `TensorShard`

Names are imported when they are first used: the arithmetic beside them needs no torch.
"""

from typing import TYPE_CHECKING

from lightning_megatron.lazy_names import lazy_names

if TYPE_CHECKING:
    from lightning_megatron.layers.alibi import Alibi, alibi_slopes
    from lightning_megatron.layers.attention import CausalSelfAttention, SelfAttention
    from lightning_megatron.layers.base import ParallelLayer
    from lightning_megatron.layers.context_layer import ContextAttention
    from lightning_megatron.layers.context_split import GatherContext, SplitContext
    from lightning_megatron.layers.cross_attention import CrossAttention
    from lightning_megatron.layers.dropout import Dropout
    from lightning_megatron.layers.embedding import PositionEmbedding, VocabParallelEmbedding
    from lightning_megatron.layers.encoder import DecoderBlock, EncoderBlock
    from lightning_megatron.layers.experts.auxiliary_loss import auxiliary_loss
    from lightning_megatron.layers.experts.config import RouterConfig
    from lightning_megatron.layers.experts.mixture import MixtureOfExperts
    from lightning_megatron.layers.latent_attention import LatentAttention
    from lightning_megatron.layers.latent_sizes import LatentSizes
    from lightning_megatron.layers.linear import (
        ColumnParallelLinear,
        RowParallelLinear,
        column_parallel,
    )
    from lightning_megatron.layers.linear_loss import LinearCrossEntropy
    from lightning_megatron.layers.loss import VocabParallelCrossEntropy
    from lightning_megatron.layers.mlp import MLP
    from lightning_megatron.layers.norm import LayerNorm, RMSNorm
    from lightning_megatron.layers.packed_documents import documents_of
    from lightning_megatron.layers.parallel_norm import ParallelLayerNorm, ParallelRMSNorm
    from lightning_megatron.layers.parallel_softmax import ParallelSoftmax
    from lightning_megatron.layers.rotary import RopeScaling, Rotary
    from lightning_megatron.layers.sequential import PipelineSequential
    from lightning_megatron.topology.tensor_shard import TensorShard
    from lightning_megatron.whole.context_tensor import ContextTensor
    from lightning_megatron.whole.split_tensor import SplitTensor
    from lightning_megatron.whole.splits import own_part, whole

_HOMES = {
    "Alibi": "alibi",
    "CausalSelfAttention": "attention",
    "ColumnParallelLinear": "linear",
    "ContextAttention": "context_layer",
    "ContextTensor": ".whole.context_tensor",
    "CrossAttention": "cross_attention",
    "DecoderBlock": "encoder",
    "Dropout": "dropout",
    "EncoderBlock": "encoder",
    "GatherContext": "context_split",
    "LatentAttention": "latent_attention",
    "LatentSizes": "latent_sizes",
    "LayerNorm": "norm",
    "LinearCrossEntropy": "linear_loss",
    "MLP": "mlp",
    "MixtureOfExperts": "experts.mixture",
    "ParallelLayer": "base",
    "ParallelLayerNorm": "parallel_norm",
    "ParallelRMSNorm": "parallel_norm",
    "ParallelSoftmax": "parallel_softmax",
    "PipelineSequential": "sequential",
    "PositionEmbedding": "embedding",
    "RMSNorm": "norm",
    "RopeScaling": "rotary",
    "Rotary": "rotary",
    "RouterConfig": "experts.config",
    "RowParallelLinear": "linear",
    "SelfAttention": "attention",
    "SplitContext": "context_split",
    "SplitTensor": ".whole.split_tensor",
    "TensorShard": ".topology.tensor_shard",
    "VocabParallelCrossEntropy": "loss",
    "VocabParallelEmbedding": "embedding",
    "alibi_slopes": "alibi",
    "auxiliary_loss": "experts.auxiliary_loss",
    "column_parallel": "linear",
    "documents_of": "packed_documents",
    "own_part": ".whole.splits",
    "whole": ".whole.splits",
}

__all__ = [
    "Alibi",
    "CausalSelfAttention",
    "ColumnParallelLinear",
    "ContextAttention",
    "ContextTensor",
    "CrossAttention",
    "DecoderBlock",
    "Dropout",
    "EncoderBlock",
    "GatherContext",
    "LatentAttention",
    "LatentSizes",
    "LayerNorm",
    "LinearCrossEntropy",
    "MLP",
    "MixtureOfExperts",
    "ParallelLayer",
    "ParallelLayerNorm",
    "ParallelRMSNorm",
    "ParallelSoftmax",
    "PipelineSequential",
    "PositionEmbedding",
    "RMSNorm",
    "RopeScaling",
    "Rotary",
    "RouterConfig",
    "RowParallelLinear",
    "SelfAttention",
    "SplitContext",
    "SplitTensor",
    "TensorShard",
    "VocabParallelCrossEntropy",
    "VocabParallelEmbedding",
    "alibi_slopes",
    "auxiliary_loss",
    "column_parallel",
    "documents_of",
    "own_part",
    "whole",
]

__getattr__ = lazy_names(__name__, _HOMES)
