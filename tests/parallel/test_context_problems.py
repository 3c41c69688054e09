"""Modules that mix positions of a sequence are refused under cp before anything connects."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatron import PipelineSequential
from lightning_megatron.layers import (
    CausalSelfAttention,
    ColumnParallelLinear,
    VocabParallelEmbedding,
)
from lightning_megatron.layers.base import ParallelLayer
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.parallel.plan import ModulePlan, PipelineConfig
from lightning_megatron.topology.degrees import Degrees

H = 8


class Join(ParallelLayer):
    joins_context = True


class Cut(ParallelLayer):
    splits_context = True


class Sees(nn.LSTM):
    """Its author has seen to it."""

    exchanges_context = True


class Block(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


def embedding() -> nn.Module:
    return VocabParallelEmbedding(16, H)


def problems(module: nn.Module, cp: int = 2) -> list[str]:
    return ModulePlan(module, Degrees(cp=cp), PipelineConfig(degree=1)).problems()


def within(*items: nn.Module) -> nn.Module:
    return nn.ModuleDict({"trunk": PipelineSequential(*items)})


MIXING: dict[str, tuple[nn.Module, str]] = {
    "attention": (nn.MultiheadAttention(H, 2), "does not exchange keys and values between cp"),
    "encoder": (nn.TransformerEncoderLayer(H, 2), "does not exchange keys and values"),
    "lstm": (nn.LSTM(H, H), "runs along the sequence"),
    "gru": (nn.GRU(H, H), "runs along the sequence"),
    "rnn": (nn.RNN(H, H), "runs along the sequence"),
    "convolution": (nn.Conv1d(H, H, 3, padding=1), "mixes neighbouring positions"),
    "pooling": (nn.AvgPool1d(2), "mixes neighbouring positions"),
    "batch norm": (nn.BatchNorm1d(H), "takes statistics over positions"),
}


@pytest.mark.parametrize(("module", "fault"), MIXING.values(), ids=MIXING)
def test_what_mixes_is_refused_by_name(module: nn.Module, fault: str) -> None:
    whole = within(embedding(), nn.Linear(H, H), Block(module))
    [problem] = problems(whole)
    assert problem.startswith(f"cp=2: trunk.2.part ({type(module).__name__}) {fault}")
    assert "nearest valid: " in problem
    assert problem.endswith("or cp=1")
    assert problems(whole, cp=1) == []


def test_attention_is_told_in_the_words_of_the_page() -> None:
    [problem] = problems(within(embedding(), Block(nn.MultiheadAttention(H, 2))))
    assert problem == (
        "cp=2: trunk.1.part (MultiheadAttention) does not exchange keys and values between cp "
        "ranks; nearest valid: lightning_megatron.layers.attention, or cp=1"
    )


def test_blocks_of_hugging_face_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    with torch.device("meta"):
        block = GPT2Block(transformers.GPT2Config(n_embd=H, n_head=2), 0)
    [problem] = problems(within(embedding(), block))
    assert problem.startswith("cp=2: trunk.1.attn (GPT2Attention) does not exchange keys")


def test_a_module_without_a_trunk_is_refused() -> None:
    [problem] = problems(nn.ModuleDict({"net": embedding()}))
    assert problem.startswith("cp=2: the module has no PipelineSequential")


def test_an_author_may_split() -> None:
    assert problems(within(nn.Embedding(16, H), Sees(H, H))) == []


def test_a_trunk_that_splits_nothing_is_refused() -> None:
    assert problems(within(nn.Embedding(16, H), CausalSelfAttention(H, 2))) == [
        "cp=2: nothing in the module splits the sequence; nearest valid: VocabParallelEmbedding "
        "or SplitContext"
    ]


def frozen() -> nn.Module:
    return nn.BatchNorm1d(H).eval()


ORDINARY: dict[str, Any] = {
    "ours": lambda: [embedding(), CausalSelfAttention(H, 2), ColumnParallelLinear(H, 16)],
    "no attention": lambda: [embedding(), nn.Linear(H, H), nn.LayerNorm(H), nn.Dropout(0.1)],
    "pointwise convolution": lambda: [embedding(), nn.Conv1d(H, H, 1)],
    "before the split": lambda: [nn.Conv1d(H, H, 3), Cut(), nn.Linear(H, H)],
    "between join and split": lambda: [embedding(), Join(), nn.LSTM(H, H), Cut(), nn.Linear(H, H)],
    "joined and split within": lambda: [embedding(), nn.Sequential(Join(), nn.LSTM(H, H), Cut())],
    "the author's word": lambda: [embedding(), Sees(H, H)],
    "frozen norm": lambda: [embedding(), frozen()],
    "planes of a position": lambda: [Cut(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 4)],
}


@pytest.mark.parametrize("items", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_modules_are_not_refused(items: Any) -> None:
    assert problems(within(*items())) == []


def test_a_transformer_of_ours_is_not_refused() -> None:
    with torch.device("meta"):
        network = Transformer(TransformerConfig.preset("tiny"))
    assert problems(network) == []


def test_what_follows_a_second_split_is_looked_at() -> None:
    items = [embedding(), Join(), nn.LSTM(H, H), Cut(), nn.GRU(H, H)]
    [problem] = problems(within(*items))
    assert problem.startswith("cp=2: trunk.4 (GRU) runs along the sequence")


def test_what_lies_outside_of_the_trunk_is_not_looked_at() -> None:
    module = within(embedding(), nn.Linear(H, H))
    module.add_module("pool", nn.AdaptiveAvgPool1d(1))
    module.add_module("lstm", nn.LSTM(H, H))
    assert problems(module) == []


def test_a_stranger_in_a_block_of_ours_is_seen() -> None:
    network = Transformer(TransformerConfig.preset("tiny"))
    network.trunk.get_submodule("layers.0").mlp = nn.LSTM(H, H)
    [problem] = problems(network)
    assert ".layers.0.mlp (LSTM) runs along the sequence" in problem
