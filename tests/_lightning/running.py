"""A Trainer and a module of Lightning's own, for the tests of what Lightning does."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from typing_extensions import override


def make_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    """A quiet Trainer of two batches of training and one of validation."""
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "limit_train_batches": 2,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**quiet, **options})


class Module(BoringModel):
    """Notes the hooks that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append("training_step")
        return super().training_step(batch, batch_idx)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append("validation_step")
        return super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.calls.append("on_train_epoch_end")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("on_before_optimizer_step")


class On(pl.Callback):
    """Calls functions at hooks."""

    def __init__(self, **functions: Any) -> None:
        for hook, function in functions.items():
            setattr(self, hook, self._calling(function))

    def _calling(self, function: Any) -> Any:
        def call(trainer: pl.Trainer, module: pl.LightningModule, *args: Any, **more: Any) -> None:
            function(trainer, module)

        return call
