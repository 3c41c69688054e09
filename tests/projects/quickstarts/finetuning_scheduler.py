"""finetuning-scheduler: layers thaw from epoch to epoch.

Its callback admits strategies by a list of names. `allow_untested=True` is its way to take others.
"""

import copy
import io

import lightning.pytorch as pl
import torch
from finetuning_scheduler import FinetuningScheduler, FTSCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.projects.quickstarts.quickstart import Numbers, Quickstart, weights

PHASES = {
    0: {"params": ["layers.2.weight", "layers.2.bias"], "max_transition_epoch": 1},
    1: {"params": ["layers.0.weight", "layers.0.bias"], "max_transition_epoch": 2},
}


class Network(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        thawed = filter(lambda p: p.requires_grad, self.parameters())
        return torch.optim.AdamW(thawed, lr=1e-2)


def main(run: Quickstart) -> None:
    model = Network()
    x = torch.randn(32, 4)
    samples = TensorDataset(x, x.sum(1, keepdim=True))
    loader = DataLoader(samples, batch_size=run.batch_size(8))

    def trainer(epochs: int, name: str) -> pl.Trainer:
        scheduler = FinetuningScheduler(
            ft_schedule=copy.deepcopy(PHASES), epoch_transitions_only=True, allow_untested=True
        )
        saver = FTSCheckpoint(run.folder / name, monitor="val_loss", save_last=True)
        options = run.options(default_root_dir=run.folder, callbacks=[scheduler, saver])
        return pl.Trainer(max_epochs=epochs, **options)

    def losses(trainer: pl.Trainer) -> Numbers:
        return {"loss": trainer.callback_metrics["val_loss"]}

    first = trainer(3, "first")
    with run.part("train") as numbers:
        first.fit(model, loader, loader)
        numbers |= losses(first)
    saver = first.checkpoint_callback
    with run.part("load") as numbers:
        numbers |= weights(Network.load_from_checkpoint(saver.best_model_path))
    with run.part("predict") as numbers:
        predictor = pl.Trainer(**run.options())
        numbers["predictions"] = torch.cat(predictor.predict(model, loader))
    with run.part("use") as numbers:
        numbers |= weights(model)
        numbers["outputs"] = copy.deepcopy(model)(x)
        torch.save(model, io.BytesIO())
    with run.part("resume") as numbers:
        second = trainer(4, "second")
        second.fit(Network(), loader, loader, ckpt_path=saver.last_model_path)
        numbers |= losses(second)
