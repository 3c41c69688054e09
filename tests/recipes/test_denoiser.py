"""The module of the recipe `diffusion`: noise that is drawn in a step, under every axis."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_megatron import MegatronStrategy
from lightning_megatron.recipes.denoiser import Denoiser, ShapesDataModule
from lightning_megatron.testing import WorkerPool


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train_loss"]))


def job(devices: int, layout: dict[str, int]) -> list[float]:
    """Losses of three steps and of validation."""
    pl.seed_everything(0, verbose=False)
    losses = Losses()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=MegatronStrategy(num_microbatches=1, **layout),
        max_steps=3,
        limit_train_batches=3,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Denoiser(picture=8, size=16, layers=2, heads=2)
    trainer.fit(module, ShapesDataModule(picture=8, number=64, batch_size=8))
    return [*losses.seen, float(trainer.callback_metrics["val_loss"])]


def test_losses_do_not_depend_on_the_layout(pool: WorkerPool) -> None:
    [alone] = pool.run(1, job, 1, {})
    assert len(alone) == 4
    for layout in ({"pp": 2}, {"tp": 2}):
        for losses in pool.run(2, job, 2, layout):
            assert losses == pytest.approx(alone, rel=1e-4), layout


def test_sampling_walks_from_noise_to_pictures() -> None:
    drawn = Denoiser(picture=8, size=16, layers=1, heads=2).sample(3, steps=2)
    assert drawn.shape == (3, 1, 8, 8)
    assert torch.isfinite(drawn).all()
