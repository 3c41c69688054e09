"""Losses that blocks leave where the step looks for them, on a stage that the step never ends."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_megatron import ConfigError, PipelineSequential
from lightning_megatron.pipeline.runner import StageBoundary
from lightning_megatron.strategy.left_behind import LeftBehind

LOSSES: list[Tensor] = []
"""A list of a user's file that blocks fill."""


class Block(nn.Linear):
    """Leaves a loss in the given list, from some forward on."""

    def __init__(self, losses: list[Tensor], start: int) -> None:
        super().__init__(2, 2)
        self.left, self.start, self.forwards = losses, start, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards >= self.start:
            self.left.append(self.weight.square().sum())
        return super().forward(x)


class Leaving(pl.LightningModule):
    def __init__(self, losses: list[Tensor], start: int = 1) -> None:
        super().__init__()
        self.losses = losses
        self.net = PipelineSequential(blocks=[Block(losses, start)])

    def run_stage(self) -> None:
        """What a step does on a stage before the last."""
        raise StageBoundary(self.net(torch.ones(1, 2)))


class ByAttribute(Leaving):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).sum() + sum(self.losses)


class ByGlobal(Leaving):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).sum() + sum(LOSSES)


class Detaches(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.left[-1] = self.left[-1].detach()
        return y


class Writes(nn.Linear):
    """Leaves a loss in the list of the file."""

    def forward(self, x: Tensor) -> Tensor:
        LOSSES.append(self.weight.square().sum())
        return super().forward(x)


class Keeps(nn.Linear):
    """Leaves the loss with itself, where ``hasattr`` finds it."""

    def forward(self, x: Tensor) -> Tensor:
        self.own = self.weight.square().sum()
        return super().forward(x)


def run(module: Leaving, forwards: int) -> None:
    watch = LeftBehind(module, [module.net], 0)
    for _ in range(forwards):
        module.losses.clear()
        with pytest.raises(StageBoundary), watch.watched():
            module.run_stage()


@pytest.fixture(autouse=True)
def no_losses() -> None:
    LOSSES.clear()


def test_a_list_of_the_module_is_seen() -> None:
    with pytest.raises(ConfigError, match=r"self\.losses: items of the PipelineSequential"):
        run(ByAttribute([]), 1)


def test_a_list_of_the_file_is_seen() -> None:
    module = ByGlobal([])
    module.net = PipelineSequential(blocks=[Writes(2, 2)])
    with pytest.raises(ConfigError, match="LOSSES: items of the PipelineSequential"):
        run(module, 1)


def test_a_loss_that_begins_later_is_seen() -> None:
    with pytest.raises(ConfigError, match=r"self\.losses"):
        run(ByAttribute([], start=20), 64)


def test_what_is_detached_may_stay() -> None:
    module = ByAttribute([])
    module.net = PipelineSequential(blocks=[Detaches(module.losses, 1)])
    run(module, 3)


def test_a_loss_of_a_block_s_own_is_seen() -> None:
    module = ByAttribute([])
    module.net = PipelineSequential(blocks=[Keeps(2, 2)])
    with pytest.raises(ConfigError, match=r"self\.net\.blocks\.0\.own: .*x\.detach\(\)"):
        run(module, 1)


def test_what_a_hook_leaves_later_in_a_layer_of_torch_is_seen() -> None:
    module, layer, forwards = ByAttribute([]), nn.Linear(2, 2), []

    def keep(kept: Any, args: Any, output: Tensor) -> None:
        forwards.append(kept)
        kept.size = output.square().mean() if len(forwards) > 2 else None

    layer.register_forward_hook(keep)
    layer.size = None  # type: ignore[assignment]
    module.net = PipelineSequential(blocks=[layer])
    with pytest.raises(ConfigError, match=r"self\.net\.blocks\.0\.size"):
        run(module, 3)


@pytest.mark.parametrize("made", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_that_torch_makes_in_each_forward_may_stay(made: Any) -> None:
    module = ByAttribute([])
    module.net = PipelineSequential(blocks=[made(nn.Linear(2, 2))])
    run(module, 2)


def test_what_a_step_keeps_before_the_call_may_stay() -> None:
    module = ByAttribute([])
    module.net = PipelineSequential(blocks=[nn.Linear(2, 2)])
    module.losses.append(nn.Linear(2, 2)(torch.ones(1, 2)))
    watch = LeftBehind(module, [module.net], 0)
    with pytest.raises(StageBoundary), watch.watched():
        module.run_stage()


def test_what_the_items_of_a_cp_rank_leave_is_of_its_part() -> None:
    module = ByAttribute([])
    watch = LeftBehind(module, [module.net], 0, cp=2)
    with pytest.raises(ConfigError, match=r"self\.losses: .* one of cp=2 parts"), watch.watched():
        module.net(torch.ones(1, 2))
