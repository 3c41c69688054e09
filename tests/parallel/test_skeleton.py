"""Copies of a trunk's structure."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import PipelineSequential
from lightning_megatron.errors import ConfigError
from lightning_megatron.parallel.skeleton import changed_since, skeleton_of, skeleton_problems


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3))


class Item(nn.Module):
    def __init__(self, shared: nn.Module, outside: nn.Module) -> None:
        super().__init__()
        self.shared = shared
        self.linear = nn.Linear(3, 3)
        self.lstm = nn.LSTM(3, 3, batch_first=True)
        self.constant = torch.arange(3.0)
        self.outside = [outside]
        self.options = {"depth": 1}

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(self.linear(x))[0]
        return y + self.shared.table + self.constant


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Shared()
        self.trunk = PipelineSequential(layers=[Item(shared, self) for _ in range(3)])
        layers: Any = self.trunk.layers
        layers[2].linear.weight = layers[0].linear.weight


def test_structure_and_ties_are_copied_and_values_are_not() -> None:
    model = Model()
    items: list[Any] = skeleton_of(model)
    tensors = [t for item in items for t in (*item.parameters(), *item.buffers())]
    assert all(t.is_meta for t in tensors)
    assert items[2].linear.weight is items[0].linear.weight
    assert items[1].linear.weight is not items[0].linear.weight
    assert items[0].shared is items[1].shared
    assert items[0].outside[0] is model
    layers: Any = model.trunk.layers
    assert items[0].constant is layers[0].constant
    assert items[0].options == {"depth": 1}
    assert items[0].options is not layers[0].options
    names = [name for name, _ in model.trunk.named_parameters()]
    model.trunk.refill(items)
    assert [name for name, _ in model.trunk.named_parameters()] == names


def test_copies_run_once_they_have_memory() -> None:
    model = Model()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    x = torch.randn(2, 3, 3)
    expected = model.trunk(x)
    model.trunk.refill(skeleton_of(model))
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    assert torch.equal(model.trunk(x), expected)


def test_what_cannot_be_copied_is_named() -> None:
    model = Model()
    layers: Any = model.trunk.layers
    layers[1].generator = (i for i in range(3))
    with pytest.raises(ConfigError, match="item 'layers.1'"):
        skeleton_of(model)


def test_references_from_outside_are_found() -> None:
    model = Model()
    assert skeleton_problems(model, model.trunk, "trunk") == []
    layers: Any = model.trunk.layers
    model.first = layers[0]
    model.weights = [layers[1].linear.weight]
    model.call = layers[2].forward
    layers[1].compile()
    found = skeleton_problems(model, model.trunk, "trunk")
    assert [p.split()[1] for p in found] == ["self.weights", "self.call", "self.first", "item"]


def test_changes_after_the_copy_are_found() -> None:
    model = Model()
    items = skeleton_of(model)
    assert changed_since(model.trunk, items) is None
    layers: Any = model.trunk.layers
    linear, layers[1].linear = layers[1].linear, nn.Sequential(nn.Linear(3, 3))
    assert "layers.1.linear" in str(changed_since(model.trunk, items))
    layers[1].linear = linear
    del layers[0].shared
    assert changed_since(model.trunk, items) == "layers.0.shared was removed"
