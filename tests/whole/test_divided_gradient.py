"""What a parameter is whose gradient lies in rows, to those who look and to all others."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.whole.divided_gradient import DividedGradients, DividedWeight
from lightning_megatron.whole.memory import on_memory


class Rows:
    """Rows whose whole gradient is twos."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.gradient: Tensor | None = torch.ones(1)
        self.asked = 0

    @on_memory
    def show_gradient(self) -> None:
        self.asked += 1
        self.gradient = None
        self.parameter.grad = torch.full_like(self.parameter, 2.0)


class Mine(nn.Parameter):
    def name(self) -> str:
        return "mine"


@pytest.fixture
def rows() -> Rows:
    return Rows(nn.Parameter(torch.zeros(2)))


def test_a_look_gathers_once_and_what_is_written_stays(rows: Rows) -> None:
    weight = rows.parameter
    DividedGradients([rows])
    weight.grad += 1.0
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]
    assert rows.asked == 1


def test_what_is_assigned_is_the_gradient(rows: Rows) -> None:
    weight = rows.parameter
    DividedGradients([rows])
    weight.grad = torch.zeros(2)
    assert (rows.gradient, rows.asked, weight.grad.tolist()) == (None, 0, [0.0, 0.0])
    del weight.grad
    assert weight.grad is None


def test_memory_is_what_this_rank_has(rows: Rows) -> None:
    weight = rows.parameter
    DividedGradients([rows])
    on_memory(lambda: setattr(weight, "grad", None))()
    assert on_memory(lambda: weight.grad)() is None
    assert rows.asked == 0
    assert rows.gradient is not None


def test_a_compiler_does_not_look(rows: Rows) -> None:
    weight = rows.parameter
    DividedGradients([rows])
    double = torch.compile(lambda x: x * weight, backend="aot_eager", fullgraph=True)
    double(torch.ones(3, 2)).sum().backward()
    double(torch.ones(4, 2)).sum().backward()
    assert rows.asked == 0


def test_copies_are_plain(rows: Rows) -> None:
    weight = rows.parameter
    net = nn.Module()
    net.weight = weight
    DividedGradients([rows])
    stored = io.BytesIO()
    torch.save(net, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False).weight
    for made in (copy.deepcopy(weight), copy.copy(weight), loaded, copy.deepcopy(net).weight):
        assert type(made) is nn.Parameter
        assert not vars(made)
    assert type(weight) is DividedWeight
    assert type(pickle.loads(pickle.dumps(weight))) is nn.Parameter
    assert rows.asked == 0


def test_a_class_of_its_own_stays() -> None:
    rows = Rows(Mine(torch.zeros(2)))
    weight = rows.parameter
    divided = DividedGradients([rows])
    assert isinstance(weight, Mine)
    assert weight.name() == "mine"
    assert type(copy.deepcopy(weight)) is Mine
    divided.end()
    assert type(weight) is Mine
    assert not vars(weight)
