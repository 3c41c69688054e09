"""Modules of torch, and of nobody, that carry no plan."""

import functools
import itertools
import math
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_megatron import MegatronStrategy, adopt, gather
from tests.adoption.harness import fit, largest_difference
from tests.adoption.plain_models import MODELS, Early, build, example

LAYOUTS = {
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2, "num_microbatches": 2}),
    "tp2 pp2": (4, {"tp": 2, "pp": 2, "num_microbatches": 2}),
    "pp2 zero3": (4, {"pp": 2, "zero": 3, "microbatch_size": 1}),
    "tp4": (4, {"tp": 4}),
    "tp2 sp": (2, {"tp": 2, "sequence_parallel": True}),
}
SHARES = {"tp2": 0.65, "tp2 pp2": 0.5, "tp4": 0.5}
"""Share of the parameters that a rank holds at most."""


def rows() -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, 64, (12, 12), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(12) >= 12 - torch.arange(12).unsqueeze(1) % 5
    return [{"tokens": t, "padding": p} for t, p in zip(tokens, padding, strict=True)]


class Training(L.LightningModule):
    """Plain step, and a validation that sees every output."""

    def __init__(self, model: torch.nn.Module, copies: int = 1) -> None:
        super().__init__()
        self.model = model
        self._copies = copies
        self.seen: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(**batch)
        return F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).square().mean()
        self.log("squares", loss, sync_dist=True, batch_size=len(batch["tokens"]))
        return loss

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics.get("squares", torch.tensor(0.0))))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-5)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(rows(), batch_size=4 // self._copies)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(rows()[:4], batch_size=4 // self._copies)


@functools.cache
def reference(kind: str) -> tuple[dict[str, Tensor], float]:
    module = Training(build(kind))
    trainer = fit(module, "auto", 1)
    return module.state_dict(), float(trainer.callback_metrics["squares"])


def job(kind: str, layout: dict[str, Any], world: int, traced: bool = False) -> Any:
    others = math.prod(layout.get(axis, 1) for axis in ("tp", "pp"))
    model = build(kind)
    if traced:
        model.example_input_array = example()
    module = Training(adopt(model), world // others)
    trainer = fit(module, MegatronStrategy(**layout, gather_at_end=False), world)
    held = sum(p.numel() for p in module.parameters())
    weights, squares = gather(module), float(trainer.callback_metrics["squares"])
    return (weights, squares, held) if trainer.global_rank == 0 else None


_OFTEN = {
    ("encoder", "tp2 sp", False),
    ("translator", "pp2", False),
    ("translator", "tp2", True),
    ("own", "tp2", True),
    ("own", "pp2", False),
}
"""Model, layout, and whether the plan comes from a run on an example."""


@pytest.mark.parametrize(
    ("kind", "layout", "traced"),
    [
        pytest.param(*case, marks=() if case in _OFTEN else pytest.mark.thorough)
        for case in itertools.product(MODELS, LAYOUTS, (False, True))
    ],
)
def test_adopted_module_trains_and_evaluates_as_the_unmodified_one(pool, kind, layout, traced):
    world, options = LAYOUTS[layout]
    weights, squares, held = pool.run(world, job, kind, options, world, traced)[0]
    expected, expected_squares = reference(kind)
    assert largest_difference(weights, expected) < 1e-9
    assert squares == pytest.approx(expected_squares, abs=1e-9)
    if traced and layout in SHARES:
        assert held < SHARES[layout] * sum(p.numel() for p in build(kind).parameters())


class ReadsEarly(Training):
    """Step whose loss reads what an early part of the model has made."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, first = self.model(**batch)
        loss = F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())
        return loss + first.square().mean()

    validation_step = None
    val_dataloader = None


def early(layout: dict[str, Any], world: int) -> Any:
    torch.manual_seed(0)
    module = ReadsEarly(adopt(Early().double()))
    fit(module, MegatronStrategy(**layout), world)
    return gather(module)


def test_loss_that_reads_what_an_earlier_stage_has_is_refused(pool):
    with pytest.raises(Exception, match="a loss, reads values of an activation"):
        pool.run(2, early, {"pp": 2}, 2, grace=1.0)  # the other rank only waits


def test_loss_that_reads_what_the_first_block_made_is_the_same_over_tp(pool):
    torch.manual_seed(0)
    module = ReadsEarly(Early().double())
    fit(module, "auto", 1)
    found = pool.run(2, early, {"tp": 2}, 2)[0]
    assert largest_difference(found, module.state_dict()) < 1e-9
