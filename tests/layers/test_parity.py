"""Every parallel layer equals the plain layer: outputs, input and weight gradients, in float64."""

import itertools
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_megatron.layers import linear_functions
from lightning_megatron.layers.alibi import Alibi
from lightning_megatron.layers.attention import CausalSelfAttention, SelfAttention
from lightning_megatron.layers.cross_attention import CrossAttention
from lightning_megatron.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from lightning_megatron.layers.encoder import DecoderBlock, EncoderBlock
from lightning_megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from lightning_megatron.layers.mlp import MLP
from lightning_megatron.layers.norm import LayerNorm, RMSNorm
from lightning_megatron.layers.packed_documents import documents_of
from lightning_megatron.layers.parallel_norm import ParallelLayerNorm, ParallelRMSNorm
from lightning_megatron.layers.parallel_softmax import ParallelSoftmax
from lightning_megatron.layers.rotary import Rotary
from tests.comm import lockstep
from tests.layers.parity import Case, check, make_topology


def _x(*shape):
    return lambda: (torch.randn(*shape),)


def _tokens():
    return (torch.randint(0, 16, (3, 16)),)


def _attention(**kwargs):
    def build():
        return CausalSelfAttention(16, 4, rotary=Rotary(kwargs.get("head_dim", 4)), **kwargs)

    return Case(build, _x(2, 8, 16))


def _mlp(activation, bias=False):
    return Case(lambda: MLP(8, 16, activation, bias=bias), _x(2, 8, 8))


MEMORY_MASK = torch.ones(8, 4).tril().bool()
DOCUMENTS = documents_of([[3, 5], [1, 2, 4]], 8)


def _drawn(norm):
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    return norm


def _of_features(build):
    return Case(build, _x(2, 8, 12), input_split="features", output_split="features")


CASES = {
    "column": Case(lambda: ColumnParallelLinear(8, 12), _x(2, 8, 8), output_split="features"),
    "column without bias": Case(
        lambda: ColumnParallelLinear(8, 12, False), _x(2, 8, 8), output_split="features"
    ),
    "column of one sample": Case(
        lambda: ColumnParallelLinear(8, 12), _x(1, 8, 8), output_split="features"
    ),
    "column gathered": Case(
        lambda: ColumnParallelLinear(8, 12, gather_output=True), _x(2, 8, 8), output_split="no"
    ),
    "row": Case(lambda: RowParallelLinear(12, 8), _x(2, 8, 12), input_split="features"),
    "row without bias": Case(
        lambda: RowParallelLinear(12, 8, False), _x(2, 8, 12), input_split="features"
    ),
    "row of a whole input": Case(
        lambda: RowParallelLinear(12, 8, input_is_parallel=False), _x(2, 8, 12)
    ),
    "embedding": Case(lambda: VocabParallelEmbedding(16, 8), _tokens),
    "rms norm": Case(lambda: RMSNorm(8), _x(2, 8, 8)),
    "layer norm": Case(lambda: LayerNorm(8), _x(2, 8, 8)),
    "layer norm of split features": _of_features(lambda: _drawn(ParallelLayerNorm(12))),
    "layer norm of split features without bias": _of_features(
        lambda: ParallelLayerNorm(12, bias=False)
    ),
    "rms norm of split features": _of_features(lambda: _drawn(ParallelRMSNorm(12))),
    "softmax of split features": _of_features(lambda: ParallelSoftmax(12)),
    "attention": _attention(),
    "attention with biases": _attention(qkv_bias=True, out_bias=True),
    "attention, 2 kv heads": _attention(num_kv_heads=2, qkv_bias=True),
    "attention, 1 kv head": _attention(num_kv_heads=1),
    "attention, wide heads": _attention(num_kv_heads=2, head_dim=6),
    "attention, norms of heads": _attention(qk_norm_eps=1e-6, num_kv_heads=2),
    "attention, norms of heads, 1 kv head": _attention(qk_norm_eps=1e-6, num_kv_heads=1),
    "attention, window": _attention(window=3),
    "attention, packed positions": Case(
        _attention().build,
        _x(2, 8, 16),
        kwargs={"positions": torch.tensor([0, 1, 2, 0, 1, 2, 3, 4])},
    ),
    "attention, masked": Case(
        _attention().build, _x(2, 8, 16), kwargs={"mask": torch.ones(8, 8).tril(2).bool()}
    ),
    "attention, documents": Case(
        _attention(num_kv_heads=2).build, _x(2, 8, 16), kwargs={"documents": DOCUMENTS}
    ),
    "attention, slopes": Case(
        lambda: CausalSelfAttention(24, 12, 4, rotary=Alibi()),
        _x(2, 8, 24),
        kwargs={"documents": DOCUMENTS},
    ),
    "attention to all positions": Case(
        lambda: SelfAttention(16, 4, 1, rotary=Rotary(4), window=3), _x(2, 8, 16)
    ),
    "attention to a memory": Case(
        lambda: CrossAttention(16, 4, 1, memory_size=12, qk_norm_eps=1e-6),
        lambda: (torch.randn(2, 8, 16), torch.randn(2, 4, 12)),
    ),
    "attention to a masked memory": Case(
        lambda: CrossAttention(16, 4, qkv_bias=True),
        lambda: (torch.randn(2, 8, 16), torch.randn(2, 4, 16)),
        kwargs={"memory_mask": MEMORY_MASK, "memory_lengths": torch.tensor([1, 4])},
    ),
    "encoder block": Case(lambda: EncoderBlock(16, 4, rotary=Rotary(4)), _x(2, 8, 16)),
    "encoder block, documents and slopes": Case(
        lambda: EncoderBlock(16, 4, 24, norm="rmsnorm", bias=False, rotary=Alibi()),
        _x(2, 8, 16),
        kwargs={"documents": DOCUMENTS},
    ),
    "decoder block": Case(
        lambda: DecoderBlock(16, 4, memory_size=12, activation="swiglu"),
        lambda: (torch.randn(2, 8, 16), torch.randn(2, 4, 12)),
    ),
    "encoder block with a module in place of the MLP": Case(
        lambda: EncoderBlock(16, 4, mlp=MLP(16, 24, "swiglu")), _x(2, 8, 16)
    ),
    "swiglu": _mlp("swiglu"),
    "geglu": _mlp("geglu", bias=True),
    "gelu": _mlp("gelu"),
    "gelu_tanh": _mlp("gelu_tanh", bias=True),
    "relu": _mlp("relu"),
}


