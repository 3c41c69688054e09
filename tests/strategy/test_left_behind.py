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


class ByNeither(Leaving):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).sum()


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
    with pytest.raises(ConfigError, match="LOSSES: items of the PipelineSequential"):
        run(ByGlobal(LOSSES), 1)


def test_a_loss_that_begins_later_is_seen() -> None:
    with pytest.raises(ConfigError, match=r"self\.losses"):
        run(ByAttribute([], start=20), 64)


def test_what_no_step_uses_may_stay() -> None:
    run(ByNeither([]), 3)


def test_what_the_items_of_a_cp_rank_leave_is_of_its_part() -> None:
    module = ByAttribute([])
    watch = LeftBehind(module, [module.net], 0, cp=2)
    with pytest.raises(ConfigError, match=r"self\.losses: .* one of cp=2 parts"), watch.watched():
        module.net(torch.ones(1, 2))
