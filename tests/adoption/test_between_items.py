"""What a model does between the items of its pipeline."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_megatron import ConfigError, adopt
from lightning_megatron.adoption.column_input import entered, entered_once


class Network(nn.Module):
    """Three items; classes derived from it differ in what is between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.register_buffer("calls", torch.zeros(()))
        self.steps = 0

    def forward(self, x: Tensor, share: float = 1.0) -> Tensor:
        return self.blocks[1](self.blocks[0](self.enter(x)))


class Copies(Network):
    def forward(self, x: Tensor, share: float = 1.0) -> Tensor:
        h = self.enter(x)
        kept = torch.zeros(len(x), 2, 8)
        kept[:, 1:] = h[:, None]
        return self.blocks[1](self.blocks[0](h) + kept.sum(1))


class Counts(Network):
    def forward(self, x: Tensor, share: float = 1.0) -> Tensor:
        self.calls += 1
        self.steps += 1
        return self.blocks[1](self.blocks[0](self.enter(x)) * self.steps)


class Keep(nn.Module):
    def forward(self, x: Tensor, share: float) -> Tensor:
        return x[: round(share * len(x))]


class Shares(Network):
    def __init__(self) -> None:
        super().__init__()
        self.enter = Keep()

    def forward(self, x: Tensor, share: float = 1.0) -> Tensor:
        h = self.enter(x, share)
        return self.blocks[1](self.blocks[0](h) / h.shape[0])


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not bool(x.isnan().any())
        return x.flatten(0, 1)


class Guesses(Network):
    def __init__(self) -> None:
        super().__init__()
        self.enter = Reads()

    def forward(self, x: Tensor, share: float = 1.0) -> Tensor:
        return self.blocks[1](self.blocks[0](self.enter(x[:, None])))


def adopted(kind: type[Network]) -> Any:
    return adopt(kind(), tp_plan={}, trunk=["enter", "blocks.*"])


def test_a_rehearsal_leaves_nothing_behind() -> None:
    model, x = adopted(Counts), torch.randn(4, 8)
    out = model.run_in_two(1, (x,), {})
    # One call of each stage, which are in one process here.
    assert (float(model.calls), model.steps) == (2, 2)
    plain = Counts()
    plain.steps = 1
    torch.testing.assert_close(out, plain(x))


def test_shapes_follow_numbers_among_the_arguments() -> None:
    model, plain, x = adopted(Shares), Shares(), torch.randn(8, 8)
    for share in (1.0, 0.5, 0.25):
        torch.testing.assert_close(model.run_in_two(1, (x, share), {}), plain(x, share))


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Copies, "writes an activation into a tensor"), (Guesses, "came where this stage counts on")],
)
def test_what_needs_values_of_another_stage_is_refused(kind: type[Network], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adopted(kind).run_in_two(1, (torch.randn(4, 8),), {})


AXIS: Any = SimpleNamespace(size=2)


def test_columns_share_what_they_enter_and_keep_nothing_alive() -> None:
    x = F.layer_norm(torch.randn(4, 8, requires_grad=True), (8,))
    known = entered(x, AXIS)
    assert entered(x, AXIS) is known
    assert entered_once(x, AXIS) is known
    assert entered(known, AXIS) is known
    assert entered(x, SimpleNamespace(size=2)) is not known
    alive = weakref.ref(x)
    del x, known
    gc.collect()
    assert alive() is None


def test_what_has_changed_is_entered_again() -> None:
    x = torch.randn(4, 8, requires_grad=True) * 1
    known = entered(x, AXIS)
    with torch.no_grad():
        x.mul_(2)
    assert entered(x, AXIS) is not known
    parameter = nn.Parameter(torch.ones(4))
    assert entered(parameter, AXIS) is not entered(parameter, AXIS)
    assert not vars(parameter)