def _run(tp, sequence_parallel, regather):
    with mock.patch.object(linear_functions, "regathers", return_value=regather):
        return _check_all(tp, sequence_parallel, CASES)


def _check_all(tp, sequence_parallel, cases):
    topology = make_topology(tp, sequence_parallel)
    failures = {}
    for name, case in cases.items():
        try:
            check(case, topology)
        except AssertionError as error:
            failures[name] = str(error)
    return failures


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "regather"),
    [
        *((2, False, False), (2, True, False), (2, True, True)),
        *(pytest.param(4, way, way, marks=pytest.mark.thorough) for way in (False, True)),
    ],
)
def test_parallel_layers_equal_plain_ones(pool, tp, sequence_parallel, regather):
    for rank, failures in enumerate(pool.run(tp, _run, tp, sequence_parallel, regather)):
        assert failures == {}, f"rank {rank}"


def _wide(tp):
    """Layers of which every rank has the least part."""
    x = _x(2, tp, 8)
    return {
        "column": Case(lambda: ColumnParallelLinear(8, tp), x, output_split="features"),
        "row": Case(lambda: RowParallelLinear(tp, 8), _x(2, tp, tp), input_split="features"),
        "embedding": Case(lambda: VocabParallelEmbedding(tp, 8), _tokens),
        "attention": Case(
            lambda: CausalSelfAttention(8, tp, 2, head_dim=2, rotary=Rotary(2), qkv_bias=True), x
        ),
        "mlp": Case(lambda: MLP(8, tp, "swiglu"), x),
        "rms norm of split features": Case(
            lambda: _drawn(ParallelRMSNorm(tp)),
            _x(2, tp, tp),
            input_split="features",
            output_split="features",
        ),
    }


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "count"),
    [(16, True, None), (64, False, 3), pytest.param(64, False, None, marks=pytest.mark.thorough)],
)
def test_parallel_layers_on_many_ranks(tp, sequence_parallel, count):
    cases = dict(itertools.islice(_wide(tp).items(), count))
    for rank, failures in enumerate(lockstep.run(tp, _check_all, tp, sequence_parallel, cases)):
        assert failures == {}, f"rank {rank}"


def test_plain_layers_equal_those_of_torch():
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    ours, theirs = ColumnParallelLinear(8, 4).double(), nn.Linear(8, 4).double()
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x), theirs(x))
    torch.testing.assert_close(RMSNorm(8, 1e-6).double()(x), nn.RMSNorm(8, 1e-6).double()(x))
    torch.testing.assert_close(LayerNorm(8).double()(x), nn.LayerNorm(8).double()(x))
    positions = PositionEmbedding(4, 8)
    assert torch.equal(positions(torch.zeros(2, 3)), positions.weight[:3])
