"""Initial values depend on the seed and the name of a parameter, not on the layout."""

import copy

import pytest
import torch
from torch import nn

from lightning_megatron.build.init import materialize, uninitialisable
from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.experts.stack import Experts
from lightning_megatron.models.config import TransformerConfig
from lightning_megatron.models.transformer import Transformer
from lightning_megatron.topology.tensor_shard import TensorShard
from tests.layers.parity import distribute, local_part, make_topology

CONFIG = TransformerConfig(
    vocab_size=16, hidden_size=16, num_heads=4, num_kv_heads=2, num_layers=2, qkv_bias=True
)


def _on_meta(build):
    with torch.device("meta"):
        return build()


def _whole():
    model = _on_meta(lambda: Transformer(CONFIG))
    materialize(model, "model", seed=3, device="cpu")
    return model


def _split(tp):
    topology = make_topology(tp)
    whole = _whole()
    model = distribute(_on_meta(lambda: Transformer(CONFIG)), topology)
    # Unit by unit, as the strategy does.
    for name, block in model.trunk.layers.named_children():
        materialize(block, f"model.trunk.layers.{name}", seed=3, device="cpu")
    materialize(model, "model", seed=3, device="cpu")
    for name, parameter in model.named_parameters():
        expected = local_part(model, name, whole.get_parameter(name), parameter)
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("tp", [2, 4])
def test_values_are_bit_identical_whatever_tp(pool, tp):
    pool.run(tp, _split, tp)


def test_values_depend_on_seed_and_name():
    model = _whole()
    block = model.trunk.layers[0]
    assert not torch.equal(block.attention.wk.weight, block.attention.wv.weight)
    other = _on_meta(lambda: Transformer(CONFIG))
    materialize(other, "model", seed=4, device="cpu")
    assert not torch.equal(other.trunk.head.weight, model.trunk.head.weight)
    assert torch.equal(block.attention.wq.bias, torch.zeros(16))
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 2, rel=0.1)


def test_the_state_of_the_default_generator_is_kept():
    before = torch.get_rng_state()
    materialize(_on_meta(lambda: nn.Linear(4, 4)), seed=0, device="cpu")
    assert torch.equal(before, torch.get_rng_state())


def test_tied_parameters_stay_one_and_get_the_values_of_the_first_name():
    config = TransformerConfig.preset("tiny", num_layers=1, tied_embeddings=True)
    tied = _on_meta(lambda: Transformer(config))
    materialize(tied, seed=0, device="cpu")
    assert tied.trunk.head.weight is tied.trunk.embedding.tokens.weight
    free = _on_meta(lambda: Transformer(TransformerConfig.preset("tiny", num_layers=1)))
    materialize(free, seed=0, device="cpu")
    assert torch.equal(tied.trunk.head.weight, free.trunk.embedding.tokens.weight)


def test_a_name_outside_of_the_unit_may_be_the_canonical_one():
    config = TransformerConfig.preset("tiny", num_layers=1, tied_embeddings=True)
    model = _on_meta(lambda: Transformer(config))
    materialize(model, seed=0, device="cpu")
    head = _on_meta(lambda: Transformer(config)).trunk.head
    names = {"trunk.head.weight": "trunk.embedding.tokens.weight"}
    materialize(head, "trunk.head", seed=0, device="cpu", canonical=names)
    assert torch.equal(head.weight, model.trunk.head.weight)


class _TiedPlain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.lstm = nn.LSTM(3, 3)


def test_plain_modules_reset_themselves():
    model, again = _on_meta(_TiedPlain), _on_meta(_TiedPlain)
    materialize(model, seed=0, device="cpu")
    materialize(again.norm, "norm", seed=0, device="cpu")
    materialize(again, seed=0, device="cpu")
    assert model.head.weight is model.embedding.weight
    # A standard normal: the own reset of the head would have bounded it by 1 / sqrt(3).
    assert model.head.weight.abs().max() > 1
    assert torch.equal(model.norm.running_var, torch.ones(3))
    assert torch.equal(model.attention.out_proj.bias, torch.zeros(4))
    states = zip(model.state_dict().items(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for (_, a), b in states)


class _LargestDraw(Experts):
    """Notes how many numbers it draws at a time."""

    largest = 0

    def init_parameter(self, name, full, generator=None):
        self.largest = max(self.largest, full.numel())
        super().init_parameter(name, full, generator)


def test_experts_are_drawn_one_by_one_and_only_those_that_a_rank_holds():
    def build():
        return _LargestDraw(4, 6, 5, init_std=0.5)

    whole = _on_meta(build).to(torch.bfloat16)
    materialize(whole, "experts", seed=3, device="cpu")
    assert whole.up.std().item() == pytest.approx(0.5, rel=0.2)
    assert len({matrix.sum().item() for matrix in whole.up}) == 4
    for first in (0, 2):
        part = _on_meta(build).to(torch.bfloat16)
        for name, stack in list(part.named_parameters()):
            shape = tuple(stack.shape)
            setattr(part, name, nn.Parameter(stack[first : first + 2].detach()))
            shard = TensorShard(full_shape=shape, dim=0, offset=first, axis="ep", stacked=True)
            part.tensor_shards = {**part.tensor_shards, name: shard}
        materialize(part, "experts", seed=3, device="cpu")
        assert part.largest == 6 * 5
        for name, stack in part.named_parameters():
            assert torch.equal(stack, whole.get_parameter(name)[first : first + 2]), name


def test_real_values_are_left_alone():
    model = nn.Sequential(nn.Linear(3, 3), _on_meta(lambda: nn.Linear(3, 3)))
    model[1].bias = nn.Parameter(torch.full((3,), 7.0))
    before = copy.deepcopy(model[0].state_dict())
    materialize(model, seed=0, device="cpu")
    assert all(torch.equal(before[name], t) for name, t in model[0].state_dict().items())
    assert torch.equal(model[1].bias, torch.full((3,), 7.0))
    assert not model[1].weight.is_meta


class _NoRule(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


class _HalfRule(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.forgotten = nn.Parameter(torch.ones(2))


def test_modules_without_a_rule_are_named():
    model = _on_meta(lambda: nn.Sequential(nn.Linear(2, 2), _NoRule()))
    assert uninitialisable(model) == ["1"]
    assert uninitialisable(model, "trunk") == ["trunk.1"]
    assert uninitialisable(nn.Sequential(_NoRule())) == []
    with pytest.raises(ConfigError, match=r"trunk\.1: .*reset_parameters"):
        materialize(model, "trunk", seed=0, device="cpu")


def test_a_parameter_that_reset_forgets_is_named():
    model = _on_meta(lambda: nn.Sequential(_HalfRule()))
    with pytest.raises(ConfigError, match="0: .*leaves forgotten without"):
        materialize(model, seed=0, device="cpu")


def test_dtype_and_frozenness_survive():
    layer = _on_meta(lambda: nn.Linear(2, 2, dtype=torch.bfloat16).requires_grad_(False))
    materialize(layer, seed=0, device="cpu")
    assert layer.weight.dtype == torch.bfloat16
    assert not layer.weight.requires_grad


def test_hooks_on_parameters_without_values_stay() -> None:
    with torch.device("meta"):
        layer = nn.Linear(3, 2)
    layer.weight.register_hook(lambda gradient: gradient * 0.5)
    seen: list[torch.Tensor] = []
    layer.bias.register_post_accumulate_grad_hook(seen.append)
    materialize(layer, seed=1, device="cpu")
    layer(torch.ones(1, 3)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 0.5))
    assert len(seen) == 1
